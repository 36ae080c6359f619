# SPDX-License-Identifier: Apache-2.0
"""What goes on beside what: communication in lanes, and the computation between its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm_ipc.transform.report import FunctionPlan, Transfer

#: Of the names of what goes on beside something.
_SHOWN: Final = 6


def lanes(plan: FunctionPlan) -> list[list[Transfer]]:
    """Return transfers in as few lanes as there are at once; those of a lane follow each other."""
    found: list[list[Transfer]] = []
    for transfer in plan.transfers:
        for lane in found:
            if lane[-1].last < transfer.first:
                lane.append(transfer)
                break
        else:
            found.append([transfer])
    return found


def beside(plan: FunctionPlan, transfer: Transfer) -> list[str]:
    """Return what the program computes while data are on their way."""
    between = plan.events[transfer.first + 1 : transfer.last]
    return [event.computes for event in between if event.computes is not None]


def is_product(name: str) -> bool:
    """Whether what is called is a matrix product, alone or with what follows it."""
    return "matmul" in name


def listed(names: Sequence[str]) -> str:
    """Return names, with numbers where they repeat."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    texts = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def hidden(plan: FunctionPlan) -> str:
    """Return in a sentence how much communication goes on beside computation."""
    if not plan.transfers:
        return ""
    count = sum(bool(beside(plan, one)) for one in plan.transfers)
    if not count:
        return "Nothing is computed while data are on their way."
    of = len(plan.transfers)
    return f"In {count} of {of} transfers the program computes while data are on their way."


def describe(plan: FunctionPlan, transfer: Transfer) -> str:
    """Return what the reader learns about a transfer."""
    if transfer.how == "called":
        return (
            f"{transfer.what}: called at event {transfer.first}; the program waits until it is done"
        )
    words = {"posted": "posted", "shown": "shown to peers"}
    starts = ", ".join(map(str, transfer.starts))
    lines = [f"{transfer.what}: {words.get(transfer.how, transfer.how)} at event {starts}"]
    if transfer.waits:
        lines.append(f"data of peers are waited for at event {', '.join(map(str, transfer.waits))}")
    lines.append(f"ends at event {transfer.last}")
    lines.append(f"meanwhile: {listed(beside(plan, transfer)) or 'nothing'}")
    return "\n".join(lines)
