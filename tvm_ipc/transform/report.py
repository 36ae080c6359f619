# SPDX-License-Identifier: Apache-2.0
"""The report of the decisions of passes and their reasons, as data.

    with tvm_ipc.transform.collect_report() as report:
        mod = tvm.transform.Sequential([...])(mod)
    for decision in report.decisions: ...

`print(report)` prints the decisions with their reasons, and notebooks display them as a table.
Outside such a block decisions are only logged (`logging.getLogger("tvm_ipc")`, level DEBUG). A pass
returns the same module with and without a report.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from tvm_ipc.html_tables import html_table

_log: Final = logging.getLogger("tvm_ipc.transform")
#: Width of lines of text.
_LINE: Final = 79
#: Names with a number at the end, as TVM makes them; element types are excluded.
_NUMBERED: Final = re.compile(r"\b(?!(?:b?float|u?int|bool)\d)[A-Za-z_]\w*?\d+\b")


@dataclass(frozen=True)
class Decision:
    """One decision of a pass."""

    pass_name: str
    function: str  #: the Relax function
    subject: str  #: what it is about, such as "allreduce of lv3 (sum)"
    verdict: str  #: what was done, such as "rewritten", "skipped", "barrier left out"
    reason: str


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the memory plan."""

    name: str
    scope: str
    dtype: str
    bytes: int | None  #: None where the size is symbolic
    size: str  #: the size in bytes as text, possibly symbolic
    storage: int  #: index in `FunctionPlan.storages`; -1 for a tensor with its own allocation
    offset: str  #: in bytes
    first: int  #: the event that uses it first
    last: int  #: the event that uses it last on this rank
    peers_until: int | None = None  #: the event until which peers may read it


@dataclass(frozen=True)
class PlannedStorage:
    """A storage of the memory plan."""

    name: str
    scope: str
    bytes: int | None
    size: str


@dataclass(frozen=True)
class Event:
    """One binding of a function; events are in the order in which they run."""

    text: str
    collective: str | None = None  #: the text of its `Collective`, if it is one
    barrier: str | None = None  #: "kept" or "left out" if the collective has an exit barrier
    computes: str | None = None  #: the kernel or function that it calls, if it computes


@dataclass(frozen=True)
class Transfer:
    """A transfer of data between ranks, from one event to another.

    A transfer that is called blocks the program. Transfers that are started asynchronously, or that
    expose chunks to peers, overlap with the events in between.
    """

    what: str  #: a description such as "allgather of x"
    how: str  #: "called", "posted" or "shown"
    first: int  #: the event that starts it
    last: int  #: the event that ends it
    starts: tuple[int, ...]  #: the events that provide data
    waits: tuple[int, ...]  #: the events that may wait for data of peers


@dataclass(frozen=True)
class FunctionPlan:
    """The memory plan of one function."""

    function: str
    storages: tuple[PlannedStorage, ...]
    tensors: tuple[PlannedTensor, ...]
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...] = ()  #: in the order in which they start
    #: By scope, the most bytes that are live at once; scopes with symbolic sizes are missing.
    lower_bound: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """The decisions and memory plans of the passes that ran in a `collect_report` block.

    Attributes
    ----------
    decisions : what the passes did or skipped, each with its reason, in order.
    plans : the memory plans of `StaticPlanBlockMemory`, one for each function.

    Examples
    --------
    >>> import tvm
    >>> import tvm_ipc
    >>> from tvm_ipc.transform import collect_report
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allreduce(x, "sum")
    ... ''')
    >>> with collect_report() as report:
    ...     mod = tvm_ipc.get_pipeline("llvm", world_size=2)(mod)
    >>> {decision.pass_name for decision in report.decisions} >= {"IPCAllReduceRewrite"}
    True
    >>> [plan.function for plan in report.plans]
    ['main']
    """

    decisions: list[Decision] = field(default_factory=list)
    plans: list[FunctionPlan] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the numbers of decisions and plans."""
        counts = [
            f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
            for items, noun in ((self.decisions, "decision"), (self.plans, "memory plan"))
        ]
        return f"<Report: {' and '.join(counts)}; print(report) prints the decisions>"

    def __str__(self) -> str:
        """Return the decisions as `tvm-ipc explain --text` prints them."""
        if not self.decisions:
            return "No pass had anything to decide."
        lines = ["Decisions"]
        for finding in findings(self.decisions):
            head = f"{finding.functions}: {finding.about}: {finding.verdict}"
            lines.append(hanging_indent(head, "  ", "    "))
            lines.append(
                hanging_indent(f"{finding.reason} ({finding.pass_name})", "      ", "      ")
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the decisions as a table, for notebooks."""
        headers = ("function", "subject", "decision", "reason", "pass")
        rows = [
            (finding.functions, finding.about, finding.verdict, finding.reason, finding.pass_name)
            for finding in findings(self.decisions)
        ]
        return html_table("Decisions" if rows else str(self), headers if rows else (), rows)


@dataclass(frozen=True)
class Finding:
    """Decisions of one pass that only differ in numbered names."""

    pass_name: str
    verdict: str
    reason: str
    decisions: tuple[Decision, ...]

    @property
    def functions(self) -> str:
        """Return the names of the functions that it concerns."""
        names = dict.fromkeys(decision.function for decision in self.decisions)
        return ", ".join(name or "the module" for name in names)

    @property
    def about(self) -> str:
        """Return the subjects, shortened if there are more than two."""
        subjects = [decision.subject for decision in self.decisions]
        if len(subjects) <= 2:
            return ", ".join(subjects)
        return f"{subjects[0]} and {len(subjects) - 1} more"


def findings(decisions: Iterable[Decision]) -> list[Finding]:
    """Group decisions with the same reason, in the order of the first of each group."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for decision in decisions:
        reason = _NUMBERED.sub("\u2026", decision.reason)
        key = (decision.pass_name, decision.verdict, reason)
        groups.setdefault(key, []).append(decision)
    return [
        Finding(*key[:2], key[2] if len(group) > 1 else group[0].reason, tuple(group))
        for key, group in groups.items()
    ]


def hanging_indent(text: str, first: str, rest: str) -> str:
    """Wrap a text, with an indent for its first line and another one for the rest."""
    # Names are long; breaking them would make them useless.
    wrapper = textwrap.TextWrapper(_LINE, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, rest
    return wrapper.fill(text)


_current: ContextVar[Report | None] = ContextVar("tvm_ipc.report", default=None)


@contextmanager
def collect_report() -> Iterator[Report]:
    """Collect the decisions of passes that run in this block, in this thread.

    Yields
    ------
    Report
        The report, which passes fill; it stays valid after the block.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import IPCAllReduceRewrite, collect_report
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allreduce(x, "sum")
    ... ''')
    >>> with collect_report() as report:
    ...     mod = IPCAllReduceRewrite("auto")(mod)
    >>> print(report.decisions[0].verdict, "because", report.decisions[0].reason)
    skipped because it is not lowered yet; run LegalizeOps before
    """
    report = Report()
    token = _current.set(report)
    try:
        yield report
    finally:
        _current.reset(token)


def collecting() -> bool:
    """Return whether decisions are collected or logged, so that costly ones are worth computing."""
    return _current.get() is not None or _log.isEnabledFor(logging.DEBUG)


def note(decision: Decision) -> None:
    """Log a decision, and add it to the report that is being collected, if any."""
    report = _current.get()
    if report is not None:
        report.decisions.append(decision)
    site = (decision.pass_name, decision.function or "the module", decision.subject)
    _log.debug("%s: %s: %s: %s: %s", *site, decision.verdict, decision.reason)


def note_plan(plan: FunctionPlan) -> None:
    """Add a memory plan to the report that is being collected, if any."""
    report = _current.get()
    if report is not None:
        report.plans.append(plan)
