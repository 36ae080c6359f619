# SPDX-License-Identifier: Apache-2.0
"""Assign transfers to tracks, and find the kernels that overlap with each transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm_ipc.transform.report import FunctionPlan, Transfer

#: Number of kernel names that a list names before "and N more".
_MAX_NAMES: Final = 6

#: How a transfer runs, by the name in the plan.
HOW: Final = {
    "called": "the program waits",
    "posted": "started",
    "shown": "exposed to peers",
}


def tracks(plan: FunctionPlan) -> list[list[Transfer]]:
    """Assign transfers to as few tracks as possible; those of a track do not overlap."""
    result: list[list[Transfer]] = []
    for transfer in plan.transfers:
        for track in result:
            if track[-1].last < transfer.first:
                track.append(transfer)
                break
        else:
            result.append([transfer])
    return result


def overlapping(plan: FunctionPlan, transfer: Transfer) -> list[str]:
    """Return the kernels that run during a transfer."""
    between = plan.events[transfer.first + 1 : transfer.last]
    return [event.computes for event in between if event.computes is not None]


def is_matmul(name: str) -> bool:
    """Return whether a kernel is a matmul, which may be fused with an epilogue."""
    return "matmul" in name


def list_names(names: Sequence[str]) -> str:
    """Return a list of names, with counts of repeated ones."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    texts = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
    more = f" and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(texts[:_MAX_NAMES]) + more


def overlap_summary(plan: FunctionPlan) -> str:
    """Return a sentence about the number of transfers that overlap with kernels."""
    if not plan.transfers:
        return ""
    count = sum(bool(overlapping(plan, transfer)) for transfer in plan.transfers)
    if not count:
        return "No transfer overlaps with computation."
    total = len(plan.transfers)
    return f"{count} of {total} transfers overlap with computation."


def describe(plan: FunctionPlan, transfer: Transfer) -> str:
    """Return the tooltip of a transfer."""
    if transfer.how == "called":
        return f"{transfer.what}: called at event {transfer.first}; the program waits for it"
    starts = ", ".join(map(str, transfer.starts))
    lines = [f"{transfer.what}: {HOW.get(transfer.how, transfer.how)} at event {starts}"]
    if transfer.waits:
        lines.append(
            f"the program waits for data of peers at event {', '.join(map(str, transfer.waits))}"
        )
    lines.append(f"ends at event {transfer.last}")
    lines.append(f"meanwhile: {list_names(overlapping(plan, transfer)) or 'nothing'}")
    return "\n".join(lines)
