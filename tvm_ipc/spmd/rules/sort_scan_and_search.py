# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of operators that need one whole axis: sort, scan, search and argmax."""

from __future__ import annotations

from typing import Final

from tvm_ipc.spmd.rules.axis_label_rule import Labels, Rule, all_partial_sums, needs_all
from tvm_ipc.spmd.rules.operation import Operation, axis_of


def _along_whole_axis(op: Operation) -> Rule:
    """Return the rule of an operator that needs all of one axis, which results may lack."""
    ndim = op.ndim()
    labels = tuple(range(ndim))
    if op.attrs.axis is None and ndim != 1:
        unlabelled: Labels = (None,) * len(op.result_dims())
        return Rule((labels,), (unlabelled,) * len(op.results), whole=needs_all(*labels))
    axis = axis_of(op.attrs.axis or 0, ndim)
    result = labels
    if len(op.result_dims()) < ndim:
        result = (*labels[:axis], *labels[axis + 1 :])
    return Rule(
        (labels,),
        (result,) * len(op.results),
        whole=needs_all(axis),
        partial_linear=all_partial_sums if op.name == "cumsum" else (lambda _: False),
        preserves_zeros=all if op.name in ("cumsum", "cumprod", "sort") else (lambda _: False),
    )


def _bucketize(op: Operation) -> Rule:
    labels = tuple(range(op.ndim()))
    boundaries = len(labels)
    return Rule((labels, (boundaries,)), (labels,), whole=needs_all(boundaries))


RULES: Final = {
    "bucketize": _bucketize,
    **dict.fromkeys(
        ("argmax", "argmin", "sort", "argsort", "topk", "cumsum", "cumprod"), _along_whole_axis
    ),
}
