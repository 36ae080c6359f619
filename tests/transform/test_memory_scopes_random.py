# SPDX-License-Identifier: Apache-2.0
"""Random programs: after PlanMemoryScopes every demand is met, and they compute what they did.

An interpreter runs both modules on arrays that know their scope. It refuses a kernel, a collective
or a result that finds a tensor in a scope that it was not made for.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import tirx as T

from tests.transform.scope_programs import plan
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.errors import TransformError

TENSOR = relax.TensorType((4,), "float32")
TRANSPARENT = ("global", "ipc_memory")


@I.ir_module(check_well_formed=False)
class Kernels:
    """`name` of the attribute says what a kernel does; its parameters say where."""

    @T.prim_func(private=True)
    def move(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        T.func_attr({"name": "move"})
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def move_from_a(
        a: T.Buffer((4,), "float32", scope="global.texture"), b: T.Buffer((4,), "float32")
    ):
        T.func_attr({"name": "move"})
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def move_to_b(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32", scope="global.vtcm")):
        T.func_attr({"name": "move"})
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def move_to_ipc(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32", scope="ipc_memory")):
        T.func_attr({"name": "move"})
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def move_pinned(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        T.func_attr({"name": "move", "tvm_ipc.param_scopes": ["global", ""]})
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True, check_well_formed=False)
    def move_escaping(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
        T.func_attr({"name": "move"})
        T.evaluate(T.call_extern("void", "look", a.data))
        for i in range(4):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def add(a: T.Buffer((4,), "float32")):
        T.func_attr({"name": "add"})
        for i in range(4):
            a[i] = a[i] + T.float32(1)

    @T.prim_func(private=True)
    def add_in_a(a: T.Buffer((4,), "float32", scope="global.texture")):
        T.func_attr({"name": "add"})
        for i in range(4):
            a[i] = a[i] + T.float32(1)


#: Kernels, and scopes of allocations, with and without such that code must be compiled for.
MOVES = ["move", "move", "move_to_ipc", "move_pinned", "move_escaping"]
OPAQUE_MOVES = [*MOVES, "move_from_a", "move_to_b"]
ADDS = ["add"]
OPAQUE_ADDS = [*ADDS, "add_in_a"]
SCOPES = ["global"] * 13 + ["ipc_memory"]
OPAQUE_SCOPES = [*SCOPES, "global.texture"]


def global_var(name: str, params: list, result) -> tvm.ir.GlobalVar:
    var = tvm.ir.GlobalVar(name)
    relax.expr._update_type(var, relax.FuncType(params, result, False))
    return var


class Generator:
    """Builds a module of random functions, each of which calls those that came before it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        opaque = seed % 3 > 0
        self.moves = OPAQUE_MOVES if opaque else MOVES
        self.adds = OPAQUE_ADDS if opaque else ADDS
        self.scopes = OPAQUE_SCOPES if opaque else SCOPES
        self.kernels = {
            g.name_hint: global_var(g.name_hint, [TENSOR] * len(f.params), relax.TupleType([]))
            for g, f in Kernels.functions_items()
        }
        self.functions: list[tuple[tvm.ir.GlobalVar, relax.Function]] = []
        self.names = 0

    def module(self) -> tvm.IRModule:
        for number in range(self.random.randint(0, 3)):
            self.function(f"f{number}", 2)
        self.function("main", 3)
        functions = dict(self.functions)
        functions |= {var: Kernels[name] for name, var in self.kernels.items()}
        return relax.transform.Normalize()(tvm.IRModule(functions))

    def function(self, name: str, count: int) -> None:
        params = [relax.Var(f"p{k}", TENSOR) for k in range(count)]
        flag = relax.Var("c", relax.TensorType((), "bool"))
        bindings: list[relax.Binding] = []
        pool = list(params)
        self.statements(bindings, pool, flag, self.random.randint(2, 9), 2)
        many = self.random.random() < 0.4
        results = [self.random.choice(pool) for _ in range(2 if many else 1)]
        ty = relax.TupleType([TENSOR, TENSOR]) if many else TENSOR
        body = self.var("out", ty)
        bindings.append(relax.VarBinding(body, relax.Tuple(results) if many else results[0]))
        sequence = relax.SeqExpr([relax.BindingBlock(bindings)], body)
        function = relax.Function([*params, flag], sequence, ty, is_pure=False)
        if name == "main" or self.random.random() < 0.2:
            function = function.with_attr("global_symbol", name)
        self.functions.append((global_var(name, [p.ty for p in function.params], ty), function))

    def var(self, name: str, ty=TENSOR) -> relax.Var:
        self.names += 1
        return relax.Var(f"{name}{self.names}", ty)

    def bind(self, bindings: list, value, ty=TENSOR, name: str = "v") -> relax.Var:
        var = self.var(name, ty)
        bindings.append(relax.VarBinding(var, value))
        return var

    def alloc(self, bindings: list) -> relax.Var:
        call = relax.op.builtin.alloc_tensor(
            relax.ShapeExpr([4]), "float32", 0, self.random.choice(self.scopes)
        )
        return self.bind(bindings, call, name="alloc")

    def statements(self, bindings: list, pool: list, flag, count: int, depth: int) -> None:
        for _ in range(count):
            kind = self.random.choices(
                [
                    "move",
                    "call_tir",
                    "reduce",
                    "add",
                    "alias",
                    "tuple",
                    "if",
                    "call",
                    "look",
                    "fill",
                ],
                [4, 3, 4, 1, 1, 2, 3 if depth else 0, 3 if self.functions else 0, 0.5, 1],
            )[0]
            getattr(self, f"make_{kind}")(bindings, pool, flag, depth)

    def kernel(self, bindings: list, name: str, *args) -> None:
        call = relax.Call(self.kernels[name], list(args))
        self.bind(bindings, call, relax.TupleType([]), "_")

    def packed(self, bindings: list, name: str, *args) -> None:
        ty = relax.AnyType()
        self.bind(bindings, relax.Call(relax.ExternFunc(name), list(args), ty_args=[ty]), ty, "_")

    def make_move(self, bindings: list, pool: list, flag, depth: int) -> None:
        out = self.alloc(bindings)
        self.kernel(bindings, self.random.choice(self.moves), self.random.choice(pool), out)
        pool.append(out)

    def make_reduce(self, bindings: list, pool: list, flag, depth: int) -> None:
        out = self.alloc(bindings)
        send = self.random.choice(pool)
        name = "runtime.disco.cuda_ipc.custom_allreduce"
        self.packed(bindings, name, send, relax.prim_value(1), out)
        pool.append(out)

    def make_call_tir(self, bindings: list, pool: list, flag, depth: int) -> None:
        callee, source = self.kernels[self.random.choice(self.moves)], self.random.choice(pool)
        if self.random.random() < 0.3:
            callee = self.kernels[self.random.choice(self.adds)]
            call = relax.op.call_tir_inplace(callee, relax.Tuple([source]), [0], [TENSOR])
        else:
            call = relax.op.call_tir(callee, relax.Tuple([source]), TENSOR)
        pool.append(self.bind(bindings, call))

    def make_fill(self, bindings: list, pool: list, flag, depth: int) -> None:
        out = self.alloc(bindings)
        constant = relax.const(np.full(4, self.random.randint(1, 3), "float32"))
        self.kernel(bindings, self.random.choice(self.moves), constant, out)
        pool.append(out)

    def make_add(self, bindings: list, pool: list, flag, depth: int) -> None:
        self.kernel(bindings, self.random.choice(self.adds), self.random.choice(pool))

    def make_look(self, bindings: list, pool: list, flag, depth: int) -> None:
        self.packed(bindings, "theirs", self.random.choice(pool))

    def make_alias(self, bindings: list, pool: list, flag, depth: int) -> None:
        source = self.random.choice(pool)
        pool.append(
            self.bind(bindings, self.random.choice([source, relax.op.reshape(source, (4,))]))
        )

    def make_tuple(self, bindings: list, pool: list, flag, depth: int) -> None:
        pair = [self.random.choice(pool), self.random.choice(pool)]
        t = self.bind(bindings, relax.Tuple(pair), relax.TupleType([TENSOR, TENSOR]), "t")
        pool.append(self.bind(bindings, relax.TupleGetItem(t, self.random.randint(0, 1))))

    def make_if(self, bindings: list, pool: list, flag, depth: int) -> None:
        many = self.random.random() < 0.3
        ty = relax.TupleType([TENSOR, TENSOR]) if many else TENSOR
        branches = []
        for _ in range(2):
            inner: list = []
            visible = list(pool)
            self.statements(inner, visible, flag, self.random.randint(0, 3), depth - 1)
            values = [self.random.choice(visible) for _ in range(2)]
            body = self.bind(inner, relax.Tuple(values) if many else values[0], ty)
            branches.append(relax.SeqExpr([relax.BindingBlock(inner)], body))
        self.results(bindings, pool, relax.If(flag, *branches), ty)

    def make_call(self, bindings: list, pool: list, flag, depth: int) -> None:
        var, function = self.random.choice(self.functions)
        args = [self.random.choice(pool) for _ in function.params[:-1]]
        self.results(bindings, pool, relax.Call(var, [*args, flag]), function.ret_ty)

    def results(self, bindings: list, pool: list, value, ty) -> None:
        result = self.bind(bindings, value, ty, "r")
        if isinstance(ty, relax.TupleType):
            pool += [self.bind(bindings, relax.TupleGetItem(result, i)) for i in range(2)]
        else:
            pool.append(result)


class Memory:
    def __init__(self, data: np.ndarray, scope: str) -> None:
        self.data, self.scope = data, scope


class Interpreter:
    """Runs a module; with `strict`, only where every demand is met."""

    def __init__(self, module: tvm.IRModule, strict: bool) -> None:
        self.module, self.strict = module, strict
        self.functions = {g.name_hint: f for g, f in module.functions_items()}
        self.copies = 0

    def main(self, data: list[np.ndarray], flag: bool) -> list[np.ndarray]:
        params = [Memory(array.copy(), "global") for array in data]
        result = self.call("main", [*params, flag])
        results = list(result) if isinstance(result, list) else [result]
        return [memory.data for memory in [*results, *params]]

    def demand(self, met: bool, what: str) -> None:
        assert met or not self.strict, what

    def call(self, name: str, args: list):
        function = self.functions[name]
        env = dict(zip(map(hash, function.params), args, strict=True))
        result = self.sequence(function.body, env)
        if "global_symbol" in function.attrs:
            for memory in [*(result if isinstance(result, list) else [result]), *args[:-1]]:
                self.demand(memory.scope == "global", f"{name} meets the outside in {memory.scope}")
        return result

    def sequence(self, sequence, env: dict):
        for binding in bindings_of(sequence):
            env[hash(binding.var)] = self.evaluate(binding.value, env)
        return self.evaluate(sequence.body, env)

    def evaluate(self, expr, env: dict):
        if isinstance(expr, relax.Var):
            return env[hash(expr)]
        if isinstance(expr, tvm.ir.GenericConst):
            return Memory(expr.value.numpy().astype("float64"), "global")
        if isinstance(expr, relax.Tuple):
            return [self.evaluate(field, env) for field in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self.evaluate(expr.tuple_value, env)[int(expr.index)]
        if isinstance(expr, relax.If):
            branch = expr.true_branch if env[hash(expr.cond)] else expr.false_branch
            return self.sequence(branch, env)
        assert isinstance(expr, relax.Call), expr
        if isinstance(expr.op, tvm.ir.Op):
            if str(expr.op.name) == "relax.reshape":
                return self.evaluate(expr.args[0], env)
            if str(expr.op.name) == "relax.builtin.alloc_tensor":
                return Memory(np.full(4, np.nan), str(expr.args[3].value))
            args = self.evaluate(expr.args[1], env)
            if str(expr.op.name) == "relax.call_tir":
                args.append(Memory(np.full(4, np.nan), "global"))
            self.kernel(self.functions[str(expr.args[0].name_hint)], args)
            return args[-1]
        if isinstance(expr.op, relax.ExternFunc):
            args = [
                self.evaluate(a, env)
                for a in expr.args
                if isinstance(a, relax.Var | tvm.ir.GenericConst)
            ]
            return self.packed(str(expr.op.global_symbol), args)
        name = str(expr.op.name_hint)
        args = [self.evaluate(a, env) for a in expr.args]
        if isinstance(self.functions[name], relax.Function):
            return self.call(name, args)
        return self.kernel(self.functions[name], args)

    def kernel(self, function, args: list[Memory]) -> None:
        pinned = function.attrs.get("tvm_ipc.param_scopes", ["", ""])
        for param, pin, memory in zip(function.params, pinned, args, strict=False):
            scope = str(param.ty.storage_scope)
            if scope == "global" and not pin:
                self.demand(memory.scope in TRANSPARENT, f"kernel finds {memory.scope}")
            else:
                self.demand(memory.scope == (str(pin) or scope), f"{scope} is {memory.scope}")
        if str(function.attrs["name"]) == "move":
            args[1].data[:] = args[0].data * 2
        else:
            args[0].data += 1

    def packed(self, name: str, args: list[Memory]) -> None:
        if name == "tvm_ipc.copy":
            self.copies += 1
            args[1].data[:] = args[0].data
        elif name == "theirs":
            self.demand(args[0].scope in TRANSPARENT, f"their function finds {args[0].scope}")
            args[0].data *= 3
        else:
            self.demand(args[0].scope == "ipc_memory", f"an all-reduce finds {args[0].scope}")
            args[1].data[:] = args[0].data * 5


def check(seed: int) -> bool:
    """Whether the program of a seed was planned; it may be refused for one reason."""
    before = Generator(seed).module()
    try:
        after = plan(before)
    except TransformError as error:
        assert "no copy can be inserted in between" in str(error)
        return False
    relax.analysis.well_formed(after)
    rng = np.random.default_rng(seed)
    data = [rng.integers(1, 9, 4).astype("float64") for _ in range(3)]
    for flag in (True, False):
        wanted = Interpreter(before, strict=False).main(data, flag)
        found = Interpreter(after, strict=True).main(data, flag)
        for left, right in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(left, right)
    assert tvm_ffi.structural_equal(plan(after), after), "planning twice changes something"
    return True


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_random_programs(block, request):
    """By default 30 programs each; some are refused."""
    count = max(30, request.config.getoption("--programs") // 10)
    assert (
        sum(check(seed) for seed in range(block * count, block * count + count)) >= count * 2 // 3
    )
