# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a program that several ranks run, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tvm_ipc.contract.programs import KERNEL_ALIGNMENT


class HazardKind(Enum):
    """What goes wrong."""

    WRITE = "written while peers may read it"
    FREE = "freed while peers may read it"
    RETURN = "left behind at the end of the function while peers may read it"
    LOST = "read after something else was written there"
    BOUNDS = "outside of its storage"
    MISALIGNED = "not where the kernel expects it"
    UNFINISHED = "read before the work that writes it has ended"
    BUSY = "written before the work that uses it has ended"
    NEVER_WAITED = "not waited for"
    SHOWN = "written before it is hidden"
    NEVER_HIDDEN = "not hidden"
    HIDDEN = "used after it was hidden"
    CAPTURED = "in a CUDA graph"
    BRANCHES = "not the same in both branches of a condition that ranks may decide differently"
    DISAGREES = "in another collective than others of its team"
    STUCK = "waiting for ever"


#: What goes wrong with a work that a rank has posted.
OF_WORKS = frozenset((HazardKind.UNFINISHED, HazardKind.BUSY, HazardKind.NEVER_WAITED))
#: What goes wrong where ranks do not meet in the same order.
OF_ORDER = frozenset((HazardKind.BRANCHES, HazardKind.DISAGREES, HazardKind.STUCK))

#: What goes wrong with a tensor that a rank shows.
OF_SHOWS = frozenset((HazardKind.SHOWN, HazardKind.NEVER_HIDDEN))


@dataclass(frozen=True)
class Alone:
    """A work, or something shown, that is needed before anything was done beside it."""

    function: str
    name: str
    begun: str  #: the binding where it begins
    needed: str  #: and where it is waited for


@dataclass(frozen=True)
class Hazard:
    """One place where a rank sees wrong data or none, or may do so.

    Where sizes are symbolic a hazard is proved by `example`; `unknown` is one of which neither that
    it is one nor that it is none could be proved.
    """

    function: str
    kind: HazardKind
    memory: str  #: the storage, or the tensor and its storage
    binding: str  #: where it goes wrong
    #: The collective whose input peers may read; what overwrote; how far it is; what posted a work;
    #: what shows or hides it; where other ranks are.
    other: str
    example: str = ""  #: sizes at which it goes wrong, such as "n = 1"; "" where they do not matter
    unknown: bool = False

    def __str__(self) -> str:
        if self.kind is HazardKind.LOST:
            more = f"what overwrote it is `{self.other}`; place them apart"
        elif self.kind is HazardKind.BOUNDS:
            more = f"it {self.other}"
        elif self.kind is HazardKind.MISALIGNED:
            more = (
                f"it {self.other}, which is no multiple of {KERNEL_ALIGNMENT}: reading it may end "
                "the process; begin elsewhere, or copy it"
            )
        elif self.kind in OF_WORKS:
            more = f"it was posted in `{self.other}`; wait for it before, on every path"
        elif self.kind in OF_SHOWS:
            more = f"it was shown in `{self.other}`; hide it before, on every path"
        elif self.kind is HazardKind.HIDDEN:
            more = f"that was in `{self.other}`, and its rank may write it since; use it before"
        elif self.kind is HazardKind.CAPTURED:
            more = (
                f"{self.other} is done once, and repeated without the host, who tells peers of it; "
                "have tvm_ipc.transform.RewriteCUDAGraph in the place of TVM's"
            )
        elif self.kind is HazardKind.BRANCHES:
            more = (
                f"{self.other}; have both do the same in the same order, or decide by what all of "
                "these ranks have alike, such as the result of an all-reduce"
            )
        elif self.kind in OF_ORDER:
            more = (
                f"{self.other}; all ranks of a team make the same calls in the same order, and of "
                "two ranks one sends while the other one receives"
            )
        else:
            more = (
                f"they do so in `{self.other}`, which has no exit barrier; keep the memory until "
                "a later collective that none of the same ranks leaves before all have entered has "
                "returned, such as an all-reduce, or keep the barrier"
            )
        if self.example:
            more += f" (for example where {self.example})"
        if self.unknown and self.kind not in OF_ORDER:
            more += " (for no sizes that were tried, and it could not be proved for all)"
        is_ = "may be" if self.unknown else "is"
        return (
            f"function {self.function!r}, `{self.binding}`: {self.memory} {is_} {self.kind.value}; "
            f"{more}"
        )
