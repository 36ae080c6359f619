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
    UNORDERED = "used on two streams in no order"
    REUSED = "in memory that another stream still uses"
    STREAM = "current or running where it must not be"
    CAPTURED = "captured in a CUDA graph"
    UNAVAILABLE = "not available to workers"
    BRANCHES = "different in both branches of a condition that may differ between ranks"
    DISAGREES = "in a call that does not match the call of a peer"
    STUCK = "waiting indefinitely"


#: The kinds that the order check reports.
_OF_ORDER = frozenset((HazardKind.BRANCHES, HazardKind.DISAGREES, HazardKind.STUCK))

_PENDING = (
    "they read it in `{0}`, which has no exit barrier; keep the memory until a later collective "
    "with a barrier of the same ranks, such as an all-reduce, has returned, or keep the exit "
    "barrier"
)
_REQUEST = "it was started in `{0}`; wait for it first, on every path"
_EXPOSED = "it was exposed in `{0}`; release it first, on every path"
_ORDER = (
    "{0}; all ranks of a team must make the same calls in the same order, and each send needs a "
    "receive"
)
#: The part of a message that explains a hazard by the related statement or fact, and how to avoid
#: it.
_DETAILS = {
    HazardKind.WRITE: _PENDING,
    HazardKind.FREE: _PENDING,
    HazardKind.RETURN: _PENDING,
    HazardKind.LOST: "it was overwritten in `{0}`; allocate the two tensors apart",
    HazardKind.BOUNDS: "it {0}",
    HazardKind.MISALIGNED: (
        f"it {{0}}, which is no multiple of {KERNEL_ALIGNMENT}, so reading it may crash the "
        "process; align the view, or copy it"
    ),
    HazardKind.UNFINISHED: _REQUEST,
    HazardKind.BUSY: _REQUEST,
    HazardKind.NEVER_WAITED: _REQUEST,
    HazardKind.EXPOSED: _EXPOSED,
    HazardKind.NEVER_RELEASED: _EXPOSED,
    HazardKind.RELEASED: (
        "it was released in `{0}`, and its rank may have written it since; use it before the "
        "release"
    ),
    HazardKind.CAPTURED: (
        "replays of {0} skip the host, which notifies peers; use tvm_ipc.gpu.RewriteCUDAGraph "
        "instead of TVM's RewriteCUDAGraph"
    ),
    HazardKind.UNORDERED: "{0}",
    HazardKind.REUSED: "{0}",
    HazardKind.STREAM: "{0}",
    HazardKind.UNAVAILABLE: "{0}",
    HazardKind.BRANCHES: (
        "{0}; make the same calls in the same order in both, or use a condition that is the same "
        "on all these ranks, such as the result of an all-reduce"
    ),
    HazardKind.DISAGREES: _ORDER,
    HazardKind.STUCK: _ORDER,
}


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
        details = _DETAILS[self.kind].format(self.related)
        if self.example:
            details += f" (for example where {self.example})"
        if self.unknown and self.kind not in _OF_ORDER:
            details += " (no size that was tried is an example, and no proof covers all sizes)"
        verb = "may be" if self.unknown else "is"
        where = f"function {self.function!r}, `{self.binding}`"
        return f"{where}: {self.memory} {verb} {self.kind.value}; {details}"


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
