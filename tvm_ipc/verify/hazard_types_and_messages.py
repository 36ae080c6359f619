# SPDX-License-Identifier: Apache-2.0
"""Represent what is wrong with a program that several ranks run, as data with a message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT


class HazardKind(Enum):
    """The kind of a hazard; the value completes the sentence "MEMORY is ..."."""

    WRITE = "written while peers may read it"
    FREE = "freed while peers may read it"
    RETURN = "left to peers that may read it after the function returns"
    LOST = "read after it was overwritten"
    BOUNDS = "outside of its storage"
    MISALIGNED = "misaligned for the kernel"
    UNFINISHED = "read before the request that writes it has ended"
    BUSY = "written before the request that uses it has ended"
    NEVER_WAITED = "not waited for"
    EXPOSED = "written while it is exposed"
    NEVER_RELEASED = "not released"
    RELEASED = "used after its release"
    CAPTURED = "captured in a CUDA graph"
    BRANCHES = "different in both branches of a condition that may differ between ranks"
    DISAGREES = "in a call that does not match the call of a peer"
    STUCK = "waiting indefinitely"


_OF_REQUESTS = frozenset((HazardKind.UNFINISHED, HazardKind.BUSY, HazardKind.NEVER_WAITED))
_OF_EXPOSED_BUFFERS = frozenset((HazardKind.EXPOSED, HazardKind.NEVER_RELEASED))
#: The kinds that the order check reports.
_OF_ORDER = frozenset((HazardKind.BRANCHES, HazardKind.DISAGREES, HazardKind.STUCK))


@dataclass(frozen=True)
class UselessOverlap:
    """A request or an exposed buffer that is needed before anything overlaps with it."""

    function: str
    name: str
    begun: str  #: the binding that starts it
    awaited: str  #: the binding that waits for it


@dataclass(frozen=True)
class Hazard:
    """A statement at which a rank sees wrong data or waits indefinitely, or may do so.

    If sizes are symbolic, `example` gives sizes that prove the hazard. An `unknown` hazard is
    neither proved nor refuted.

    Attributes
    ----------
    function : the name of the function.
    kind : what happens to the memory.
    memory : the storage, the tensor and its storage, or another subject of the message.
    binding : the statement at which it happens.
    related : the statement that explains the hazard, such as the collective whose input peers may
        read; or a fact, such as the bytes that are out of bounds.
    example : sizes at which it occurs, such as "n = 1"; "" where they do not matter.
    unknown : whether there is neither a proof nor an example.

    Examples
    --------
    The program returns the output of a collective that it does not wait for:

    >>> import tvm
    >>> from tvm_ipc.transform import verify_cross_rank_safety
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), out: R.Tensor((8,), "float32")):
    ...         request = R.comm.start(R.comm.allgather(x, workers=2), out)
    ...         return out
    ... ''')
    >>> hazard = verify_cross_rank_safety(mod)[1]
    >>> hazard.function, hazard.kind.value, hazard.unknown
    ('main', 'not waited for', False)
    """

    function: str
    kind: HazardKind
    memory: str
    binding: str
    related: str
    example: str = ""
    unknown: bool = False

    def __str__(self) -> str:
        """Return the sentence that errors print."""
        details = self._details()
        if self.example:
            details += f" (for example where {self.example})"
        if self.unknown and self.kind not in _OF_ORDER:
            details += " (no size that was tried is an example, and no proof covers all sizes)"
        verb = "may be" if self.unknown else "is"
        where = f"function {self.function!r}, `{self.binding}`"
        return f"{where}: {self.memory} {verb} {self.kind.value}; {details}"

    def _details(self) -> str:
        """Return the part of the message that explains the hazard and how to avoid it."""
        if self.kind is HazardKind.LOST:
            return f"it was overwritten in `{self.related}`; allocate the two tensors apart"
        if self.kind is HazardKind.BOUNDS:
            return f"it {self.related}"
        if self.kind is HazardKind.MISALIGNED:
            return (
                f"it {self.related}, which is no multiple of {KERNEL_ALIGNMENT}, so reading it may "
                "crash the process; align the view, or copy it"
            )
        if self.kind in _OF_REQUESTS:
            return f"it was started in `{self.related}`; wait for it first, on every path"
        if self.kind in _OF_EXPOSED_BUFFERS:
            return f"it was exposed in `{self.related}`; release it first, on every path"
        if self.kind is HazardKind.RELEASED:
            return (
                f"it was released in `{self.related}`, and its rank may have written it since; use "
                "it before the release"
            )
        if self.kind is HazardKind.CAPTURED:
            return (
                f"replays of {self.related} skip the host, which notifies peers; use "
                "tvm_ipc.gpu.RewriteCUDAGraph instead of TVM's RewriteCUDAGraph"
            )
        if self.kind is HazardKind.BRANCHES:
            return (
                f"{self.related}; make the same calls in the same order in both, or use a "
                "condition that is the same on all these ranks, such as the result of an all-reduce"
            )
        if self.kind in _OF_ORDER:
            return (
                f"{self.related}; all ranks of a team must make the same calls in the same order, "
                "and each send needs a receive"
            )
        return (
            f"they read it in `{self.related}`, which has no exit barrier; keep the memory until a "
            "later collective with a barrier of the same ranks, such as an all-reduce, has "
            "returned, or keep the exit barrier"
        )


class HazardReporter:
    """Collects the hazards and useless overlaps of a module, each of them once.

    `function` is the name of the function whose statements are being checked.
    """

    def __init__(
        self,
        function: str,
        hazards: dict[tuple[Any, ...], Hazard],
        useless_overlaps: dict[tuple[str, int], UselessOverlap],
    ) -> None:
        self.function = function
        self._hazards = hazards
        self._useless_overlaps = useless_overlaps

    def add(
        self,
        kind: HazardKind,
        key: tuple[Any, ...],
        memory: str,
        step: object,
        related: object,
        example: str | None,
    ) -> None:
        """Report a hazard unless one with this key is known; a proved one replaces an unknown one.

        `related` is the other statement, or the fact, that the message mentions. `example` gives
        sizes at which the hazard occurs; None means that no such sizes are known.
        """
        key = (self.function, *key)
        known = self._hazards.get(key)
        unknown = example is None
        if known is None or (known.unknown and not unknown):
            self._hazards[key] = Hazard(
                self.function, kind, memory, str(step), str(related), example or "", unknown
            )

    def add_useless_overlap(self, variable: int, name: str, begun: object, awaited: object) -> None:
        """Report that nothing was done between the start of a request and its wait."""
        overlap = UselessOverlap(self.function, name, str(begun), str(awaited))
        self._useless_overlaps.setdefault((self.function, variable), overlap)
