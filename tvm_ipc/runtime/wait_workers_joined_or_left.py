# SPDX-License-Identifier: Apache-2.0
"""Wait until the workers of a session have joined it, or have left it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.start_child_process import describe_exit_code, explain_crash
from tvm_ipc.runtime.worker_pool_interface import START_SECONDS

_wait_joined = tvm_ffi.get_global_func("tvm_ipc.session.wait_joined")
_wait_left = tvm_ffi.get_global_func("tvm_ipc.session.wait_left")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_log: Final = logging.getLogger("tvm_ipc.session")

#: Python signal handlers, that for Ctrl-C included, run at least this often during a wait.
SLICE_SECONDS: Final = 0.1
#: Seconds after a worker's connection has ended in which its exit code becomes known.
_EXIT_CODE_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
#: Seconds for workers to end.
LEAVE_SECONDS: Final = 5.0


def wait_for_workers(
    session: Any,
    name: str,
    exit_codes: Callable[[], dict[int, int]],
    describe_node: Callable[[int], str] = lambda _: "",
    begin: float | None = None,
) -> str:
    """Wait until every worker has joined.

    Returns the name of the fallback backend that the workers use because the first one cannot
    connect them, or "".

    Parameters
    ----------
    session : the session, whose session server is open.
    name : the name of the session in the log.
    exit_codes : returns the exit codes of worker processes that have ended; it may raise an error
        to end the wait.
    describe_node : returns a phrase for the node of a worker, for errors.
    begin : the time when the start began, by the monotonic clock; None means now.

    Raises
    ------
    IPCError
        A worker cannot join any more, or 120 seconds have passed since the start.
    """
    deadline = (time.monotonic() if begin is None else begin) + START_SECONDS
    joined: set[int] = set()
    num_refusals = 0
    while True:
        complete = _wait_joined(session, SLICE_SECONDS)
        report = json.loads(_report(session))
        for rank in sorted({*report["joined"]} - joined):
            _log.debug("%s: rank %d joined, pid %d", name, rank, report["pids"][rank])
        joined = {*report["joined"]}
        for refusal in report["refusals"][num_refusals:]:
            _log.warning("%s: refused: %s", name, refusal)
        num_refusals = len(report["refusals"])
        if complete:
            fallback_backend, _, reason = report["changed"].partition("\n")
            if fallback_backend:
                _log.warning("%s: goes on with the backend %s: %s", name, fallback_backend, reason)
            return str(fallback_backend)
        codes = exit_codes()
        failed = codes or report["dead"] or report["errors"] or report["refusals"]
        if not failed and time.monotonic() < deadline:
            continue
        codes_deadline = time.monotonic() + _EXIT_CODE_SECONDS
        while report["dead"] or report["lost"]:
            if codes or time.monotonic() >= codes_deadline:
                break
            time.sleep(_POLL_SECONDS)
            codes = exit_codes()
        missing = sorted({*range(session.num_workers)} - joined)
        clauses = []
        if missing:
            noun = "worker" if len(missing) == 1 else "workers"
            clauses.append(f"{noun} {', '.join(map(str, missing))} did not join the session")
        if not failed:
            clauses.append(f"{START_SECONDS:g} s have passed")
        # A worker that is a thread of this process reports an error, and so does its connection.
        clauses += dict.fromkeys(
            f"worker {e['rank']}{describe_node(e['rank'])}: {e['message']}"
            for e in report["errors"]
        )
        clauses += report["refusals"]
        clauses += report["lost"]
        clauses += [
            f"worker {rank} ended with {describe_exit_code(code)}" for rank, code in codes.items()
        ]
        clauses += dict.fromkeys(filter(None, map(explain_crash, codes.values())))
        clauses += [f"worker {rank} died" for rank in report["dead"] if rank not in codes]
        clauses.append("the workers' own output above may have details; see also `tvm-ipc doctor`")
        raise IPCError("; ".join(clauses))


def wait_for_exit(session: Any, hurried: Callable[[], bool] = lambda: False) -> bool:
    """Wait up to 5 seconds until every worker has left; return whether they have.

    The workers that matter are threads of this process, such as worker 0.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    while not _wait_left(session, SLICE_SECONDS):
        if hurried() or time.monotonic() > deadline:
            return False
    return True
