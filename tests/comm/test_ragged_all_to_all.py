# SPDX-License-Identifier: Apache-2.0
"""Types, printing and refusals of operators that send rows by numbers known at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.pipeline import get_pipeline

X = ((6, 8), "float32")
COUNTS = ((2,), "int64")
EXPERTS = ((6, 2), "int64")
WEIGHTS = ((6, 2), "float32")


def var(name: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def function_of(make: Callable[..., relax.Call], **params: Any) -> relax.Function:
    builder = relax.BlockBuilder()
    variables = [var(name, *ty) for name, ty in params.items()]
    with builder.function("main", variables):
        builder.emit_func_output(builder.emit(make(*variables)))
    return builder.get()["main"]


def moe(x: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> relax.Call:
    return comm.moe(x, experts, weights, gate_up, down, workers=2)


def of_moe(**changed: Any) -> dict[str, Any]:
    types = {"x": X, "experts": EXPERTS, "weights": WEIGHTS}
    matrices = {"gate_up": ((3, 10, 8), "float32"), "down": ((3, 8, 5), "float32")}
    return {**types, **matrices, **changed}


def combine(rows: Any, received: Any, positions: Any, weights: Any) -> relax.Call:
    return comm.moe_combine(rows, received, positions, weights, workers=2)


PROGRAMS = {
    "ragged_all_to_all": function_of(
        lambda x, counts: comm.ragged_all_to_all(x, counts, 9, team=[[0, 1], [2, 3]]),
        x=X,
        counts=COUNTS,
    ),
    "moe_dispatch": function_of(
        lambda x, experts: comm.moe_dispatch(x, experts, num_experts=5, workers=2),
        x=X,
        experts=EXPERTS,
    ),
    "moe_combine": function_of(
        combine,
        rows=((24, 8), "float32"),
        received=((2, 3), "int64"),
        positions=EXPERTS,
        weights=WEIGHTS,
    ),
    "expert_matmul": function_of(
        comm.expert_matmul,
        rows=((24, 8), "float32"),
        experts=((24,), "int64"),
        weight=((3, 10, 8), "float32"),
    ),
    "moe": function_of(moe, **of_moe()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_printed_as_they_are_written(name: str) -> None:
    mod = tvm.IRModule({"main": PROGRAMS[name].with_attr("global_symbol", "main")})
    assert f"R.comm.{name}(" in mod.script()
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_compiled(name: str) -> None:
    """Without an operator that is left, also for rows and tokens of a symbolic number."""
    mod = tvm.IRModule({"main": PROGRAMS[name].with_attr("global_symbol", "main")})
    lowered = get_pipeline("llvm", 4 if name == "ragged_all_to_all" else 2)(mod)
    assert "R.comm." not in lowered.script()
    moves = name != "expert_matmul"
    assert ("tvm_ipc.ragged_all_to_all" in lowered.script()) == moves


def test_types_of_symbolic_extents() -> None:
    n = tvm.tirx.Var("n", "int64")
    dispatch = function_of(
        lambda x, experts: comm.moe_dispatch(x, experts, num_experts=5, workers=2),
        x=((n, 8), "float32"),
        experts=((n, 2), "int64"),
    )
    rows, row_experts, received, positions = dispatch.ret_ty.fields
    assert [str(extent) for extent in rows.shape.values] == ["n * T.int64(4)", "T.int64(8)"]
    assert [str(extent) for extent in row_experts.shape.values] == ["n * T.int64(4)"]
    assert list(map(int, received.shape.values)) == [2, 3]
    assert [str(extent) for extent in positions.shape.values] == ["n", "T.int64(2)"]


def ragged(counts: Any, **options: Any) -> Callable[..., relax.Call]:
    return lambda x, counts: comm.ragged_all_to_all(x, counts, 9, workers=2, **options)


@pytest.mark.parametrize(
    ("make", "params", "message"),
    [
        (
            ragged(COUNTS),
            {"x": X, "counts": ((3,), "int64")},
            "counts has the first extent 3; expected 2, the number of workers",
        ),
        (
            ragged(COUNTS),
            {"x": X, "counts": ((2,), "int32")},
            r"counts is R.Tensor\(\(2,\), dtype=\"int32\"\); expected a tensor with 1 axes or 2"
            " axes of known extents and the type int64",
        ),
        (
            ragged(COUNTS),
            {"x": ((), "float32"), "counts": COUNTS},
            r"x is R.Tensor\(\(\), dtype=\"float32\"\); expected a tensor with axes",
        ),
        (
            lambda x, experts: comm.moe_dispatch(x, experts, num_experts=4, workers=2),
            {"x": X, "experts": ((5, 2), "int64")},
            "moe_dispatch: axis 0 of experts has the extent 5; expected 6",
        ),
        (
            moe,
            of_moe(down=((3, 8, 6), "float32")),
            "axis 1 of gate_up has the extent 10; expected 12",
        ),
        (moe, of_moe(down=((4, 8, 5), "float32")), "axis 0 of down has the extent 4; expected 3"),
        (moe, of_moe(gate_up=((3, 10, 8), "float16")), "moe: gate_up is"),
        (
            moe,
            of_moe(weights=((6, 3), "float32")),
            "axis 1 of weights has the extent 3; expected 2",
        ),
        (
            combine,
            {
                "rows": ((24, 8), "float32"),
                "received": ((3, 3), "int64"),
                "positions": EXPERTS,
                "weights": WEIGHTS,
            },
            "moe_combine: axis 0 of received has the extent 3; expected 2",
        ),
        (
            comm.expert_matmul,
            {
                "rows": ((24, 8), "float32"),
                "experts": ((23,), "int64"),
                "weight": ((3, 10, 8), "float32"),
            },
            "expert_matmul: row_experts has the extent 23; expected 24",
        ),
    ],
)
def test_operands_that_do_not_fit(make: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function_of(make, **params)


def test_wrong_options() -> None:
    x, counts = var("x", *X), var("counts", *COUNTS)
    with pytest.raises(ValueError, match="ragged_all_to_all: workers is None for the team 'world'"):
        comm.ragged_all_to_all(x, counts, 8)
    with pytest.raises(ValueError, match="workers is 3, but a team has 2 ranks"):
        comm.ragged_all_to_all(x, counts, 8, team=[[0, 1]], workers=3)
    with pytest.raises(ValueError, match="capacity is the most rows that a rank receives"):
        comm.ragged_all_to_all(x, counts, -1, workers=2)
    with pytest.raises(TypeError, match="x is an expression of a tensor"):
        comm.ragged_all_to_all(3, counts, 8, workers=2)
    with pytest.raises(ValueError, match="moe: activation is"):
        comm.moe(x, x, x, x, x, activation="tanh")
