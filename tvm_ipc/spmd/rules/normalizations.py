# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of softmax and normalizations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tvm import relax

from tvm_ipc.spmd.rules.axis_label_rule import LocalCall, Rule, needs_all
from tvm_ipc.spmd.rules.elementwise import same_axes
from tvm_ipc.spmd.rules.matmul_attention import whole_blocks
from tvm_ipc.spmd.rules.operation import Operation, axes_of, axis_of


def _norm(op: Operation) -> Rule:
    axes = axes_of(op.attrs.axes, op.ndim())
    others = [axes] * (len(op.operands) - 1)
    return Rule((op.labels, *others), (op.labels,), whole=needs_all(*axes))


def _group_norm(op: Operation) -> Rule:
    """Return the rule of a group norm: ranks share whole groups of channels."""
    attrs = op.attrs
    channel = axis_of(attrs.channel_axis, op.ndim())
    groups = int(attrs.num_groups)

    def local(local_call: LocalCall) -> relax.Expr:
        return relax.op.nn.group_norm(
            *local_call.call.args,
            num_groups=groups // local_call.workers.get(channel, 1),
            channel_axis=channel,
            axes=[int(axis) for axis in attrs.axes],
            epsilon=float(attrs.epsilon),
            center=bool(attrs.center),
            scale=bool(attrs.scale),
        )

    blocks = whole_blocks(groups, "groups of channels")
    return replace(_instance_norm(op), divisibility={channel: blocks}, local=local)


def _instance_norm(op: Operation) -> Rule:
    channel = axis_of(op.attrs.channel_axis, op.ndim())
    axes = set(axes_of(op.attrs.axes, op.ndim())) - {channel}
    return Rule((op.labels, (channel,), (channel,)), (op.labels,), whole=needs_all(*axes))


def _batch_norm(op: Operation) -> Rule:
    """Return the rule of a batch norm, which in training needs all of the axes that it averages."""
    vector = (op.axis,)
    rest: Any = set(op.labels) - {op.axis} if op.attrs.training else ()
    results = (op.labels, vector, vector)
    return Rule((op.labels, *(vector,) * 4), results, whole=needs_all(*rest))


RULES: Final = {
    **dict.fromkeys(("nn.softmax", "nn.log_softmax"), same_axes(lambda op: [op.axis])),
    **dict.fromkeys(("nn.layer_norm", "nn.rms_norm"), _norm),
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "nn.batch_norm": _batch_norm,
}
