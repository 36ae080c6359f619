# SPDX-License-Identifier: Apache-2.0
"""On every path through random branches each kernel finds what was written for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import tvm
from tvm import relax

from tests.transform.memory_programs import planned
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.transform import StaticPlanBlockMemory

_ALLOC = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_VOID = tvm.ir.TupleType([])


class Writer:
    """Writes a random function: kernels, aliases, tuples, and branches within branches."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.condition = relax.Var("c", relax.TensorType((), "bool"))
        self.x = relax.Var("x", relax.TensorType((8,), "float32"))
        self.count = 0

    def function(self) -> tvm.IRModule:
        values = [self.x]
        bindings = self.block(values, 3)
        result = relax.SeqExpr([relax.BindingBlock(bindings)], self.rng.choice(values))
        builder = relax.BlockBuilder()
        result = builder.normalize(result)
        function = relax.Function([self.condition, self.x], result, result.ty, is_pure=False)
        return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})

    def var(self, ty: Any) -> relax.Var:
        self.count += 1
        return relax.Var(f"v{self.count}", ty)

    def bind(self, bindings: list[Any], value: Any) -> relax.Var:
        value = relax.BlockBuilder().normalize(value)
        var = self.var(value.ty)
        bindings.append(relax.VarBinding(var, value))
        return var

    def block(self, values: list[Any], depth: int) -> list[Any]:
        bindings: list[Any] = []
        for _ in range(self.rng.randint(2, 7)):
            kind = self.rng.random()
            if kind < 0.2 and depth:
                values.append(self.branches(bindings, values, depth))
            elif kind < 0.35:
                pair = self.bind(bindings, relax.Tuple([self.rng.choice(values) for _ in "ab"]))
                values.append(self.bind(bindings, relax.TupleGetItem(pair, 1)))
            else:
                values.append(self.kernel(bindings, values))
        return bindings

    def kernel(self, bindings: list[Any], values: list[Any]) -> relax.Var:
        arguments = [
            relax.ShapeExpr([8]),
            tvm.ir.GenericConst(tvm.DataType("float32"), relax.AnyType()),
            relax.prim_value(0),
            tvm.ir.StringImm("global"),
        ]
        out = self.bind(bindings, relax.Call(_ALLOC, arguments))
        read = [self.rng.choice(values) for _ in range(self.rng.randint(1, 2))]
        call = relax.Call(relax.ExternFunc("kernel"), [*read, out], ty_args=[_VOID])
        self.bind(bindings, call)
        return out

    def branches(self, bindings: list[Any], values: list[Any], depth: int) -> relax.Var:
        results = []
        for _ in range(2):
            inner = list(values)
            block = self.block(inner, depth - 1)
            body = relax.SeqExpr([relax.BindingBlock(block)], self.rng.choice(inner))
            results.append(relax.BlockBuilder().normalize(body))
        return self.bind(bindings, relax.If(self.condition, *results))


@dataclass
class Memory:
    """A storage, or an allocation of its own: for each line of 8 bytes what lies there."""

    lines: dict[int, int] = field(default_factory=dict)


@dataclass
class Tensor:
    memory: Memory
    offset: int
    size: int
    written: int = 0

    def cells(self) -> range:
        return range(self.offset // 8, (self.offset + self.size) // 8)


class Machine:
    """Runs a planned function on one path: the branches to take are given."""

    def __init__(self, choices: Iterator[int]) -> None:
        self.choices = choices
        self.values: dict[Any, Any] = {}
        self.clock = 0

    def run(self, body: Any) -> Any:
        for binding in bindings_of(body):
            self.values[binding.var] = self.value(binding.value)
        return self.value(body.body)

    def value(self, expr: Any) -> Any:
        if isinstance(expr, tvm.ir.Var):
            return self.values.get(expr)
        if isinstance(expr, relax.Tuple):
            return [self.value(part) for part in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, relax.If):
            return self.run(expr.false_branch if next(self.choices) else expr.true_branch)
        return self.call(expr)

    def call(self, call: Any) -> Any:
        if isinstance(call.op, relax.ExternFunc):
            *read, out = (self.value(argument) for argument in call.args)
            for tensor in read:
                self.check(tensor)
            self.clock += 1
            out.written = self.clock
            out.memory.lines.update(dict.fromkeys(out.cells(), self.clock))
            return None
        if call.op.name == "relax.memory.alloc_storage":
            return Memory()
        if call.op.name == "relax.memory.alloc_tensor":
            return Tensor(self.value(call.args[0]), int(call.args[1].value), 32)
        assert call.op.name == "relax.builtin.alloc_tensor"
        return Tensor(Memory(), 0, 32)

    @staticmethod
    def check(tensor: Tensor | None) -> None:
        if tensor is not None:  # a parameter
            found = {tensor.memory.lines.get(cell) for cell in tensor.cells()}
            assert found == {tensor.written}


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_overwritten_on_any_path(seed):
    module = Writer(seed).function()
    relax.analysis.well_formed(module)
    for alignment in (8, 64):
        plan = StaticPlanBlockMemory(packed=True, alignment=alignment)(module)
        relax.analysis.well_formed(plan)
        assert planned(plan) <= planned(relax.transform.StaticPlanBlockMemory()(module))
        for path in range(40):
            rng = random.Random(path)
            machine = Machine(iter(lambda rng=rng: rng.randint(0, 1), 2))
            result = machine.run(plan["main"].body)
            Machine.check(result)
