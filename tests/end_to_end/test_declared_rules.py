# SPDX-License-Identifier: Apache-2.0
"""Rules that users declare: for packed functions, functions of the module, and operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import Program, cut, module, put, run, session_of
from tvm_ipc.comm import Mesh, Partial, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements, declare_rule
from tvm_ipc.spmd.rules import operator_rule_table

MESH = Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1])
ROWS = {"dp": Shard(0)}
SCALED = "tests.scaled_rows"


@tvm_ffi.register_global_func(SCALED)
def scaled_rows(x: Any, w: Any, total: Any, scaled: Any) -> None:
    """Multiplies columns, and sums rows of what that gives."""
    result = x.numpy() * w.numpy()
    scaled.copyfrom(result)
    total.copyfrom(result.sum(1))


declare_rule(SCALED, "n k, k -> n, n k", reduced={}, whole="k", zeros=True)


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rules that a test declares end with it."""
    monkeypatch.setattr(operator_rule_table, "_DECLARED", dict(operator_rule_table._DECLARED))


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with session_of(MESH) as opened:
        yield opened


def emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def scaled(x: Any, w: Any) -> list[relax.Expr]:
    n, k = (int(extent) for extent in x.ty.shape.values)
    out = [relax.TensorType((n,), "float32"), relax.TensorType((n, k), "float32")]
    both = emit(relax.call_dps_packed(SCALED, (x, w), out))
    return [relax.TupleGetItem(both, 0), relax.TupleGetItem(both, 1)]


def test_a_packed_function_with_two_results(session: Any) -> None:
    program = Program(
        scaled,
        [ROWS, {}],
        [(5, 6), (6,)],
        [None, {"dp": Shard(0), "tp": Shard(1)}],
        lambda x, w: [(x * w).sum(1), x * w],
    )
    run(session, MESH, {"main": program})


def test_an_axis_of_which_every_rank_needs_all() -> None:
    program = Program(scaled, [{"tp": Shard(1)}, {}], [(5, 6), (6,)], [None, None], lambda *_: [])
    words = (
        "both is R.call_dps_packed of 'tests.scaled_rows': lv is S[1] along 'tp', and it needs all "
        "of that axis"
    )
    with pytest.raises(TransformError, match=re.escape(words.replace("both", "lv2"))):
        LowerPlacements()(module(MESH, {"main": program}))


def with_kernel(symbolic: bool) -> tvm.IRModule:
    """A product along axes that are divided, by a function of the module."""
    builder = relax.BlockBuilder()
    shapes = [(5, 6), (6, 7)]
    xs = [relax.Var(f"p{k}", relax.TensorType(s, "float32")) for k, s in enumerate(shapes)]
    n, k, m = (
        tvm.tirx.Var(c, "int64") if symbolic else e for c, e in zip("nkm", (5, 6, 7), strict=True)
    )
    a, b = te.placeholder((n, k), "float32", "a"), te.placeholder((k, m), "float32", "b")
    r = te.reduce_axis((0, k), "r")
    c = te.compute((n, m), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "c")
    kernel = te.create_prim_func([a, b, c]).with_attr("global_symbol", "tests_product")
    with builder.function("main", xs):
        global_var = builder.add_func(kernel, "tests_product")
        with builder.dataflow():
            x = builder.emit(place(xs[0], MESH, {"dp": Shard(0), "tp": Shard(1)}))
            out = relax.TensorType((5, 7), "float32")
            made = builder.emit(relax.call_tir(global_var, (x, xs[1]), out))
            result = builder.emit_output(place(made, MESH, {}))
        builder.emit_func_output(result)
    return builder.get()


def test_a_function_of_the_module(session: Any) -> None:
    declare_rule("tests_product", "n k, k m -> n m", reduced={"k": "sum"}, linear=True)
    executable = tvm.compile(
        with_kernel(symbolic=True), "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 4)
    )
    random = np.random.default_rng(0)
    x, w = (random.uniform(-1, 1, shape).astype("float32") for shape in ((5, 6), (6, 7)))
    program = Program(lambda *_: [], [{"dp": Shard(0), "tp": Shard(1)}, {}], [], [None], np.matmul)
    references = [
        put(session, cut(MESH, whole, given, None))
        for whole, given in zip((x, w), program.given, strict=True)
    ]
    found = session.load_vm_module(executable)["main"](*references)
    for rank in range(4):
        np.testing.assert_allclose(session.get(found, rank), x @ w, rtol=1e-5, atol=1e-6)


def test_a_function_of_other_extents_is_refused() -> None:
    declare_rule("tests_product", "n k, k m -> n m", reduced={"k": "sum"}, linear=True)
    words = "it is compiled for an extent of 5, and a rank has 3: make that extent symbolic"
    with pytest.raises(TransformError, match=re.escape(words)):
        LowerPlacements()(with_kernel(symbolic=False))


def test_an_operator(session: Any) -> None:
    """One that has no rule of its own; a partial sum stays one."""
    declare_rule("relax.collapse_sum_to", "n k -> k", reduced={"n": "sum"}, whole="k", linear=True)
    programs = {
        name: Program(
            lambda x: [op.collapse_sum_to(x, (6,))],
            [given],
            [(5, 6)],
            [{}],
            lambda x: [x.sum(0)],
        )
        for name, given in {"rows": ROWS, "sum": {"tp": Partial()}, "all": {}}.items()
    }
    lowered = LowerPlacements()(module(MESH, programs))
    assert [lowered[name].script().count("allreduce") for name in programs] == [1, 1, 0]
    run(session, MESH, programs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("relax.nn.softmax", "n -> n"), "'relax.nn.softmax' has a built-in rule"),
        (
            ("relax.nn.softmacks", "n -> n"),
            "no operator 'relax.nn.softmacks'; similar names are 'relax.nn",
        ),
        (("tests.f", "n k -> n"), "'k' is no axis of a result in 'n k -> n'; specify the red"),
        (("tests.f", "n -> n k"), "'k' is no axis of an operand in 'n -> n k'; name it in `whole`"),
        ((SCALED, "n -> n"), "'tests.scaled_rows' already has another rule, and 'n -> n'"),
    ],
)
def test_what_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        declare_rule(*arguments)


def test_a_call_with_other_operands_is_refused() -> None:
    def make(x: Any, _: Any) -> list[relax.Expr]:
        return [relax.call_dps_packed(SCALED, (x,), relax.TensorType((5, 6), "float32"))]

    program = Program(make, [ROWS, {}], [(5, 6), (6,)], [None], lambda *_: [])
    words = "its rule is for operands with the axes 'n k, k', and 2 results; the numbers of"
    with pytest.raises(TransformError, match=re.escape(words)):
        LowerPlacements()(module(MESH, {"main": program}))
