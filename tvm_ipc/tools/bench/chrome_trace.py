# SPDX-License-Identifier: Apache-2.0
"""Write timelines of ranks in the trace format of Perfetto and Chrome's `about:tracing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import Sync
from tvm_ipc.packed_functions.program_function_declarations import (
    ASSEMBLE,
    COPY,
    EXPOSE,
    PEER_VIEW,
    REDUCE_SLICES,
    RELEASE,
)
from tvm_ipc.tools.bench.timing_session import Event
from tvm_ipc.transform.overlap.cost_model import PredictedStep


class Activity(str, Enum):
    """The activity of a rank during a call."""

    COMPUTE = "compute"
    COMMUNICATE = "communicate"  #: a collective: barriers, waiting for the link, copies
    EXPOSE = "show"
    WAIT = "wait"
    REDUCE = "reduce"
    COPY = "copy"
    RELEASE = "hide"
    MANAGE = "manage memory"


_BY_NAME = {
    **{kind.value: kind for kind in Activity},
    EXPOSE.name: Activity.EXPOSE,
    PEER_VIEW.name: Activity.WAIT,
    RELEASE.name: Activity.RELEASE,
    REDUCE_SLICES.name: Activity.REDUCE,
    ASSEMBLE.name: Activity.COPY,
    COPY.name: Activity.COPY,
}


def activity(name: str) -> Activity:
    """Return the activity of a function, or of a predicted step, by its name."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    signature = packed_functions.find(name)
    if signature is not None and signature.sync is not Sync.NONE:
        return Activity.COMMUNICATE
    if name.startswith("vm.") or (signature is not None and not signature.writes):
        return Activity.MANAGE
    return Activity.COMPUTE


def predicted(steps: Iterable[PredictedStep], ranks: int) -> list[Event]:
    """Return the steps of a prediction as the same events on each rank."""
    return [
        Event(rank, step.activity, round(step.begin * 1e9), round(step.end * 1e9))
        for rank in range(ranks)
        for step in steps
    ]


def totals(events: Iterable[Event]) -> dict[Activity, float]:
    """Return the seconds of each activity, on the rank that spends most on it."""
    by_rank: dict[tuple[int, Activity], float] = {}
    for event in events:
        key = (event.rank, activity(event.name))
        by_rank[key] = by_rank.get(key, 0.0) + (event.end - event.begin) * 1e-9
    return {
        kind: max(seconds for (_, item), seconds in by_rank.items() if item is kind)
        for kind in Activity
        if any(item is kind for _, item in by_rank)
    }


def document(programs: Mapping[str, Iterable[Event]]) -> dict[str, Any]:
    """Return one trace of several programs: a process per program, a thread per rank.

    Each process starts at time 0.
    """
    entries: list[dict[str, Any]] = []
    for process, (title, all_events) in enumerate(programs.items()):
        events = list(all_events)
        start = min((event.begin for event in events), default=0)
        entries.append(_metadata("process_name", process, 0, title))
        for rank in sorted({event.rank for event in events}):
            entries.append(_metadata("thread_name", process, rank, f"rank {rank}"))
        entries += [
            {
                "name": event.name,
                "cat": activity(event.name).value,
                "ph": "X",
                "ts": (event.begin - start) / 1e3,
                "dur": (event.end - event.begin) / 1e3,
                "pid": process,
                "tid": event.rank,
            }
            for event in events
        ]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _metadata(kind: str, process: int, rank: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": rank, "args": {"name": name}}
