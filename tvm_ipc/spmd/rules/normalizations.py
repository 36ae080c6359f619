# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of softmax and normalizations."""

from __future__ import annotations

from typing import Any, Final

from tvm import relax

from tvm_ipc.spmd.rules.axis_label_rule import LocalCall, Rule, needs_all
from tvm_ipc.spmd.rules.matmul_attention import whole_blocks
from tvm_ipc.spmd.rules.operation import Operation, axes_of, axis_of


def _softmax(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    return Rule((labels,), (labels,), whole=needs_all(axis_of(op.attrs.axis, ndim)))


def _norm(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    axes = axes_of(op.attrs.axes, ndim)
    others = [axes] * (len(op.operands) - 1)
    return Rule((labels, *others), (labels,), whole=needs_all(*axes))


def _group_norm(op: Operation) -> Rule:
    """Return the rule of a group norm: ranks share whole groups of channels."""
    ndim = op.ndim()
    labels = tuple(range(ndim))
    attrs = op.attrs
    channel = axis_of(attrs.channel_axis, ndim)
    groups = int(attrs.num_groups)
    axes = set(axes_of(attrs.axes, ndim)) - {channel}

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

    return Rule(
        (labels, (channel,), (channel,)),
        (labels,),
        whole=needs_all(*axes),
        divisibility={channel: whole_blocks(groups, "groups of channels")},
        local=local,
    )


def _instance_norm(op: Operation) -> Rule:
    ndim = op.ndim()
    labels = tuple(range(ndim))
    channel = axis_of(op.attrs.channel_axis, ndim)
    axes = set(axes_of(op.attrs.axes, ndim)) - {channel}
    return Rule((labels, (channel,), (channel,)), (labels,), whole=needs_all(*axes))


def _batch_norm(op: Operation) -> Rule:
    """Return the rule of a batch norm, which in training needs all of the axes that it averages."""
    ndim = op.ndim()
    labels = tuple(range(ndim))
    channel = axis_of(op.attrs.axis, ndim)
    rest: Any = set(labels) - {channel} if op.attrs.training else ()
    vectors = ((channel,),) * 4
    return Rule((labels, *vectors), (labels, (channel,), (channel,)), whole=needs_all(*rest))


RULES: Final = {
    **dict.fromkeys(("nn.softmax", "nn.log_softmax"), _softmax),
    **dict.fromkeys(("nn.layer_norm", "nn.rms_norm"), _norm),
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "nn.batch_norm": _batch_norm,
}
