# SPDX-License-Identifier: Apache-2.0
"""TVM's passes around collectives: what they remove, join, move and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import transform
from tvm.relax.dpl import is_op, wildcard
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.comm.collective_relax_op import NAME
from tvm_ipc.transform import LegalizeOps

PAIR = [[0, 1]]


def module(*makes: Callable[[Any], relax.Call], value: relax.Expr | None = None) -> tvm.IRModule:
    """A function that returns the sum of collectives of its parameter, or of a value."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = [builder.emit(make(x if value is None else value)) for make in makes]
            total = parts[0]
            for part in parts[1:]:
                total = builder.emit(relax.op.add(total, part))
            out = builder.emit_output(total)
        builder.emit_func_output(out)
    return builder.get()


def collectives(mod: tvm.IRModule, name: str = "main") -> list[relax.Call]:
    operator = tvm.ir.Op.get(NAME)
    return [call for call in calls(mod[name]) if call.op.same_as(operator)]


def test_what_nobody_uses_is_removed_from_all_ranks() -> None:
    @I.ir_module
    class Unused:
        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                lv = R.comm.allgather(x, team=[[0, 1]])  # noqa: F841
                gv = R.comm.broadcast(x, 1, team=[[0, 1]])
                R.output(gv)
            return gv

    (kept,) = collectives(transform.DeadCodeElimination()(Unused))
    assert kept.attrs.kind == "broadcast"


def test_patterns_match_attributes() -> None:
    """Those that are printed; `is_op` matches collectives of all kinds."""
    pattern = is_op(NAME)(wildcard())
    call = comm.allreduce(relax.Var("x", relax.TensorType((4,), "float32")), "max", team=PAIR)
    assert pattern.has_attr({"kind": "allreduce", "reduction": "max"}).match(call)
    assert not pattern.has_attr({"kind": "allgather"}).match(call)


def test_only_equal_collectives_are_one() -> None:
    mod = module(
        lambda x: comm.allreduce(x, team=PAIR),
        lambda x: comm.allreduce(x, team=PAIR),
        lambda x: comm.allreduce(x, team=[[1, 0]]),
        lambda x: comm.allreduce(x, "max", team=PAIR),
        lambda x: comm.broadcast(x, 0, team=PAIR),
        lambda x: comm.broadcast(x, 0, team=PAIR),
        lambda x: comm.broadcast(x, 1, team=PAIR),
    )
    joined = transform.EliminateCommonSubexpr()(mod)
    assert Counter(call.attrs.kind for call in collectives(joined)) == {
        "allreduce": 3,
        "broadcast": 2,
    }
    assert len(collectives(transform.CanonicalizeBindings()(mod))) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda x: comm.allreduce(x, team=PAIR),
        lambda x: comm.allgather(x, axis=1, extent=7, team=PAIR),
        lambda x: comm.scatter(x, 1, axis=1, team=PAIR),
        lambda x: comm.permute(x, [[1, 0]], team=PAIR),
    ],
)
def test_collectives_of_constants_are_not_computed_in_advance(make: Any) -> None:
    given = np.arange(16, dtype="float32").reshape(4, 4)
    mod = transform.FoldConstant()(module(make, value=relax.const(given)))
    assert len(collectives(mod)) == 1
    assert len(list(calls(mod["main"]))) == 1, "nothing of what it would be lowered to is left"
    program = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2))
    kind = str(collectives(mod)[0].attrs.kind)
    wanted = {
        "allreduce": [2 * given] * 2,
        "allgather": [np.concatenate([given, given], 1)[:, :7]] * 2,
        "scatter": np.split(given, 2, 1),
        "permute": [given, 0 * given],
    }[kind]
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        out = session.load_vm_module(program)["main"](session.put(given))
        for rank in range(2):
            np.testing.assert_array_equal(session.get(out, rank=rank), wanted[rank])


@I.ir_module
class Weights:
    """A weight that is scattered and gathered again, and a sum of products."""

    @R.function
    def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            lv = R.comm.scatter(w, 0, team=[[0, 1]])
            lv1 = R.comm.allgather(lv, team=[[0, 1]])
            lv2 = R.matmul(x, lv1)
            gv = R.comm.allreduce(lv2, team=[[0, 1]])
            R.output(gv)
        return gv


def test_mixed_precision_leaves_collectives_their_type() -> None:
    mixed = transform.ToMixedPrecision("float16")(Weights)
    assert [str(call.args[0].ty.dtype.dtype) for call in collectives(mixed)] == ["float32"] * 3
    (product,) = [call for call in calls(mixed["main"]) if call.op.name == "relax.matmul"]
    assert str(product.ty.dtype.dtype) == "float16"


def test_collectives_of_weights_are_lifted_with_them() -> None:
    lifted = transform.LiftTransformParams()(Weights)
    assert [call.attrs.kind for call in collectives(lifted)] == ["allreduce"]
    kinds = [call.attrs.kind for call in collectives(lifted, "main_transform_params")]
    assert kinds == ["scatter", "allgather"]
    lazy = transform.LazyTransformParams()(lifted)
    kinds = [call.attrs.kind for call in collectives(lazy, "main_transform_params")]
    assert kinds == ["scatter", "allgather"]


def test_bundled_weights() -> None:
    bundled = transform.BundleModelParams()(Weights)
    assert [call.attrs.kind for call in collectives(bundled)] == [
        *("scatter", "allgather", "allreduce")
    ]
    assert len(bundled["main"].params) == 2


def test_what_is_legalized_once_is_alike_in_its_root_too() -> None:
    builder = relax.BlockBuilder()
    a, b = tirx.Var("a", "int64"), tirx.Var("b", "int64")
    x, y = (relax.Var(name, relax.TensorType((4, 4), "float32")) for name in ("x", "y"))
    roots = [a, b, a + 1, b + 1, 1, 2]
    with builder.function("main", [x, y, relax.Var("s", relax.ShapeType([a, b]))]):
        with builder.dataflow():
            made = [builder.emit(comm.broadcast((x, y)[k % 2], r)) for k, r in enumerate(roots)]
            out = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(out)
    legal = LegalizeOps()(builder.get())
    found = [c.args[1].fields for c in calls(legal["main"]) if c.op.name == "relax.call_dps_packed"]
    assert [str(sent) for sent, *_ in found] == ["x", "y"] * 3
    for (_, root, *_), given in zip(found, roots, strict=True):
        assert tvm_ffi.structural_equal(root, relax.prim_value(given))


def test_collectives_are_not_fused() -> None:
    mod = module(lambda x: comm.allreduce(x, team=PAIR), lambda x: comm.broadcast(x, team=PAIR))
    fused = transform.FuseOps()(mod)
    assert len(collectives(fused)) == 2
    assert len(fused.get_global_vars()) == 1
