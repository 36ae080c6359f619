# SPDX-License-Identifier: Apache-2.0
"""Random programs that take a divided axis apart and put it together, against one device."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.utils import copy_with_new_vars

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Replica, Shard, place

ROWS, INNER = 3, 5


class Program:
    """A function of a product whose columns are divided, and of another one that adds them up."""

    def __init__(self, seed: int, name: str, builder: relax.BlockBuilder) -> None:
        self.random, self.builder = Random(seed), builder
        columns = self.random.choice([12, 16, 18, 20, 24, 30])
        self.shapes = [(ROWS, INNER), (columns, INNER)]
        params = [
            relax.Var(f"{name}_{k}", relax.TensorType(shape, "float32"))
            for k, shape in zip("xw", self.shapes, strict=True)
        ]
        with builder.function(name, params, attrs={"num_input": 1}):
            with builder.dataflow():
                y = self.emit(op.matmul(params[0], self.emit(op.permute_dims(params[1]))))
                for _ in range(self.random.randint(1, 5)):
                    y = self._changed(y)
                if self.random.random() < 0.5:
                    y = self.emit(op.sum(y, self.random.randrange(1, int(y.ty.ndim))))
                out = builder.emit_output(y)
            builder.emit_func_output(out)

    def emit(self, value: relax.Expr) -> relax.Var:
        return self.builder.emit(value)

    def _changed(self, y: relax.Var) -> relax.Var:
        random = self.random
        dims = [int(one) for one in y.ty.shape.values]
        axis = random.randrange(1, len(dims))
        kind = random.choice(["slice", "slices", "split", "apart", "together", "repeat", "norm"])
        extent = dims[axis]
        if kind == "slice" and extent > 2:
            begin = random.choice([0, random.randrange(extent // 2)])
            end = random.choice([extent, random.randrange(begin + 1, extent)])
            return self.emit(
                op.strided_slice(y, [axis], [begin], [end], [random.choice([1, 1, 2])])
            )
        if kind == "slices" and extent % 2 == 0:
            half = extent // 2
            first = self.emit(op.strided_slice(y, [axis], [0], [half], [1]))
            second = self.emit(op.strided_slice(y, [axis], [half], [extent], [1]))
            how = random.choice([op.multiply, op.add])
            if random.random() < 0.4:
                turned = self.emit(op.concat((self.emit(op.negative(second)), first), axis=axis))
                return self.emit(how(y, turned))
            return self.emit(how(first, second))
        if kind == "split" and extent > 3:
            at = sorted(random.sample(range(1, extent), 2))
            pieces = self.emit(op.split(y, at, axis))
            fields = [self.emit(relax.TupleGetItem(pieces, k)) for k in range(3)]
            random.shuffle(fields)
            return self.emit(op.concat(fields[: random.choice([2, 3])], axis=axis))
        if kind == "apart" and len(dims) < 4:
            factors = [n for n in range(2, extent) if extent % n == 0]
            if factors:
                outer = random.choice(factors)
                shape = [*dims[:axis], outer, extent // outer, *dims[axis + 1 :]]
                y = self.emit(op.reshape(y, shape))
                if random.random() < 0.3:
                    order = list(range(len(shape)))
                    order[axis], order[axis + 1] = order[axis + 1], order[axis]
                    y = self.emit(op.permute_dims(y, order))
                return y
        if kind == "together" and axis + 1 < len(dims):
            shape = [*dims[:axis], extent * dims[axis + 1], *dims[axis + 2 :]]
            return self.emit(op.reshape(y, shape))
        if kind == "repeat" and extent < 13 and len(dims) < 4:
            wide = self.emit(op.expand_dims(y, axis + 1))
            shape = [*dims[: axis + 1], 3, *dims[axis + 1 :]]
            wide = self.emit(op.broadcast_to(wide, shape))
            return self.emit(op.reshape(wide, [*dims[:axis], 3 * extent, *dims[axis + 1 :]]))
        if kind == "norm":
            mean = self.emit(op.mean(y, [axis], keepdims=True))
            return self.emit(op.subtract(y, mean))
        # Not 0 beyond the end, where what it is given is.
        return self.emit(op.sqrt(self.emit(op.add(op.square(y), relax.const(0.5, "float32")))))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_axes_taken_apart(workers: int, pytestconfig: pytest.Config) -> None:
    """Nothing is refused, and every rank gets what one device does."""
    rounds = pytestconfig.getoption("--operator-rounds")
    count = 8 if rounds == 1 else 40
    for round_ in range(min(rounds, 25)):
        builder = relax.BlockBuilder()
        first = 1000 * round_ + 100 * workers
        programs = {f"f{k}": Program(first + k, f"f{k}", builder) for k in range(count)}
        whole = builder.get()
        plan = {f"{name}_w": Shard(0) for name in programs}
        made = parallelize(whole, plan, Mesh({"tp": workers}))
        functions = dict(made.module.functions_items())
        functions = {str(one.name_hint): function for one, function in functions.items()}
        for name in programs:
            fresh = copy_with_new_vars(whole[name])
            functions[f"{name}_whole"] = fresh.with_attr("global_symbol", f"{name}_whole")
        pipeline = tvm_ipc.get_pipeline("llvm", workers)
        module = tvm.IRModule(functions)
        executable = tvm.compile(module, FAST_TO_COMPILE, relax_pipeline=pipeline)
        random = np.random.default_rng(round_)
        with session_of(made.mesh) as session:
            loaded = session.load_vm_module(executable)
            for name, program in programs.items():
                x, w = (random.uniform(-1, 1.2, one).astype("float32") for one in program.shapes)
                parts = [made.shards[f"{name}_w"].shard(w, rank) for rank in range(workers)]
                right = loaded[f"{name}_whole"](
                    put(session, [x] * workers), put(session, [w] * workers)
                )
                found = loaded[name](put(session, [x] * workers), put(session, parts))
                wanted = right.debug_get_from_remote(0).numpy()
                for rank in range(workers):
                    np.testing.assert_allclose(
                        found.debug_get_from_remote(rank).numpy(),
                        wanted,
                        1e-4,
                        1e-4,
                        err_msg=f"{name} of round {round_} on {workers}\n{whole[name].script()}",
                    )


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("partial", [False, True])
def test_pieces_are_put_back(workers: int, partial: bool) -> None:
    """What is divided by pieces is whole in a result, and is made of sums, too."""
    mesh, division = Mesh({"tp": workers}), f"4/{workers}+6/{workers}"

    def result(emit: Any, x: Any, w: Any) -> Any:
        y = emit(op.matmul(x, w))
        if partial:
            y = emit(op.abs(emit(place(y, mesh, {"tp": Shard(1, division)}))))
            y = emit(place(y, mesh, {"tp": Replica()}))
        return op.abs(y)

    mod = one_function(result, {"x": (4, 6), "w": (6, 10)}, num_input=1)
    made = parallelize(mod, {"w": Shard(0) if partial else Shard(1, division)}, mesh)
    assert made.collectives == ({"reduce_scatter": 1} if partial else {}) | {"allgather": 1}
    pipeline = tvm_ipc.get_pipeline("llvm", workers)
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    random = np.random.default_rng(0)
    given, weight = (random.uniform(-1, 1.2, one).astype("float32") for one in ((4, 6), (6, 10)))
    with session_of(mesh) as session:
        parts = [made.shards["w"].shard(weight, rank) for rank in range(workers)]
        function = session.load_vm_module(executable)["main"]
        found = function(put(session, [given] * workers), put(session, parts))
        for rank in range(workers):
            got = found.debug_get_from_remote(rank).numpy()
            np.testing.assert_allclose(got, np.abs(given @ weight), 1e-4, 1e-5)
