# SPDX-License-Identifier: Apache-2.0
"""How the controller waits for the workers of a session to join it, and to leave it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError

_wait_joined = tvm_ffi.get_global_func("tvm_ipc.session.wait_joined")
_wait_left = tvm_ffi.get_global_func("tvm_ipc.session.wait_left")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_log: Final = logging.getLogger("tvm_ipc.session")

#: A Python signal handler, Ctrl-C among them, runs at least this often while we wait.
SLICE_SECONDS: Final = 0.1
_START_SECONDS: Final = 120.0
#: Seconds in which a death is told by who started the process.
_CAUSE_SECONDS: Final = 1.0
_ROUND: Final = 0.02
#: How long workers may take to end.
LEAVE_SECONDS: Final = 5.0


def wait_until_joined(
    session: Any,
    name: str,
    ended: Callable[[], dict[int, int]],
    where: Callable[[int], str] = lambda _: "",
) -> str:
    """Wait until every worker has joined.

    Returns the backend with which they went on since the first one cannot connect them, or "".

    Parameters
    ----------
    session : whose hub is open.
    name : of the session, in the log.
    ended : returns the exit codes of worker processes that are no more; may raise what else ends
        the wait.
    where : returns what errors say of where a worker is.

    Raises
    ------
    IPCError
        A worker cannot join any more, or 120 seconds have passed.
    """
    end = time.monotonic() + _START_SECONDS
    known: set[int] = set()
    refused = 0
    while True:
        complete = _wait_joined(session, SLICE_SECONDS)
        report = json.loads(_report(session))
        for rank in sorted({*report["joined"]} - known):
            _log.debug("%s: rank %d joined, pid %d", name, rank, report["pids"][rank])
        known = {*report["joined"]}
        for refusal in report["refusals"][refused:]:
            _log.warning("%s: refused: %s", name, refusal)
        refused = len(report["refusals"])
        if complete:
            changed, _, why = report["changed"].partition("\n")
            if changed:
                _log.warning("%s: goes on with the backend %s: %s", name, changed, why)
            return str(changed)
        codes = ended()
        trouble = codes or report["dead"] or report["errors"] or report["refusals"]
        if not trouble and time.monotonic() < end:
            continue
        heard = time.monotonic() + _CAUSE_SECONDS
        while (report["dead"] or report["lost"]) and not codes and time.monotonic() < heard:
            time.sleep(_ROUND)  # who ended, and how, is on its way
            codes = ended()
        missing = sorted({*range(session.num_workers)} - known)
        parts = [f"workers {missing} did not join the session"] if missing else []
        if not trouble:
            parts.append(f"{_START_SECONDS:g} s have passed")
        # Told by the worker's connection, and by the worker, if it is a thread of this process.
        parts += dict.fromkeys(
            f"worker {e['rank']}{where(e['rank'])}: {e['message']}" for e in report["errors"]
        )
        parts += report["refusals"]
        parts += report["lost"]
        parts += [f"worker {rank} ended with exit code {code}" for rank, code in codes.items()]
        parts += [f"worker {rank} died" for rank in report["dead"] if rank not in codes]
        parts.append("the workers' own output above may say more; see also `tvm-ipc doctor`")
        raise IPCError("; ".join(parts))


def wait_until_left(session: Any, hurried: Callable[[], bool] = lambda: False) -> bool:
    """Wait a while until every worker has left; return whether they have.

    It waits for worker 0 above all, a thread of this process. After a death it hears of that first.
    """
    end = time.monotonic() + LEAVE_SECONDS
    while not _wait_left(session, SLICE_SECONDS):
        if hurried() or time.monotonic() > end:
            return False
    return True
