# SPDX-License-Identifier: Apache-2.0
"""Sharding rule of the feed-forward of a mixture of experts.

Ranks share the experts and the tokens along the same axis of the mesh. Each rank sends its tokens
to the ranks of their experts. A single token stays on all ranks: each rank adds up the results of
its own experts, and their sum over the ranks is the result, which all ranks need anyway.
"""

from __future__ import annotations

from typing import Final

from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.axis_label_rule import Labels, LocalCall, Rule, needs_all
from tvm_ipc.spmd.rules.operation import Operation

#: The label of experts, and of tokens that are sharded with them.
_EXPERTS: Final = 0
_FEATURES: Final = 1
_CHOICES: Final = 2
_OUTPUTS: Final = 3
_INNER: Final = 4
#: The label of tokens that all ranks have.
_TOKENS: Final = 5


def _moe(op: Operation) -> Rule:
    """Return the rule of `R.comm.moe`. Tokens in the padding of a shard get no expert."""
    is_single = constant(op.dims()[0]) == 1
    return Rule(
        _labels(_TOKENS if is_single else _EXPERTS),
        ((_TOKENS if is_single else _EXPERTS, _FEATURES),),
        reduced={_EXPERTS: "sum"} if is_single else {},
        whole=needs_all(_FEATURES, _CHOICES, _OUTPUTS, _INNER, _TOKENS),
        contiguous=frozenset({_EXPERTS}),
        padding={1: -1},
        local=_of_own_experts if is_single else _dispatched,
    )


def _labels(tokens: int) -> tuple[Labels, ...]:
    """Return the labels of the operands."""
    gate_up, down = (_EXPERTS, _OUTPUTS, _FEATURES), (_EXPERTS, _FEATURES, _INNER)
    return ((tokens, _FEATURES), (tokens, _CHOICES), (tokens, _CHOICES), gate_up, down)


def _dispatched(local_call: LocalCall) -> relax.Expr:
    """Return the call with the tokens and experts of a rank."""
    call = local_call.call
    if _EXPERTS not in local_call.workers:
        return call
    local_call.report("moe", _EXPERTS, "tokens are sent to the ranks of their experts, and back")
    return comm.moe(
        *call.args,
        activation=str(call.attrs.activation),
        team=[list(team) for team in local_call.teams[_EXPERTS]],
        backend=str(call.attrs.backend),
    )


def _of_own_experts(local_call: LocalCall) -> relax.Expr:
    """Return the call with all tokens, in which the experts of other ranks are no experts."""
    call = local_call.call
    if _EXPERTS not in local_call.workers:
        return call
    x, experts, *others = call.args
    count = relax.const(int(others[1].ty.shape.values[0]), "int64")
    first = local_call.emit(relax.op.multiply(local_call.rank(_EXPERTS), count))
    own = local_call.emit(relax.op.subtract(experts, first))
    return comm.moe(
        *(x, own, *others),
        activation=str(call.attrs.activation),
        backend=str(call.attrs.backend),
    )


RULES: Final = {"comm.moe": _moe}
