# SPDX-License-Identifier: Apache-2.0
"""What passes decided and why, as data.

    with tvm_ipc.transform.collect_report() as report:
        mod = tvm.transform.Sequential([...])(mod)
    for decision in report.decisions: ...

Passes note what they decide; outside such a block nothing is kept, though decisions are logged
(`logging.getLogger("tvm_ipc")`, at the level DEBUG). The IR does not carry any of
it, so a pass gives the same module with and without a report.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

_log: Final = logging.getLogger("tvm_ipc.transform")


@dataclass(frozen=True)
class Decision:
    """One thing that a pass decided."""

    pass_name: str
    function: str  #: the Relax function
    subject: str  #: what it is about, such as "allreduce of lv3 (sum)"
    verdict: str  #: what was done, such as "rewritten", "left alone", "barrier left out"
    reason: str


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that the memory plan placed."""

    name: str
    scope: str
    dtype: str
    bytes: int | None  #: None where the size is symbolic
    size: str  #: the size in bytes as text, symbolic where it must be
    storage: int  #: index in `FunctionPlan.storages`; -1 for a tensor with its own allocation
    offset: str  #: in bytes
    first: int  #: the event that uses it first
    last: int  #: the event that uses it last on this rank
    peers_until: int | None = None  #: the meeting until which peers may read it


@dataclass(frozen=True)
class PlannedStorage:
    """A storage of the memory plan."""

    name: str
    scope: str
    bytes: int | None
    size: str


@dataclass(frozen=True)
class Event:
    """One binding of a function, in the order in which they run."""

    text: str
    collective: str | None = None  #: what `Collective.__str__` says
    barrier: str | None = None  #: "kept" or "left out", of a collective that has one
    computes: str | None = None  #: the kernel or function that it calls, if that computes something


@dataclass(frozen=True)
class Transfer:
    """Data on their way between ranks, from one event to another.

    While one is called the program does nothing else. What is posted, or shown to peers chunk by
    chunk, goes on beside the events between.
    """

    what: str  #: such as "allgather of x"
    how: str  #: "called", "posted" or "shown"
    first: int  #: the event that starts it
    last: int  #: the event after which nothing of it goes on
    starts: tuple[int, ...]  #: the events that give data away
    waits: tuple[int, ...]  #: the events that may wait for data of peers


@dataclass(frozen=True)
class FunctionPlan:
    """The memory plan of one function."""

    function: str
    storages: tuple[PlannedStorage, ...]
    tensors: tuple[PlannedTensor, ...]
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...] = ()  #: in the order in which they start
    #: By scope, of those without symbolic sizes: the most bytes that are live at once.
    lower_bound: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """What the passes that ran in a `collect_report` block decided."""

    decisions: list[Decision] = field(default_factory=list)
    plans: list[FunctionPlan] = field(default_factory=list)


_current: ContextVar[Report | None] = ContextVar("tvm_ipc.report", default=None)


@contextmanager
def collect_report() -> Iterator[Report]:
    """Collect what passes decide in this block, in this thread."""
    report = Report()
    token = _current.set(report)
    try:
        yield report
    finally:
        _current.reset(token)


def collecting() -> bool:
    """Whether somebody wants to know: what is costly to tell may be left out if not."""
    return _current.get() is not None or _log.isEnabledFor(logging.DEBUG)


def note(decision: Decision) -> None:
    """Log a decision, and add it to the report that is being collected, if any."""
    report = _current.get()
    if report is not None:
        report.decisions.append(decision)
    about = (decision.pass_name, decision.function or "the module", decision.subject)
    _log.debug("%s: %s: %s: %s: %s", *about, decision.verdict, decision.reason)


def note_plan(plan: FunctionPlan) -> None:
    """Add a memory plan to the report that is being collected, if any."""
    report = _current.get()
    if report is not None:
        report.plans.append(plan)
