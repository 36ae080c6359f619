# SPDX-License-Identifier: Apache-2.0
"""What each rank did when, in the format that Perfetto and Chrome's `about:tracing` show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from tvm_ipc import contract
from tvm_ipc.bench.stage import Event
from tvm_ipc.contract import Meeting
from tvm_ipc.contract.programs import COPY, HIDE, JOIN, PEER, REDUCE_PARTS, SHOW
from tvm_ipc.transform.overlap.cost import PredictedStep


class Doing(str, Enum):
    """What a rank does in a call."""

    COMPUTE = "compute"
    COMMUNICATE = "communicate"  #: a collective: meet, wait for the link, copy
    SHOW = "show"
    WAIT = "wait"
    REDUCE = "reduce"
    COPY = "copy"
    HIDE = "hide"
    MANAGE = "manage memory"


_BY_NAME = {
    **{one.value: one for one in Doing},
    SHOW.name: Doing.SHOW,
    PEER.name: Doing.WAIT,
    HIDE.name: Doing.HIDE,
    REDUCE_PARTS.name: Doing.REDUCE,
    JOIN.name: Doing.COPY,
    COPY.name: Doing.COPY,
}


def doing(name: str) -> Doing:
    """Return what a call of a function does; or a step, which has the name of what it is."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = contract.find(name)
    if known is not None and known.meets is not Meeting.NONE:
        return Doing.COMMUNICATE
    if name.startswith("vm.") or (known is not None and not known.writes):
        return Doing.MANAGE
    return Doing.COMPUTE


def foretold(steps: Iterable[PredictedStep], ranks: int) -> list[Event]:
    """Return the steps of a prediction as what each rank does."""
    return [
        Event(rank, step.doing, round(step.begin * 1e9), round(step.end * 1e9))
        for rank in range(ranks)
        for step in steps
    ]


def totals(events: Iterable[Event]) -> dict[Doing, float]:
    """Return the seconds of what is done, on the rank that takes longest for each."""
    by_rank: dict[tuple[int, Doing], float] = {}
    for event in events:
        key = (event.rank, doing(event.name))
        by_rank[key] = by_rank.get(key, 0.0) + (event.end - event.begin) * 1e-9
    return {
        kind: max(seconds for (_, other), seconds in by_rank.items() if other is kind)
        for kind in Doing
        if any(other is kind for _, other in by_rank)
    }


def document(programs: Mapping[str, Iterable[Event]]) -> dict[str, Any]:
    """Return the trace of some programs: a process each, which begins at 0, a thread a rank."""
    found: list[dict[str, Any]] = []
    for process, (title, all_events) in enumerate(programs.items()):
        events = list(all_events)
        start = min((event.begin for event in events), default=0)
        found.append(_name("process_name", process, 0, title))
        for rank in sorted({event.rank for event in events}):
            found.append(_name("thread_name", process, rank, f"rank {rank}"))
        found += [
            {
                "name": event.name,
                "cat": doing(event.name).value,
                "ph": "X",
                "ts": (event.begin - start) / 1e3,
                "dur": (event.end - event.begin) / 1e3,
                "pid": process,
                "tid": event.rank,
            }
            for event in events
        ]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _name(what: str, process: int, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": rank, "args": {"name": name}}
