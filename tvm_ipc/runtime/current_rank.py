# SPDX-License-Identifier: Apache-2.0
"""`CurrentRank`, by which threads of a worker act for its rank."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

import tvm_ffi

_share_rank: Final = tvm_ffi.get_global_func("tvm_ipc.worker.share_rank")
_worker_rank: Final = tvm_ffi.get_global_func("tvm_ipc.worker.rank")
_worker_device: Final = tvm_ffi.get_global_func("tvm_ipc.worker.device")


class CurrentRank:
    """The rank of the worker that creates this object; other threads act for it in `with`.

    Two threads of a rank may be in collectives of different teams at once. Two threads that enter
    one team at once are an error. After an error of the session, a thread has to enter `with` anew.
    On GPUs only the worker's own thread runs collectives; docs/gpus.md explains why.

    Attributes
    ----------
    rank : the number of the rank.
    device : the device of the rank, for tensors that a function allocates.

    Examples
    --------
    A function that workers call, and whose collective runs in another thread:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> import tvm
    >>> import tvm_ffi
    >>> import tvm_ipc
    >>> @tvm_ffi.register_global_func("example.sum_in_thread", override=True)
    ... def sum_in_thread(x):
    ...     rank = tvm_ipc.CurrentRank()
    ...     y = tvm.runtime.empty((2,), "float32", rank.device)
    ...     def allreduce():
    ...         with rank:
    ...             tvm.get_global_func("tvm_ipc.allreduce")(x, 0, 0, 3, 0, y)
    ...     with ThreadPoolExecutor() as pool:
    ...         pool.submit(allreduce).result()
    ...     return y
    >>> with tvm_ipc.Session(num_workers=2, threads=True) as session:
    ...     function = session.get_global_func("example.sum_in_thread")
    ...     session.get(function(session.put(np.ones(2, "float32"))), rank=1).tolist()
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._act_for_rank: Any = _share_rank()
        self.rank = int(_worker_rank())
        self.device: tvm_ffi.Device = _worker_device()

    def __enter__(self) -> CurrentRank:
        """Let the calling thread act for the rank."""
        self._act_for_rank(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the calling thread from acting for the rank."""
        self._act_for_rank(False)

    def __repr__(self) -> str:
        """Return the rank as text."""
        return f"<tvm_ipc.CurrentRank: {self.rank}>"
