# SPDX-License-Identifier: Apache-2.0
"""The exceptions that tvm_ipc raises; all of them are subclasses of `IPCError`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Traceback frames of the C library, of the FFI and its wrappers, and of code without symbols.
_FOREIGN_FRAME = re.compile(
    r'File "(<unknown>|\.\./sysdeps|\./nptl|.*tvm_ffi/cython|'
    r".*runtime/keep_exception_type_and_text\.py)"
)


class IPCError(RuntimeError):
    """Base class of every error that tvm_ipc raises on its own account."""


class LibraryError(IPCError):
    """The native library, or a TVM library that it needs, could not be loaded."""


class TransformError(IPCError):
    """A pass refused a module and did not change it; the message gives the place and the reason."""


class WeightsError(IPCError):
    """Weights do not match the program, or their files are damaged; nothing was loaded."""


class ModelError(IPCError):
    """A model's folder, configuration or architecture is unsupported; the message explains why."""


class SessionClosedError(IPCError):
    """The session was closed, or is no longer usable; the message gives the reason."""


class DeadlineError(IPCError):
    """A rank did not answer before the session's deadline; the message names it."""


class MismatchError(IPCError):
    """Ranks called different operations, or passed different arguments; raised in workers."""


class PeerError(IPCError):
    """An error that another rank reports stopped this rank; raised in workers."""


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
    """An exception on one rank."""

    rank: int
    kind: str
    message: str
    traceback: str

    def __str__(self) -> str:
        """Return the rank, then the error and the frames of its traceback in the user's files."""
        return f"rank {self.rank}: {self.what}"

    @property
    def what(self) -> str:
        """The error without the rank, as text."""
        # Without frames that users cannot look up; `traceback` has them.
        lines = self.traceback.splitlines()
        frames = [line for line in lines if line.strip() and not _FOREIGN_FRAME.search(line)]
        return "\n".join([f"{self.kind}: {self.message}", *frames])


def causes(errors: Iterable[RankError]) -> tuple[RankError, ...]:
    """Return the errors of ranks that failed by themselves; if there are none, all errors."""
    ordered = sorted(errors, key=lambda error: error.rank)
    return tuple(e for e in ordered if e.kind != "PeerError") or tuple(ordered)


def describe(errors: Iterable[RankError]) -> str:
    """Return the text of errors; an error that several ranks share is listed once."""
    ranks: dict[str, list[int]] = {}
    for error in errors:
        ranks.setdefault(error.what, []).append(error.rank)
    return "\n".join(f"{_format_ranks(failed)}: {text}" for text, failed in ranks.items())


def _format_ranks(ranks: Iterable[int]) -> str:
    """Return a phrase such as "rank 3" or "ranks 0-3, 7"."""
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
    errors : the errors of the ranks that failed by themselves, in rank order. Ranks that only
        stopped waiting because another one failed are left out.
    """

    def __init__(self, errors: tuple[RankError, ...]) -> None:
        self.errors = errors
        super().__init__(describe(errors))
