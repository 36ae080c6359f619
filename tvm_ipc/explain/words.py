# SPDX-License-Identifier: Apache-2.0
"""What the page and the terminal say in the same words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.inspection.explanation import Explanation
from tvm_ipc.transform.report import Decision, FunctionPlan


def bytes_text(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (
        ("PiB", 1 << 50),
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ):
        if count >= size:
            value = count / size
            digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{count} B"


def against(ours: int, theirs: int) -> str:
    """Return how much less one plan takes than another."""
    if not theirs:
        return "" if not ours else "more"
    if ours == theirs:
        return "the same"
    share = 100 * ours / theirs
    if share >= 1000:
        return f"{share / 100:.0f} times" if share < 100_000 else "over 1000 times"
    return f"{share:.0f}%" if abs(share - 100) >= 0.5 else f"{share:.2f}%"


#: Names that TVM numbers; types of elements are none.
_NUMBERED = re.compile(r"\b(?!(?:b?float|u?int|bool)\d)[A-Za-z_]\w*?\d+\b")


@dataclass(frozen=True)
class Finding:
    """Decisions of one pass that differ in numbered names only."""

    pass_name: str
    verdict: str
    reason: str
    decisions: tuple[Decision, ...]

    @property
    def functions(self) -> str:
        """Return where it was decided."""
        names = dict.fromkeys(decision.function for decision in self.decisions)
        return ", ".join(name or "the module" for name in names)

    @property
    def about(self) -> str:
        """Return the subjects in a few words."""
        subjects = [decision.subject for decision in self.decisions]
        if len(subjects) <= 2:
            return ", ".join(subjects)
        return f"{subjects[0]} and {len(subjects) - 1} more"


def findings(decisions: Iterable[Decision]) -> list[Finding]:
    """Join what was decided for the same reason, in the order of the first of each."""
    groups: dict[tuple[str, str, str], list[Decision]] = {}
    for d in decisions:
        reason = _NUMBERED.sub("\u2026", d.reason)
        groups.setdefault((d.pass_name, d.verdict, reason), []).append(d)
    return [
        Finding(*key[:2], key[2] if len(group) > 1 else group[0].reason, tuple(group))
        for key, group in groups.items()
    ]


def setting(explanation: Explanation) -> list[str]:
    """Return what the module was compiled for."""
    question = explanation.question
    workers = f"{question.world_size} worker{'s' * (question.world_size != 1)}"
    said = [f"target {question.target}", workers, f"strategy {question.strategy}"]
    return [*said, "in the order of each GPU's stream"] if question.for_gpus else said


def assumptions(explanation: Explanation) -> list[str]:
    """Return what symbolic sizes count as."""
    values: dict[str, dict[int, list[str]]] = {}
    for function, sizes in explanation.sizes.items():
        for name, value in sizes.items():
            values.setdefault(name, {}).setdefault(value, []).append(function)
    return [
        f"{name} = {value}" + (f" in {', '.join(functions)}" if len(choices) > 1 else "")
        for name, choices in sorted(values.items())
        for value, functions in choices.items()
    ]


def headline(explanation: Explanation) -> str:
    """Return the result in a sentence or two."""
    memory = explanation.total()
    ours, theirs, least = (
        sum(kind.values()) for kind in (memory.ours, memory.upstream, memory.least)
    )
    if not ours:
        return "The module allocates no tensors that a plan could place."
    results = sum(memory.results.values())
    beside = f" What is returned takes {bytes_text(results)} beside it." if results else ""
    return (
        f"The plan takes {bytes_text(ours)}; TVM's takes {bytes_text(theirs)}; "
        f"{bytes_text(least)} are live at once, and no plan can take less.{beside}"
    )


def upstream(explanation: Explanation) -> str:
    """Return why a program could not run with TVM's plan, if it could not."""
    hows = {one.how for plan in explanation.report.plans for one in plan.transfers}
    if hows <= {"called"}:
        return ""
    kinds = " or ".join(how for how in ("posted", "shown to peers") if how.split()[0] in hows)
    return f"TVM's plan would give away too early what is {kinds}: this program needs more."


def spent(explanation: Explanation) -> str:
    """Return what memory beyond the least is for, if anything is."""
    memory = explanation.total()
    more = memory.ours.get(IPC_MEMORY, 0) - memory.least.get(IPC_MEMORY, 0)
    events = [event for plan in explanation.report.plans for event in plan.events]
    if more <= 0 or not any(event.barrier == "left out" for event in events):
        return ""
    return (
        f"{bytes_text(more)} of {IPC_MEMORY} keep inputs of collectives longer, so that they need "
        "no exit barrier; with a barrier budget of 0 there is none of it."
    )


def barriers(plan: FunctionPlan) -> str:
    """Return what became of a function's collectives."""
    hides = {one.last for one in plan.transfers if one.how == "shown"}
    kinds = [
        event.barrier
        for index, event in enumerate(plan.events)
        if event.collective is not None and index not in hides
    ]
    hows = [one.how for one in plan.transfers]
    beside = [f"{hows.count(how)} {how}" for how in ("posted", "shown") if how in hows]
    if not kinds and not beside:
        return f"{len(plan.events)} events, no collectives."
    count = len(kinds) + hows.count("posted") + hows.count("shown")
    text = f"{len(plan.events)} events, {count} collective{'s' * (count > 1)}"
    if beside:
        text += f", {' and '.join(beside)}"
    in_place = [kind for kind in kinds if kind is not None]
    if in_place:
        text += (
            f"; of {len(in_place)} with input in memory that peers map, "
            f"{in_place.count('left out')} without an exit barrier"
        )
    return text + "."
