# SPDX-License-Identifier: Apache-2.0
"""Teams of a session's workers, and threads that act for a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments

_share_rank: Final = tvm_ffi.get_global_func("tvm_ipc.worker.share_rank")
_worker_rank: Final = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_worker_device: Final = tvm_ffi.get_global_func("tvm_ipc.worker.device")


@dataclass(frozen=True)
class Team:
    """Some workers of a session, in an order; `session.team` makes it.

    It is a value: equal ranks and copies are the same team. It lives as long as its session.

    Attributes
    ----------
    ranks : its workers. The first one is the root of broadcast, scatter and gather.
    copy : tells teams of the same ranks apart.
    id : by which the functions that workers call know it.
    """

    ranks: tuple[int, ...]
    copy: int
    id: int
    _session: str = field(repr=False)


def in_team(name: str, in_group: object, session: str) -> bool | Team:
    """Return what a collective of a session is over: all workers, each group, or a team."""
    if not isinstance(in_group, Team):
        try:
            return arguments.flag(name, in_group)
        except (TypeError, ValueError):
            wanted = "True for each group, False for all workers, or what session.team returned"
            raise arguments.wrong_type(name, wanted, in_group) from None
    if in_group._session != session:
        raise ValueError(f"{name} is a team of another session: {in_group!r}")
    return in_group


class CurrentRank:
    """The rank of the worker whose function makes this; other threads act for it in `with`.

    Two threads of a rank may be in collectives of different teams at once. One that two of them
    enter at once is refused. After an error of the session a thread has to enter `with` anew.
    On GPUs other threads do no collectives: docs/gpus.md says why.

        rank = tvm_ipc.CurrentRank()

        def exchange():
            with rank:
                allreduce(...)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(exchange).result()

    Attributes
    ----------
    rank : its number.
    device : what it computes on, for tensors that a function makes.
    """

    def __init__(self) -> None:
        self._act: Any = _share_rank()
        self.rank = int(_worker_rank())
        self.device: tvm_ffi.Device = _worker_device()

    def __enter__(self) -> CurrentRank:
        """Let the calling thread act for the rank."""
        self._act(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End that."""
        self._act(False)

    def __repr__(self) -> str:
        return f"<tvm_ipc.CurrentRank: {self.rank}>"
