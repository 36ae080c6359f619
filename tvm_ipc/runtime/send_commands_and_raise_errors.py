# SPDX-License-Identifier: Apache-2.0
"""Send the commands of a session to its workers, wait for them, and raise what the workers report.

Disco runs commands in its workers without catching exceptions: an exception ends the worker, and
for worker 0 the controller's process. Every command therefore calls the native function
`tvm_ipc.worker.guard`. It catches the exception, reports it to the session server in the
controller, ends the waits of the other ranks, and skips later commands until the controller has
recovered. The controller never waits on Disco's pipes. It sends a ticket after the commands, and
each worker that reaches the ticket reports it to the session server, which also notices dead
workers.

Any thread may send, wait and close. A lock orders the commands. No thread waits for workers while
it holds the lock, except the one that recovers from an error: nobody may send until every worker
is idle. An error may have kept any command in flight from running. It is therefore raised once in
each thread that had commands in flight, at that thread's next command or wait, and in the thread
that found it.

Ctrl-C may end any of this between any two lines. What is recorded before a step is therefore
true, or errs on the safe side, whether the step was taken or not.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc.errors import (
    DeadlineError,
    IPCError,
    RankError,
    SessionClosedError,
    WorkerDiedError,
    WorkerError,
    causes,
    describe,
)
from tvm_ipc.packed_functions import Progress
from tvm_ipc.runtime.oversized_calls_and_tensors import call_in_chunks
from tvm_ipc.runtime.references import DPackedFunc, DRef
from tvm_ipc.runtime.refuse_calls_from_own_workers import refuse_reentrant
from tvm_ipc.runtime.start_child_process import describe_exit_code
from tvm_ipc.runtime.wait_workers_joined_or_left import SLICE_SECONDS
from tvm_ipc.runtime.worker_error_reports import rank_errors
from tvm_ipc.runtime.worker_pool_interface import Pool

_log: Final = logging.getLogger("tvm_ipc.session")
_native = tvm_ffi.get_global_func
_native_send = _native("tvm_ipc.session.send")
_native_send_ticket = _native("tvm_ipc.session.send_ticket")
_native_get_function = _native("tvm_ipc.session.get_function")
_native_wait = _native("tvm_ipc.session.wait")
_native_report = _native("tvm_ipc.session.report")
_native_recover = _native("tvm_ipc.session.recover")
_native_abort = _native("tvm_ipc.session.abort")

#: The workers' own deadline expires first, because their error names the missing rank.
_GRACE_SECONDS: Final = 2.0
_session_numbers = itertools.count(1)

#: Builds an error anew for each thread that raises it.
ErrorFactory = Callable[[], IPCError]


class _ThreadState:
    """The commands of one thread, and the error that it has not raised yet."""

    __slots__ = ("__weakref__", "last_command", "pending_error")

    def __init__(self) -> None:
        self.last_command = 0
        self.pending_error: ErrorFactory | None = None


class CommandDispatcher:
    """The commands of one session.

    Attributes
    ----------
    name : the name of the session in log lines.
    timeout : seconds after which a wait for a worker is an error.
    lock : orders the commands. It is reentrant, because a signal handler or a finalizer may use
        the session that it interrupts.
    pool : the worker processes, if there are any.
    max_unread_bytes : bytes of commands that a worker may leave unread.
    pids : the process of each worker.
    closed : whether the session has begun to close.
    unusable_reason : the reason why no more commands can be sent; empty while they can.
    unraised_error : builds the error that no thread has raised yet.
    """

    def __init__(self, session: disco.Session, timeout: float) -> None:
        self.name = f"session {next(_session_numbers)}"
        self.timeout = timeout
        self.lock = threading.RLock()
        self.pool: Pool | None = None
        self.max_unread_bytes = 0
        self.pids: tuple[int, ...] = ()
        self.closed = False
        self.unusable_reason = ""
        self.unraised_error: ErrorFactory | None = None
        self._session: disco.Session | None = session
        self._functions: dict[str, DPackedFunc] = {}
        #: Functions that every worker has and that cannot fail. They are called without the guard.
        self._unguarded: dict[str, DRef] = {}
        #: Commands are numbered. A ticket has the number of the last command before it.
        self._last_command = 0
        self._last_ticket = 0
        #: Every worker has done the commands up to this one, and their errors are delivered.
        self._synced_command = 0
        #: Builds the error from which the workers have yet to recover; None if they need not.
        self._recovering_from: ErrorFactory | None = None
        self._local = threading.local()
        self._threads: weakref.WeakSet[_ThreadState] = weakref.WeakSet()

    def start(self) -> None:
        """Prepare for commands; every worker has joined the session."""
        self.pids = tuple(json.loads(_native_report(self.session))["pids"])
        for name in ("guard", "done", "find_function"):
            function = _native_get_function(self.session, f"tvm_ipc.worker.{name}")
            self._unguarded[name] = DRef(function, self.session)

    @property
    def session(self) -> Any:
        """The session, which native functions take; an error once it has ended."""
        if self._session is None:
            raise SessionClosedError("the session is closed")
        return self._session

    def release_functions(self) -> None:
        """Free the functions of the workers."""
        self._functions.clear()

    def release_session(self) -> None:
        """Drop all references to the session, which has ended.

        Otherwise it would live, with its descriptors, until Python's next search for cycles.
        """
        self._unguarded.clear()
        self._session = None

    # ---- state ----------------------------------------------------------------------------

    def thread_state(self) -> _ThreadState:
        """Return the state of the calling thread; raise if it is a worker of the session.

        Call this before taking the lock, whose owner may wait for that worker.
        """
        state: _ThreadState | None = getattr(self._local, "state", None)
        if state is None:
            refuse_reentrant(self.session)
            state = _ThreadState()
            self._threads.add(state)
            self._local.state = state
        return state

    def check_usable(self) -> None:
        """Raise the pending error of the calling thread, or an error if the session has ended."""
        self._raise_pending_error()
        if self.closed:
            raise SessionClosedError("the session is closed")
        if self.unusable_reason:
            raise SessionClosedError(f"the session is not usable any more: {self.unusable_reason}")

    def check_ready(self) -> None:
        """Raise if the calling thread cannot send a command now. Requires the lock."""
        self._finish_recovery()
        self.check_usable()
        if self.pool is not None and self.pool.alarming():
            self._raise_worker_died("")

    def _raise_pending_error(self) -> None:
        state = self.thread_state()
        if state.pending_error is None:
            return
        try:
            raise state.pending_error()
        except IPCError:
            # Ctrl-C may come before the error is raised; then the error stays pending.
            state.pending_error = self.unraised_error = None
            raise

    # ---- sending --------------------------------------------------------------------------

    def call(self, function: disco.DRef, *args: Any) -> DRef:
        """Call a function on every worker; the result stays there."""
        self.check_references(args)
        result = self._send("guard", function, *args)
        if result is not None:
            return result
        return call_in_chunks(self.function, self.max_unread_bytes, function, args)

    def check_references(self, args: tuple[Any, ...]) -> None:
        """Raise if an argument refers to a value of another session."""
        session = self._session
        if session is None:
            return  # the call raises the pending error of this thread, or that the session ended
        if any(
            isinstance(a, disco.DRef) and getattr(a, "session", None) is not session for a in args
        ):
            raise ValueError(
                "a value of another session has no meaning in this one: get it there, put it here"
            )

    def function(self, name: str) -> DPackedFunc:
        """Return a function that every worker has, by its global name."""
        if name not in self._functions:
            # Unguarded: the look-up must happen even if the workers skip this thread's commands
            # after an error, because other threads use the same cached function.
            function = self._send("find_function", name)
            assert function is not None
            self._functions[name] = DPackedFunc.of(function)
        return self._functions[name]

    def _send(self, unguarded_name: str, *args: Any) -> DRef | None:
        """Send one command once the workers have room for it; return None if it is too long."""
        state = self.thread_state()
        while True:
            with self.lock:
                self.check_ready()
                self._last_command += 1
                state.last_command = self._last_command
                function, session = self._unguarded[unguarded_name], self.session
                answer = self._call_native(_native_send, session, 0, 0, function, *args)
                if isinstance(answer, disco.DRef):
                    return DRef(answer, session)
                # The answer is the length. Half of the room is for registers that are freed first.
                if answer > self.max_unread_bytes // 2:
                    return None
                ticket = self._issue_ticket()
            self._wait_for(ticket)

    def _issue_ticket(self) -> int:
        """Return a ticket after all commands so far. Requires the lock."""
        if self._last_ticket < self._last_command:
            done = self._unguarded["done"]
            self._call_native(_native_send_ticket, self.session, done, self._last_command)
            self._last_ticket = self._last_command
        return self._last_ticket

    def _call_native(self, send: Any, *args: Any) -> Any:
        try:
            return send(*args)
        except Exception:
            if self.pool is None or not self.pool.hung_up():
                raise  # Disco cannot send an argument; nothing was sent
            # The death is raised outside of this block, so that Python does not print both errors.
            _log.debug("%s: a command could not be sent", self.name, exc_info=True)
        self._raise_worker_died("")
        raise AssertionError("unreachable: the line above raises")

    # ---- waiting --------------------------------------------------------------------------

    def sync(self) -> None:
        """Wait until every worker has done every command; raise what went wrong."""
        self.thread_state()
        with self.lock:
            self.check_ready()
            if self._last_ticket <= self._synced_command:
                self._last_command += 1  # ask idle workers too: they may be dead
            ticket = self._issue_ticket()
        self._wait_for(ticket)

    def _wait_for(self, ticket: int) -> None:
        """Wait until every worker has reached the ticket; raise this thread's errors."""
        deadline = time.monotonic() + self.timeout + _GRACE_SECONDS
        while True:
            progress = self._wait_slice(ticket)
            with self.lock:
                self._finish_recovery()
                self._raise_pending_error()
                if progress != Progress.ATTENTION and ticket <= self._synced_command:
                    return  # another thread has seen it, and may have closed the session since
                self.check_ready()
                if progress == Progress.DONE:
                    self._synced_command = max(self._synced_command, ticket)
                    return
                if progress == Progress.ATTENTION:
                    self._handle_reports()
                elif time.monotonic() > deadline:
                    self._raise_deadline(ticket)

    def _wait_slice(self, ticket: int) -> int:
        try:
            return int(_native_wait(self.session, ticket, SLICE_SECONDS))
        except (RuntimeError, SessionClosedError):
            if self.closed:  # by another thread
                return Progress.PENDING
            raise

    def _handle_reports(self) -> None:
        """Collect the reports of all workers, deliver the error, and recover. Requires the lock."""
        ticket = self._issue_ticket()
        deadline = time.monotonic() + self.timeout + _GRACE_SECONDS
        while self._wait_slice(ticket) == Progress.PENDING:
            self.check_usable()
            if time.monotonic() > deadline:
                self._raise_deadline(ticket)
        report = json.loads(_native_report(self.session))
        errors = causes(rank_errors(report["errors"]))
        if report["dead"] or report["left"]:
            self._raise_worker_died(describe(e for e in errors if e.kind != "PeerError"))
        if not errors:
            return  # another thread has delivered them
        for error in errors:
            _log.warning("%s: rank %d: %s: %s", self.name, error.rank, error.kind, error.message)
        self._recovering_from = lambda: _as_session_error(errors)
        self._finish_recovery()
        self._raise_pending_error()

    def _finish_recovery(self) -> None:
        """Deliver the error of a recovery, and let the workers continue. Requires the lock.

        All workers are idle, and no thread has sent a command or raised the error since it was
        found. If Ctrl-C ends this method, the next caller repeats it.
        """
        if self._recovering_from is None:
            return
        self._deliver(self._recovering_from)
        _native_recover(self.session)
        _log.info("%s: recovered: its workers take commands again", self.name)
        self._synced_command = self._last_command
        self._recovering_from = None

    def _deliver(self, error: ErrorFactory) -> None:
        """Make an error pending in this thread and in all threads with commands in flight."""
        self.unraised_error = error
        for state in list(self._threads):
            if state.last_command > self._synced_command and state.pending_error is None:
                state.pending_error = error
        caller = self.thread_state()
        caller.pending_error = caller.pending_error or error

    # ---- failures that end the session ----------------------------------------------------

    def _fail(self, error: ErrorFactory) -> None:
        """End the session with an error, which becomes pending. Requires the lock."""
        self.unusable_reason = str(error()).partition("\n")[0]
        _log.error("%s: %s", self.name, self.unusable_reason)
        self._deliver(error)
        _native_abort(self.session)
        if self.pool is not None:
            self.pool.kill()
            self.pool.mute()

    def _raise_deadline(self, ticket: int) -> None:
        report = json.loads(_native_report(self.session))
        late = [rank for rank, done in enumerate(report["done"]) if done < ticket]
        late_ranks = ", ".join(f"rank {rank} (pid {self.pids[rank]})" for rank in late)
        sentences = [f"{late_ranks or 'a worker'} did not answer within {self.timeout:g} s"]
        # Without tracebacks: the cause is the rank that did not answer.
        errors = [replace(error, traceback="") for error in rank_errors(report["errors"])]
        sentences += [describe(errors)] if errors else []
        sentences.append("the session is no longer usable; a longer timeout may be what it needs")
        self._fail(lambda: DeadlineError("; ".join(sentences)))
        self._raise_pending_error()

    def _raise_worker_died(self, details: str) -> None:
        deadline = time.monotonic() + 1.0
        while True:  # a broken pipe may be noticed before the session server learns of the death
            report = json.loads(_native_report(self.session))
            dead = {*report["dead"], *report["left"]}
            exit_codes = self.pool.ended(wait=dead) if self.pool else {}
            if dead or exit_codes or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        cause = self.pool.cause() if self.pool else None
        if cause is None and report["lost"]:
            cause = report["lost"][0], ()
        if cause is not None:
            summary, _, cause_details = cause[0].partition("\n")
            details = "\n".join(text for text in (details, cause_details) if text)
            ranks = cause[1] or tuple(sorted(dead))
        else:
            ranks = tuple(sorted(dead | exit_codes.keys()))
            dead_ranks = ", ".join(
                f"rank {rank} (pid {self.pids[rank]}"
                + (f", {describe_exit_code(exit_codes[rank])})" if rank in exit_codes else ")")
                for rank in ranks
            )
            summary = f"{dead_ranks or 'a worker'} died"
        message = f"{summary}; the session is no longer usable"
        message += f"\n{details}" if details else ""
        self._fail(lambda: WorkerDiedError(message, ranks))
        self._raise_pending_error()


def _as_session_error(errors: tuple[RankError, ...]) -> IPCError:
    if all(error.kind == "DeadlineError" for error in errors):
        return DeadlineError(describe(errors))
    return WorkerError(errors)
