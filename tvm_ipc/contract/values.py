# SPDX-License-Identifier: Apache-2.0
"""Scopes, limits and numbers that compiled programs, Python and the native library share.

A test compares all of it with what the library says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Final, SupportsIndex, TypeAlias

#: The memory scope of a buffer that peers map directly. Upstream's name.
IPC_MEMORY: Final = "ipc_memory"

#: The devices that workers can be on, by DLPack's numbers.
DEVICES: Final = {"cpu": 1, "cuda": 2}

#: The collective backends, and the device whose tensors each works on. Of those for one device
#: "auto" tries the first one first.
BACKENDS: Final = {"shm": "cpu", "mpi": "cpu", "cuda": "cuda", "nccl": "cuda"}

#: The library that a backend loads when it is needed: where its wheel has it, below the package
#: `nvidia`. Without the wheel it is the system's.
LIBRARIES: Final = {"nccl": "nccl/lib/libnccl.so.2"}


def backends_of(device: str) -> tuple[str, ...]:
    """Return the backends for a device, the one that "auto" tries first at the beginning."""
    return tuple(name for name, works_on in BACKENDS.items() if works_on == device)


def backend_of_nodes(device: str = "cpu") -> str:
    """Return the backend of a session whose workers, on such devices, are on several nodes."""
    return {"cpu": "mpi", "cuda": "nccl"}[device]


#: The most workers that one session can have.
MAX_WORKERS: Final = 64

#: The most tensors that a rank can show to a team at a time: one more takes the place of the one
#: that was shown so many before it, which has to be hidden.
MAX_SHOWN: Final = 64

#: The id of a team; or how ranks are divided into teams of equal size, of which it is the one with
#: the calling rank: that size, then the ranks of team after team.
AnyTeam: TypeAlias = int | tuple[int, ...]


class Team(IntEnum):
    """Teams that every session has. Larger numbers are teams that it makes while it runs."""

    WORLD = 0  #: all ranks
    GROUP = 1  #: the group of the calling rank

    @staticmethod
    def contains(team: AnyTeam, other: AnyTeam | None) -> bool:
        """Whether every rank of the other team, None: of any team, is one of the team."""
        return team in (Team.WORLD, other)


class AllReduceStrategy(IntEnum):
    """How an all-reduce moves its data. Upstream's numbers; the result has the same bits."""

    RING = 0  #: what the ordinary all-reduce would choose
    ONESHOT = 1  #: every rank reads the whole input of every rank
    TWOSHOT = 2  #: every rank reduces one slice, then gathers the others' slices
    AUTO = 3  #: chosen by size and number of ranks

    @classmethod
    def of(cls, given: object) -> AllReduceStrategy:
        """Return the strategy with a number or a name, such as "oneshot"."""
        names = {strategy.name.lower(): strategy for strategy in cls}
        if isinstance(given, str) and given in names:
            return names[given]
        if isinstance(given, SupportsIndex) and not isinstance(given, bool):
            for strategy in cls:
                if strategy == given.__index__():
                    return strategy
        known = ", ".join(f"{one.name.lower()!r} ({int(one)})" for one in cls)
        raise ValueError(f"there is no all-reduce strategy {given!r}; there are {known}")

    @property
    def ends_with_barrier_upstream(self) -> bool:
        """Whether upstream's kernel waits for the peers that read its input. Ours always does."""
        return self is AllReduceStrategy.RING


class ReduceKind(IntEnum):
    """What becomes of the values of all ranks. Upstream's numbers."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4

    def takes(self, dtype: str) -> bool:
        """Whether the runtime has this reduction of a type."""
        return dtype in REDUCED_TYPES and not (self is ReduceKind.AVG and dtype == "bool")


#: Types of elements that reductions take, AVG none of bool.
REDUCED_TYPES: Final = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)


class CollectiveFlag(IntFlag):
    """What a compiler may promise about one collective."""

    NONE = 0
    #: The input is not written again before this rank's next collective over the same ranks, so
    #: the collective may leave out the barrier that protects it from slower peers.
    NO_EXIT_BARRIER = 1


class Progress(IntEnum):
    """How far the workers of a session are."""

    DONE = 0  #: all of them passed the ticket that was waited for
    PENDING = 1  #: not yet
    ATTENTION = 2  #: there is something to report


class Epilogue(IntEnum):
    """What may follow a matrix product. ADD and MULTIPLY take an operand that broadcasts."""

    ADD = 1
    MULTIPLY = 2
    RELU = 3  #: of NaN it is 0, as in TVM's kernels
    GELU = 4
    GELU_TANH = 5
    SILU = 6


#: The most steps of an epilogue.
MAX_STEPS: Final = 8


def pack_digits(digits: Iterable[int]) -> int:
    """Put a list of small numbers into one, a hexadecimal digit each, the first one lowest."""
    return sum(digit << (4 * place) for place, digit in enumerate(digits))
