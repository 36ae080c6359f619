# SPDX-License-Identifier: Apache-2.0
"""Summarize an explanation in sentences that the page and the terminal report share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tvm_ipc.arguments import counted
from tvm_ipc.packed_functions import IPC_MEMORY, KINDS
from tvm_ipc.tools.format import bytes_text, list_text, time_text
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation
from tvm_ipc.transform.report import FunctionPlan


def relative_size(size: int, reference: int) -> str:
    """Return a size relative to another one, such as `75%`."""
    if not reference:
        return "" if not size else "more"
    if size == reference:
        return "the same"
    share = 100 * size / reference
    if share >= 1000:
        return f"{share / 100:.0f} times" if share < 100_000 else "over 1000 times"
    return f"{share:.0f}%" if abs(share - 100) >= 0.5 else f"{share:.2f}%"


def compile_settings(explanation: Explanation) -> list[str]:
    """Return the settings that the module was compiled with."""
    question = explanation.question
    settings = [
        f"target {question.target}",
        counted(question.world_size, "worker"),
        f"strategy {question.strategy}",
    ]
    return [*settings, "in the order of each GPU's stream"] if question.for_gpus else settings


def assumptions(explanation: Explanation) -> list[str]:
    """Return the values that symbolic sizes are evaluated with."""
    values: dict[str, dict[int, list[str]]] = {}
    for function, sizes in explanation.sizes.items():
        for name, value in sizes.items():
            values.setdefault(name, {}).setdefault(value, []).append(function)
    return [
        f"{name} = {value}" + (f" in {', '.join(functions)}" if len(choices) > 1 else "")
        for name, choices in sorted(values.items())
        for value, functions in choices.items()
    ]


#: Number of functions whose figures are listed.
_MAX_FUNCTIONS: Final = 6


def figure_rows(explanation: Explanation) -> list[tuple[str, str]]:
    """Return the headline figures, each with a label; an empty label continues the row above."""
    figures = explanation.figures
    names = [parameters.function for parameters in figures.parameters]
    rows = [("workers", str(explanation.question.world_size))]
    rows += _rows_of("collectives", names, lambda name: _collectives_of(explanation, name))
    if figures.collectives:
        rows.append(("", "the bytes are those of the inputs on one worker"))
    rows += _rows_of("parameters", names, lambda name: _parameters_of(explanation, name))
    rows.append(("memory", headline(explanation)))
    if figures.estimates:
        rows += _rows_of("time", names, lambda name: _time_of(explanation, name))
    return rows


def _rows_of(
    label: str, names: Sequence[str], text_of: Callable[[str], str]
) -> list[tuple[str, str]]:
    texts = [f"{name}: {text}" for name in names if (text := text_of(name))]
    if len(texts) > _MAX_FUNCTIONS:
        texts = [*texts[:_MAX_FUNCTIONS], f"and {len(texts) - _MAX_FUNCTIONS} more functions"]
    return [("" if index else label, text) for index, text in enumerate(texts or ["none"])]


def _collectives_of(explanation: Explanation, name: str) -> str:
    counts = [c for c in explanation.figures.collectives if c.function == name]
    return (
        list_text(
            f"{counted(c.count, _prose_name(c.kind))} of {bytes_text(c.bytes)}"
            + (" together" if c.count > 1 else "")
            for c in counts
        )
        if counts
        else ""
    )


def _prose_name(kind: str) -> str:
    return KINDS[kind].prose_name if kind in KINDS else kind


def _parameters_of(explanation: Explanation, name: str) -> str:
    (parameters,) = (p for p in explanation.figures.parameters if p.function == name)
    text = f"{bytes_text(parameters.bytes)} per worker"
    if parameters.bytes_before_sharding is None:
        return text
    return f"{text}, {bytes_text(parameters.bytes_before_sharding)} before sharding"


def _time_of(explanation: Explanation, name: str) -> str:
    estimate = next((e for e in explanation.figures.estimates if e.function == name), None)
    if estimate is None:
        return ""
    text = f"{time_text(estimate.seconds, 'us')} in collectives that nothing overlaps with"
    if estimate.covered < estimate.count:
        text += f", for {estimate.covered} of {estimate.count} that the calibration has"
    return text


def headline(explanation: Explanation) -> str:
    """Return the memory of the plan and of its references, in a sentence or two."""
    memory = explanation.total()
    ours, upstream, least = (
        sum(by_scope.values()) for by_scope in (memory.ours, memory.upstream, memory.least)
    )
    if not ours:
        return "The module allocates no tensors that a plan could place."
    results = sum(memory.results.values())
    returned = f" Results take another {bytes_text(results)}." if results else ""
    return (
        f"The plan takes {bytes_text(ours)} per worker, TVM's plan takes {bytes_text(upstream)}. "
        f"At most {bytes_text(least)} are live at once, a lower bound for any plan.{returned}"
    )


def upstream_caveat(explanation: Explanation) -> str:
    """Return why the program cannot run with TVM's plan; an empty text if it can."""
    hows = {transfer.how for plan in explanation.report.plans for transfer in plan.transfers}
    uses = {"posted": "asynchronous collectives", "shown": "peers"}
    readers = " and ".join(reader for how, reader in uses.items() if how in hows)
    if not readers:
        return ""
    return f"TVM's plan is invalid here: it reuses memory that {readers} may still read."


def barrier_cost(explanation: Explanation) -> str:
    """Return the memory that removed exit barriers cost; an empty text if there is none."""
    memory = explanation.total()
    extra = memory.ours.get(IPC_MEMORY, 0) - memory.least.get(IPC_MEMORY, 0)
    events = [event for plan in explanation.report.plans for event in plan.events]
    if extra <= 0 or not any(event.barrier == "left out" for event in events):
        return ""
    return (
        f"{bytes_text(extra)} of {IPC_MEMORY} keep inputs of collectives alive longer, so that "
        "these need no exit barrier. A barrier budget of 0 saves this memory."
    )


def collectives_summary(plan: FunctionPlan) -> str:
    """Return the number of events and collectives of a function, and of its exit barriers."""
    releases = {transfer.last for transfer in plan.transfers if transfer.how == "shown"}
    kinds = [
        event.barrier
        for index, event in enumerate(plan.events)
        if event.collective is not None and index not in releases
    ]
    hows = [transfer.how for transfer in plan.transfers]
    overlapped = [
        f"{hows.count(how)} {text}"
        for how, text in (("posted", "asynchronous"), ("shown", "in chunks"))
        if how in hows
    ]
    if not kinds and not overlapped:
        return f"{len(plan.events)} events, no collectives."
    count = len(kinds) + hows.count("posted") + hows.count("shown")
    text = f"{len(plan.events)} events, {counted(count, 'collective')}"
    if overlapped:
        text += f", {' and '.join(overlapped)}"
    in_place = [kind for kind in kinds if kind is not None]
    if in_place:
        text += (
            f"; {in_place.count('left out')} of {len(in_place)} with their input in {IPC_MEMORY} "
            "have no exit barrier"
        )
    return text + "."
