# SPDX-License-Identifier: Apache-2.0
"""The exceptions that this package raises. All of them are `IPCError`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Frames of the C library, of the FFI and what stands around it, and of code without symbols.
_NOWHERE = re.compile(
    r'File "(<unknown>|\.\./sysdeps|\./nptl|.*tvm_ffi/cython|.*runtime/python_errors\.py)'
)


class IPCError(RuntimeError):
    """Base class of every error that tvm_ipc raises on its own account."""


class LibraryError(IPCError):
    """The native library, or a TVM library that it needs, could not be loaded."""


class TransformError(IPCError):
    """A pass refused a module, which it left as it was; the message says where and why."""


class WeightsError(IPCError):
    """Weights are not what the program wants, or their files are damaged; nothing was loaded."""


class ModelError(IPCError):
    """A model's folder, configuration or architecture cannot be used; the message says why."""


class SessionClosedError(IPCError):
    """The session was closed, or is no longer usable; its message says why."""


class DeadlineError(IPCError):
    """Somebody did not answer before the session's deadline; the message names who."""


class MismatchError(IPCError):
    """Ranks called different operations, or one with different arguments; raised in workers."""


class PeerError(IPCError):
    """This rank stopped because of something another rank reports; raised in workers."""


class WorkerDiedError(IPCError):
    """A worker process ended while the session needed it.

    Attributes
    ----------
    ranks : the ranks of the workers that died.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class RankError:
    """What went wrong on one rank."""

    rank: int
    kind: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}"

    @property
    def what(self) -> str:
        """Everything but the rank, as text."""
        # Frames that nobody can look up say nothing; `traceback` still has them.
        lines = self.traceback.splitlines()
        known = [line for line in lines if line.strip() and not _NOWHERE.search(line)]
        return "\n".join([f"{self.kind}: {self.message}", *known])


def causes(errors: Iterable[RankError]) -> tuple[RankError, ...]:
    """Return what ranks that failed by themselves reported; if none did, what all reported."""
    ordered = sorted(errors, key=lambda error: error.rank)
    return tuple(e for e in ordered if e.kind != "PeerError") or tuple(ordered)


def describe(errors: Iterable[RankError]) -> str:
    """Return the text of errors, in which those that are the same on several ranks stand once."""
    ranks: dict[str, list[int]] = {}
    for error in errors:
        ranks.setdefault(error.what, []).append(error.rank)
    return "\n".join(f"{_ranks(which)}: {what}" for what, which in ranks.items())


def _ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank{'s' * (len(runs) > 1 or len(runs[0]) > 1)} {', '.join(spans)}"


class WorkerError(IPCError):
    """One or more workers raised an exception.

    Attributes
    ----------
    errors : what each rank that failed by itself reported, in rank order. Ranks that only
        stopped waiting because another one failed are not among them.
    """

    def __init__(self, errors: tuple[RankError, ...]) -> None:
        self.errors = errors
        super().__init__(describe(errors))
