# SPDX-License-Identifier: Apache-2.0
"""End the workers of a session when it is closed, left by an exception, or garbage-collected.

Sessions that are open at the end of the program are ended then. A forked child does not end them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import sys
import threading
import weakref
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import RankError, SessionClosedError
from tvm_ipc.runtime.defer_sigint import defer_sigint
from tvm_ipc.runtime.print_to_stderr_and_unraised_errors import (
    report_unraised_error,
    report_unraised_errors,
)
from tvm_ipc.runtime.refuse_calls_from_own_workers import is_reentrant, refuse_reentrant
from tvm_ipc.runtime.scratch_dir import ScratchDir
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.wait_workers_joined_or_left import LEAVE_SECONDS, wait_for_exit
from tvm_ipc.runtime.worker_error_reports import rank_errors
from tvm_ipc.tvm_private_names import disco_api

_log: Final = logging.getLogger("tvm_ipc.session")
_disco_api: Any = disco_api()
_native_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_native_abort = tvm_ffi.get_global_func("tvm_ipc.session.abort")
_native_close = tvm_ffi.get_global_func("tvm_ipc.session.close")

#: Seconds for agents and launcher to end once a node is lost; the launcher would wait for it.
_LOST_NODE_SECONDS: Final = 1.0
#: Seconds for workers to end after an exception left the `with` block of their session.
_EXCEPTION_SECONDS: Final = 1.0

_open_sessions: weakref.WeakSet[Shutdown] = weakref.WeakSet()
#: Garbage-collected sessions whose end was interrupted, or would wait for the thread it runs in.
_unfinished: list[Shutdown] = []


class Shutdown:
    """The end of one session, which happens once.

    Attributes
    ----------
    scratch_dir : the folder of the session, removed at its end.
    disco_started : whether the session has a session of Disco to end.
    """

    def __init__(self, dispatcher: CommandDispatcher) -> None:
        self.scratch_dir = ScratchDir()
        self.disco_started = False
        self._dispatcher = dispatcher
        #: The dispatcher drops its reference at the end; a forked child needs the session then too.
        self._session_ref = weakref.ref(dispatcher.session)
        self._lock = threading.RLock()
        self._done = False
        self._hurried = False
        self._left_by_exception = False
        _open_sessions.add(self)

    def close(self) -> None:
        """End the workers, and raise the errors that they reported since the last `sync`."""
        dispatcher = self._dispatcher
        if dispatcher.closed:
            return
        refuse_reentrant(self._session_ref())
        try:
            with contextlib.suppress(SessionClosedError):  # there is nothing to wait for any more
                dispatcher.sync()
        finally:
            self._run()

    def close_after_exception(self) -> None:
        """End the workers without waiting for them: an exception is being raised already."""
        if self._dispatcher.closed:
            return
        refuse_reentrant(self._session_ref())
        self._left_by_exception = True
        self._run()

    def close_at_exit(self, *, failed: bool) -> None:
        """Close the session at the end of the program, which may have failed."""
        if not (failed or self._dispatcher.closed):
            self.close()
            return
        self._left_by_exception = failed
        self._run()

    def close_garbage(self) -> None:
        """Close a session to which no references exist; its errors are printed."""
        if self._done:
            return
        if is_reentrant(self._dispatcher.session):
            _unfinished.append(self)
            return
        try:
            # Not in another thread: this one may hold any lock.
            self.run_now()
        except BaseException:
            _unfinished.append(self)
            raise

    def _run(self) -> None:
        # A signal handler may close a session while the interrupted line holds its lock.
        if self._dispatcher.lock._is_owned():  # type: ignore[attr-defined]
            self.run_now()
        else:
            defer_sigint(self.run_now, self._kill)

    def _kill(self) -> None:
        self._hurried = True
        if self._dispatcher.pool is not None:
            self._dispatcher.pool.kill()

    def run_now(self) -> None:
        """End the workers in the calling thread, if they have not been ended before."""
        dispatcher = self._dispatcher
        dispatcher.closed = True  # waits in other threads end, with the lock or without it
        with self._lock:
            if self._done:
                return
            session = dispatcher.session  # lives until the locks are released
            # A signal handler ends the session if this thread owns the lock already.
            interrupts_sending = dispatcher.lock._is_owned()  # type: ignore[attr-defined]
            locked = dispatcher.lock.acquire(timeout=LEAVE_SECONDS)
            try:
                dispatcher.release_functions()
                if self.disco_started:
                    self._end_workers(session)
                elif dispatcher.pool is not None:
                    dispatcher.pool.kill()
                    dispatcher.pool.join(0.0)
                    dispatcher.pool.finish(0.0)
                    dispatcher.pool.forget()
                self.scratch_dir.remove()
                self._done = True
                if locked and not interrupts_sending:
                    dispatcher.release_session()
            finally:
                if locked:
                    dispatcher.lock.release()
        reason = dispatcher.unusable_reason
        _log.info("%s: ended%s", dispatcher.name, f": {reason}" if reason else "")

    def _end_workers(self, session: Any) -> None:
        dispatcher, pool = self._dispatcher, self._dispatcher.pool
        node_lost = False
        with contextlib.suppress(RuntimeError):  # the session server was never opened
            _native_abort(session)
        with contextlib.suppress(Exception):
            _disco_api.SessionShutdown(session)
        if pool is not None:
            seconds = _EXCEPTION_SECONDS if self._left_by_exception else LEAVE_SECONDS
            pool.join(0.0 if dispatcher.unusable_reason or self._hurried else seconds)
            pool.mute()
        with contextlib.suppress(RuntimeError):
            if not wait_for_exit(session, lambda: self._hurried):
                # A worker thread does not return from a call. Destroying the session would wait
                # for it indefinitely while holding the GIL: keep the session instead.
                _never_destroy(session)
            fail = not self._left_by_exception
            if not dispatcher.unusable_reason:  # else the error has been raised
                report_unraised_errors(session, _reported_errors(session), fail=fail)
            if dispatcher.unraised_error is not None:
                report_unraised_error(session, dispatcher.unraised_error(), fail=fail)
            node_lost = bool(json.loads(_native_report(session))["lost"])
            _native_close(session)
        if pool is not None:
            pool.finish(0.0 if self._hurried else _LOST_NODE_SECONDS if node_lost else None)

    def report(self, error: Exception) -> None:
        """Print an error that cannot be raised any more."""
        report_unraised_error(self._session_ref(), error)

    def disown(self) -> None:
        """Leave the workers alone in a process that was forked off the controller."""
        self._dispatcher.closed = self._done = True
        self._dispatcher.lock = threading.RLock()  # another thread may have held it
        self.scratch_dir.disown()
        # Disco's destructor would shut the workers down, and wait for threads that only the
        # controller has.
        _never_destroy(self._session_ref())


def _never_destroy(session: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


def end_unfinished() -> None:
    """End the garbage-collected sessions whose end was postponed."""
    while _unfinished:
        _unfinished.pop().run_now()


def _reported_errors(session: Any) -> list[RankError]:
    return rank_errors(json.loads(_native_report(session))["errors"])


@atexit.register
def _close_all() -> None:
    # As for a `with` block: no worker is waited for if the program ends by an exception.
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for shutdown in [*_open_sessions, *_unfinished]:
        try:
            shutdown.close_at_exit(failed=failed)
        except Exception as error:
            shutdown.report(error)


def _disown_all() -> None:
    for shutdown in list(_open_sessions):
        shutdown.disown()


os.register_at_fork(after_in_child=_disown_all)
