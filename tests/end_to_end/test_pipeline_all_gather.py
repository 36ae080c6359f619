# SPDX-License-Identifier: Apache-2.0
"""Products whose rows are gathered as works, chunk by chunk: what they become, and NumPy."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from tests.end_to_end.compare_with_numpy import Example, compare_with_numpy, compiled
from tvm_ipc import comm
from tvm_ipc.transform import PipelineAllGather, collect_report

Array = np.ndarray[Any, Any]


def module(ranks: int, shape: tuple[Any, ...], columns: int, axis: int, **options: Any) -> Any:
    """relu(gathered @ w.T + b), as a matrix if `reshaped`, and gathered @ v where `shared`."""
    dtype, inner = options.get("dtype", "float32"), shape[-1]
    shapes = {"x": shape, "w": (columns, inner), "b": (columns,), "v": (inner, 3)}
    params = {name: relax.Var(name, relax.TensorType(one, dtype)) for name, one in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", [*params.values()]):
        x, w, b, v = params.values()
        with builder.dataflow():
            if options.get("ccl"):
                whole = builder.emit(relax.op.ccl.allgather(x, ranks, in_group=False))
            else:
                whole = builder.emit(comm.allgather(x, axis=axis, workers=ranks))
            y = builder.emit(relax.op.matmul(whole, builder.emit(relax.op.permute_dims(w))))
            y = builder.emit(relax.op.add(y, b))
            if options.get("reshaped"):
                y = builder.emit(relax.op.reshape(y, (ranks * prod(shape[:-1]), columns)))
            y = builder.emit(relax.op.nn.relu(y))
            results = [y, builder.emit(relax.op.matmul(whole, v))] if options.get("shared") else [y]
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.get()


def run(mod: tvm.IRModule, ranks: int, chunks: int, streams: int, axis: int, blas: bool) -> None:
    """Compare what every rank gets with NumPy, for fresh values in the same buffers."""
    with collect_report() as report:
        divided = PipelineAllGather(chunks, streams)(mod)
        program = compiled(divided, ranks, blas=blas)
    (said,) = [one for one in report.decisions if one.pass_name == "PipelineAllGather"]
    assert said.verdict.startswith("in ")
    types = [param.ty for param in mod["main"].params]
    shapes = [tuple(map(int, ty.shape.values)) for ty in types]
    dtype = str(types[0].dtype.dtype)
    results = len(mod["main"].ret_ty.fields)

    def example(round_: int) -> Example:
        drawn = np.random.default_rng(round_)
        xs = drawn.integers(-3, 4, (ranks, *shapes[0])).astype(dtype)
        if round_ == 0:
            xs = np.full_like(xs, np.nan)
        w, b, v = (drawn.integers(-3, 4, shape).astype(dtype) for shape in shapes[1:])
        whole = np.concatenate(list(xs), axis)
        wanted = [np.nan_to_num(np.maximum(whole @ w.T + b, 0)), whole @ v]
        wanted[0] = wanted[0].reshape(list(map(int, mod["main"].ret_ty.fields[0].shape.values)))
        return xs, [w, b, v], [wanted[:results]] * ranks

    def slow(session: Any, _number: int) -> None:
        session.emulate_link(latency=1e-4, jitter=5e-4)

    compare_with_numpy(program, ranks, map(example, range(4)), slow)


CASES: dict[str, tuple[int, tuple[int, ...], int, int, dict[str, Any]]] = {
    "ccl": (2, (32, 32), 16, 0, {"ccl": True}),
    "shared": (3, (21, 16), 16, 0, {"shared": True}),
    "four": (4, (16, 32), 8, 0, {}),
    "odd": (2, (37, 33), 17, 0, {"shared": True}),
    "one row": (3, (1, 5), 4, 0, {}),
    "no rows": (2, (0, 16), 4, 0, {}),
    "batched": (2, (6, 5, 16), 8, 0, {}),
    "reshaped": (2, (6, 5, 16), 8, 0, {"reshaped": True}),
    "chunk, rank, row": (2, (8, 4, 32), 16, 1, {"shared": True}),
    "chunk, rank, row of four": (4, (3, 3, 5), 6, 1, {}),
    "float16": (2, (32, 32), 16, 0, {"dtype": "float16"}),
}


@pytest.mark.parametrize(
    ("chunks", "streams", "blas"),
    [
        (3, 2, True),
        pytest.param(1, 2, False, marks=pytest.mark.slow),
        pytest.param(8, 3, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_what_numpy_gives(name: str, chunks: int, streams: int, blas: bool) -> None:
    ranks, shape, columns, axis, options = CASES[name]
    mod = module(ranks, shape, columns, axis, **options)
    run(mod, ranks, chunks, streams, axis, blas)


def left_alone(mod: tvm.IRModule) -> list[str]:
    with collect_report() as report:
        tvm.ir.assert_structural_equal(PipelineAllGather(2)(mod), mod)
    assert {one.verdict for one in report.decisions} <= {"skipped"}
    return [one.reason for one in report.decisions]


@I.ir_module
class Called:
    @R.function(private=True)
    def layer(x: R.Tensor((16, 16), "float32"), w: R.Tensor((16, 16), "float32")) -> R.Tensor(
        (32, 16), "float32"
    ):
        with R.dataflow():
            whole = R.ccl.allgather(x, 2)
            y = R.matmul(whole, w)
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor((16, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        cls = Called
        with R.dataflow():
            y = cls.layer(x, w)
            R.output(y)
        return y


def test_what_is_left_alone() -> None:
    assert left_alone(Called) == ["the function must stay pure, since other functions call it"]
    assert left_alone(module(1, (8, 8), 8, 0)) == ["its team has one rank"]
    n = tirx.Var("n", "int64")
    assert left_alone(module(2, (n, 8), 8, 0)) == ["the size of its chunks is unknown"]
    unknown = "the number of its blocks of rows is unknown"
    assert left_alone(module(2, (n, 8, 8), 8, 1)) == [unknown]
    along = "its axis is the last one, which does not enumerate rows"
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in "xw")
    with builder.function("main", [x, w]):
        wide = builder.emit(comm.allgather(x, axis=1, workers=2))
        tall = builder.emit(comm.allgather(w, workers=2))
        builder.emit_func_output(builder.emit(relax.op.matmul(wide, tall)))
    assert left_alone(builder.get()) == [
        along,
        "its rows are not those of the matmul's left operand",
    ]


def test_a_product_that_another_one_needs() -> None:
    """Chunks of both are made together, and the second one's matrix is made of the first one."""
    builder = relax.BlockBuilder()
    emit = builder.emit
    x, w = (relax.Var(name, relax.TensorType((16, 16), "float32")) for name in "xw")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            whole = emit(comm.allgather(x, workers=2))
            one = emit(relax.op.matmul(whole, w))
            weight = emit(relax.op.multiply(w, emit(relax.op.sum(one, axis=0))))
            two = emit(relax.op.matmul(whole, weight))
            out = builder.emit_output(relax.op.add(one, two))
        builder.emit_func_output(out)
    assert left_alone(builder.get()) == [
        "the result of a matmul is used before another matmul of the same gather ends"
    ]


def test_modules_without_a_gather_stay_the_objects_they_were() -> None:
    @I.ir_module
    class WithoutGather:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                y = R.matmul(x, x)
                R.output(y)
            return y

    assert PipelineAllGather(4)(WithoutGather).same_as(WithoutGather)
