# SPDX-License-Identifier: Apache-2.0
"""A worker that is a thread of the controller can reach the session that it works for.

What it would wait for there is itself, so it may not use that session at all.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi

from tvm_ipc.errors import IPCError

_rank_here = tvm_ffi.get_global_func("tvm_ipc.session.rank_here")


def is_own_worker(session: Any) -> bool:
    """Return whether the calling thread is a worker of the session."""
    return bool(_rank_here(session) >= 0)


def refuse_own_worker(session: Any) -> None:
    """Raise if the calling thread is a worker of the session."""
    rank = _rank_here(session)
    if rank >= 0:
        raise IPCError(
            f"a function that runs in worker {rank} cannot use the session of that worker, which "
            "would wait for itself; use it in the controller, before or after the function runs"
        )
