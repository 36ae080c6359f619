# SPDX-License-Identifier: Apache-2.0
"""Scopes, limits and numbers that compiled programs, Python and the native library share.

A test compares all of them with those that the library exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Final, SupportsIndex, TypeAlias

#: The memory scope of a buffer that peers map directly. Upstream's name.
IPC_MEMORY: Final = "ipc_memory"

#: The devices that workers can be on, by DLPack's numbers.
DEVICES: Final = {"cpu": 1, "cuda": 2}

#: The collective backends, and the kind of device that each of them serves. "auto" tries those of
#: one device in this order.
BACKENDS: Final = {"shm": "cpu", "mpi": "cpu", "cuda": "cuda", "nccl": "cuda"}

#: The library that a backend loads on demand: its path in its wheel, below the package `nvidia`.
#: Without the wheel, the system's library is loaded.
LIBRARIES: Final = {"nccl": "nccl/lib/libnccl.so.2"}


def backends_of(device: str) -> tuple[str, ...]:
    """Return the backends for a kind of device, in the order in which "auto" tries them."""
    return tuple(name for name, served in BACKENDS.items() if served == device)


def backend_of_nodes(device: str = "cpu") -> str:
    """Return the backend of sessions on several nodes, for a kind of device."""
    return {"cpu": "mpi", "cuda": "nccl"}[device]


#: The most workers that one session can have.
MAX_WORKERS: Final = 64

#: The most tensors that a rank can expose to a team at a time. One more reuses the slot of the
#: tensor that was exposed this many before it, which must have been released.
MAX_EXPOSED: Final = 64

#: The number of streams of a GPU rank on which programs can run kernels.
MAX_STREAMS: Final = 64

#: The id of a team; or teams of equal size, which stand for the team of the calling rank: the size,
#: then the ranks of one team after the other. A rank that is in none of them takes no part.
AnyTeam: TypeAlias = int | tuple[int, ...]


class Team(IntEnum):
    """Teams that every session has. Larger numbers are user-created teams."""

    WORLD = 0  #: all ranks
    GROUP = 1  #: the group of the calling rank

    @staticmethod
    def contains(team: AnyTeam, other: AnyTeam | None) -> bool:
        """Return whether a team contains every rank of the other team; None stands for any team."""
        return team in (Team.WORLD, other)


class AllReduceStrategy(IntEnum):
    """The algorithm of an all-reduce. The numbers are TVM's; the result has the same bits."""

    DEFAULT = 0  #: the choice of the ordinary all-reduce
    ONESHOT = 1  #: every rank reads the whole input of every rank
    TWOSHOT = 2  #: every rank reduces one slice, then gathers the slices of the other ranks
    AUTO = 3  #: selected by size and number of ranks

    @classmethod
    def of(cls, value: object) -> AllReduceStrategy:
        """Return the strategy with a number or a name, such as "oneshot"."""
        names = {strategy.name.lower(): strategy for strategy in cls}
        if isinstance(value, str) and value in names:
            return names[value]
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            for strategy in cls:
                if strategy == value.__index__():
                    return strategy
        choices = ", ".join(f"{name!r} ({int(strategy)})" for name, strategy in names.items())
        raise ValueError(f"there is no all-reduce strategy {value!r}; there are {choices}")

    @property
    def ends_with_barrier_upstream(self) -> bool:
        """True if TVM's own kernel waits for the peers that read its input; ours always does."""
        return self is AllReduceStrategy.DEFAULT


class ReduceKind(IntEnum):
    """The reduction of the values of all ranks. The numbers up to `AVG` are TVM's."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5  #: bitwise and, of integers
    BOR = 6  #: bitwise or, of integers
    BXOR = 7  #: bitwise exclusive or, of integers
    TREE_SUM = 8  #: the sum, added as a balanced binary tree over the ranks

    @property
    def is_bitwise(self) -> bool:
        """True if the reduction combines the bits of integers."""
        return ReduceKind.BAND <= self <= ReduceKind.BXOR

    def takes(self, dtype: str) -> bool:
        """Return whether the runtime supports this reduction of an element type."""
        if self.is_bitwise:
            return dtype in REDUCED_TYPES and dtype.startswith(("int", "uint"))
        return dtype in REDUCED_TYPES and not (self is ReduceKind.AVG and dtype == "bool")

    def refusal(self, dtype: str) -> str:
        """Return why there is no such reduction of a type that `takes` refuses."""
        name = self.name.lower()
        if dtype not in REDUCED_TYPES:
            return f"the runtime does not reduce {dtype}"
        if not self.is_bitwise:
            return f"there is no {'average' if name == 'avg' else name} of {dtype}"
        instead = {"band": "min", "bor": "max"}.get(name, "") if dtype == "bool" else ""
        hint = f"; use {instead!r} of bool" if instead else ""
        return f"there is no {name} of {dtype}: bitwise reductions take integers{hint}"


#: Element types that reductions support, except AVG of bool and bitwise reductions of floats.
REDUCED_TYPES: Final = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)


class CollectiveFlag(IntFlag):
    """Guarantees that a compiler gives about one collective."""

    NONE = 0
    #: The input is not written again before this rank's next collective over the same ranks. The
    #: collective may then omit its exit barrier, which protects the input from slower peers.
    NO_EXIT_BARRIER = 1


class Progress(IntEnum):
    """The progress of a session's workers towards a ticket."""

    DONE = 0  #: all of them have passed the ticket
    PENDING = 1  #: some of them have not
    ATTENTION = 2  #: an error or a death has been reported


class Epilogue(IntEnum):
    """The steps of a matmul's epilogue. ADD and MULTIPLY take an operand that is broadcast."""

    ADD = 1
    MULTIPLY = 2
    RELU = 3  #: 0 for NaN, as in TVM's kernels
    GELU = 4
    GELU_TANH = 5
    SILU = 6


#: The most steps of an epilogue.
MAX_STEPS: Final = 8


def pack_digits(digits: Iterable[int]) -> int:
    """Pack small numbers into one, one hexadecimal digit each, the first one lowest."""
    return sum(digit << (4 * position) for position, digit in enumerate(digits))
