# SPDX-License-Identifier: Apache-2.0
"""Refuse calls of a session from its own workers.

A worker that is a thread of the controller can reach its session. A call would wait for that
worker itself, so the worker may not use the session at all.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi

from tvm_ipc.errors import IPCError

_native_rank_here = tvm_ffi.get_global_func("tvm_ipc.session.rank_here")


def _rank_here(session: Any) -> int:
    # A session that could not start has no native handle to pass.
    return int(_native_rank_here(session)) if session.__chandle__() else -1


def is_reentrant(session: Any) -> bool:
    """Return whether the calling thread is a worker of the session."""
    return _rank_here(session) >= 0


def refuse_reentrant(session: Any) -> None:
    """Raise if the calling thread is a worker of the session."""
    rank = _rank_here(session)
    if rank >= 0:
        raise IPCError(
            f"a function that runs in worker {rank} cannot use the session of that worker, which "
            "would wait for itself; use it in the controller, before or after the function runs"
        )
