# SPDX-License-Identifier: Apache-2.0
"""Collectives in destination-passing form: calls of packed functions that write their result.

`LegalizeOps` and `CallTIRRewrite` turn `R.ccl.*` into them. This module is where passes recognise
such calls, and where they make those that only our runtime has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm
from tvm import relax

from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag, ReduceKind

DISCO_ALLREDUCE = "runtime.disco.allreduce"
CUSTOM_ALLREDUCE = "runtime.disco.cuda_ipc.custom_allreduce"
OWN_ALLREDUCE = "tvm_ipc.allreduce"

#: Other collectives of Disco, by the place of (send, in_group, recv) among their arguments.
_DISCO = {
    "runtime.disco.allgather": (0, 1, 2),
    "runtime.disco.broadcast_from_worker0": (0, 1, 2),
    "runtime.disco.scatter_from_worker0": (0, 1, 2),
    "runtime.disco.gather_to_worker0": (0, 1, 2),
}

#: Collectives in which no rank returns before every rank of the group has entered.
_MEETINGS = frozenset({DISCO_ALLREDUCE, CUSTOM_ALLREDUCE, OWN_ALLREDUCE, "runtime.disco.allgather"})


@dataclass(frozen=True)
class AllReduce:
    """What an all-reduce does beyond moving data from `send` to `recv`."""

    kind: ReduceKind
    strategy: AllReduceStrategy | None  #: None: an ordinary all-reduce of Disco
    flags: CollectiveFlag = CollectiveFlag.NONE


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str
    send: relax.Expr
    recv: relax.Expr
    in_group: bool
    allreduce: AllReduce | None = None

    @property
    def is_meeting(self) -> bool:
        """Whether every rank of the group has entered when one of them returns."""
        return self.name in _MEETINGS

    @property
    def reads_peers(self) -> bool:
        """Whether peers read `send` where it lies, if that is memory which they map."""
        return self.name in (CUSTOM_ALLREDUCE, OWN_ALLREDUCE)

    def __str__(self) -> str:
        kind = f" ({self.allreduce.kind.name.lower()})" if self.allreduce else ""
        return f"{self.name.rsplit('.', 1)[-1]} of {_name(self.send)}{kind}"


def match_collective(expr: relax.Expr) -> Collective | None:
    """Return what the call does, or None if it is not a collective in a form known here."""
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    name, args = str(expr.op.global_symbol), expr.args[:]
    try:
        if name == DISCO_ALLREDUCE:
            send, kind, in_group, recv = args
            reduction = ReduceKind(int(kind.values[0]))
            return Collective(name, send, recv, bool(_int(in_group)), AllReduce(reduction, None))
        if name == CUSTOM_ALLREDUCE:
            send, strategy, recv = args
            how = AllReduce(ReduceKind.SUM, AllReduceStrategy(_int(strategy)))
            return Collective(name, send, recv, False, how)
        if name == OWN_ALLREDUCE:
            send, kind, in_group, strategy, flags, recv = args
            how = AllReduce(
                ReduceKind(_int(kind)),
                AllReduceStrategy(_int(strategy)),
                CollectiveFlag(_int(flags)),
            )
            return Collective(name, send, recv, bool(_int(in_group)), how)
        if name in _DISCO:
            send, in_group, recv = (args[place] for place in _DISCO[name])
            return Collective(name, send, recv, bool(_int(in_group)))
    except (AttributeError, IndexError, TypeError, ValueError):
        return None  # arguments that are not constants: nothing can be said about the call
    return None


def meets_peers(call: relax.Call) -> bool:
    """Whether the call is of a function with which workers meet, or makes memory for that."""
    if not isinstance(call.op, relax.ExternFunc):
        return False
    name = str(call.op.global_symbol)
    return name.startswith("runtime.disco.") or name == OWN_ALLREDUCE


def own_allreduce(collective: Collective, flags: CollectiveFlag) -> relax.Call:
    """Return an all-reduce in the form that carries groups and flags."""
    allreduce = collective.allreduce
    assert allreduce is not None and allreduce.strategy is not None
    numbers = [allreduce.kind, collective.in_group, allreduce.strategy, flags]
    arguments = [relax.prim_value(int(number)) for number in numbers]
    return relax.Call(
        relax.ExternFunc(OWN_ALLREDUCE),
        [collective.send, *arguments, collective.recv],
        ty_args=[relax.AnyType()],
    )


def with_flags(collective: Collective, flags: CollectiveFlag) -> Collective:
    """Return the same all-reduce with more promises of the compiler."""
    assert collective.allreduce is not None
    allreduce = replace(collective.allreduce, flags=collective.allreduce.flags | flags)
    return replace(collective, name=OWN_ALLREDUCE, allreduce=allreduce)


def _int(expr: relax.Expr) -> int:
    value = expr.value if isinstance(expr, tvm.ir.GenericConst) else expr
    return int(value)


def _name(expr: relax.Expr) -> str:
    return str(expr.name) if isinstance(expr, relax.Var) else "a constant"
