# SPDX-License-Identifier: Apache-2.0
"""How a session ends: closed, left by an exception, forgotten, with the program, or in a fork."""

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc.errors import RankError, SessionClosedError
from tvm_ipc.runtime import unheard
from tvm_ipc.runtime.commands import CommandSession
from tvm_ipc.runtime.folder import Folder
from tvm_ipc.runtime.joining import LEAVE_SECONDS, wait_until_left
from tvm_ipc.runtime.own_worker import is_own_worker, refuse_own_worker
from tvm_ipc.runtime.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from typing_extensions import Self

_log: Final = logging.getLogger("tvm_ipc.session")
_api: Any = disco._ffi_api
_native = tvm_ffi.get_global_func
_report = _native("tvm_ipc.session.report")
_abort = _native("tvm_ipc.session.abort")
_close = _native("tvm_ipc.session.close")

#: Seconds that agents and launcher have once a node is lost, for which the launcher would wait.
_LOST_SECONDS: Final = 1.0

_open_sessions: weakref.WeakSet[EndingSession] = weakref.WeakSet()
#: Sessions that nobody holds, whose end was interrupted, or would wait for the thread it is in.
_unfinished: list[EndingSession] = []


class EndingSession(CommandSession):
    """A session whose workers end with it, whatever ends it. Its subclass starts it."""

    #: An exception of the program leaves the `with` block.
    _left_by_exception = False

    def shutdown(self) -> None:
        """Same as `close`."""
        self.close()

    def close(self) -> None:
        """End the workers. Raises what they reported since the last sync; ends them all the same.

        Closing twice, or a session that is not usable any more, does nothing more.
        """
        if self._closed:
            return
        refuse_own_worker(self)
        try:
            with contextlib.suppress(SessionClosedError):  # nobody can be waited for any more
                self.sync()
        finally:
            self._end()

    def _prepare(self, timeout: float) -> None:
        super()._prepare(timeout)
        self._folder = Folder()
        #: Whether there is a session of Disco.
        self._made = False
        self._end_lock = threading.RLock()
        self._ended = self._hurried = False
        _open_sessions.add(self)

    def _end(self) -> None:
        """End the workers, which are not waited for."""
        refuse_own_worker(self)
        # A signal handler may close the session of a line that holds the lock.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._end_now()
        else:
            uninterrupted(self._end_now, self._kill)

    def _kill(self) -> None:
        self._hurried = True
        if self._pool is not None:
            self._pool.kill()

    def _end_now(self) -> None:
        self._closed = True  # whoever waits in another thread, with the lock or without, leaves
        with self._end_lock:
            if self._ended:
                return
            sending = self._lock._is_owned()  # type: ignore[attr-defined]  # a handler ends it
            locked = self._lock.acquire(timeout=LEAVE_SECONDS)
            try:
                self._functions.clear()
                if self._made:
                    self._end_workers()
                elif self._pool is not None:
                    self._pool.kill()
                    self._pool.join(0.0)
                    self._pool.finish(0.0)
                    self._pool.forget()
                self._folder.remove()
                if locked and not sending:
                    # They refer to the session, which would stay, with its descriptors, until
                    # Python looks for cycles.
                    self._raw.clear()
                self._ended = True
            finally:
                if locked:
                    self._lock.release()
        _log.info("%s: ended%s", self._name, f": {why}" if (why := self._why_unusable) else "")

    def _end_workers(self) -> None:
        lost = False
        with contextlib.suppress(RuntimeError):  # not open: it did not come that far
            _abort(self)
        with contextlib.suppress(Exception):
            _api.SessionShutdown(self)
        if self._pool is not None:
            seconds = 1.0 if self._left_by_exception else LEAVE_SECONDS
            self._pool.join(0.0 if self._why_unusable or self._hurried else seconds)
            self._pool.mute()
        with contextlib.suppress(RuntimeError):
            if not wait_until_left(self, lambda: self._hurried):
                # A thread of ours is stuck in a call. To destroy the session would wait for it
                # with Python's lock held, for ever: keep it instead.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            if not self._why_unusable:  # else it has been raised
                unheard.say_errors(self, _errors(self), fail=not self._left_by_exception)
            if self._unheard is not None:
                unheard.say(self, self._unheard(), fail=not self._left_by_exception)
            lost = bool(json.loads(_report(self))["lost"])
            _close(self)
        if self._pool is not None:
            self._pool.finish(0.0 if self._hurried else _LOST_SECONDS if lost else None)

    def __enter__(self) -> Self:
        """Return the session."""
        self._check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. With an error on its way, which is not replaced, no worker is waited for."""
        if error is None:
            self.close()
        elif not self._closed:
            self._left_by_exception = True
            self._end()

    def __del__(self) -> None:
        if self.__dict__.get("_ended", True):
            return
        if is_own_worker(self):
            _unfinished.append(self)
            return
        try:
            # Not in another thread: this one may hold any lock.
            self._end_now()
        except BaseException:
            _unfinished.append(self)
            raise


def end_unfinished() -> None:
    """End the sessions that nobody holds and whose end was left for later."""
    while _unfinished:
        _unfinished.pop()._end_now()


def _errors(session: EndingSession) -> list[RankError]:
    return [RankError(**error) for error in json.loads(_report(session))["errors"]]


@atexit.register
def _close_all() -> None:
    # As for a `with` block: if the program ends by an exception, no worker is waited for.
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for session in [*_open_sessions, *_unfinished]:
        try:
            if failed or session._closed:
                session._left_by_exception = failed
                session._end()
            else:
                session.close()
        except Exception as error:
            unheard.say(session, error)


def _disown() -> None:
    """Keep a process that the controller forked away from the workers: they are not its own."""
    for session in list(_open_sessions):
        session._closed = session._ended = True
        session._lock = threading.RLock()  # another thread may have held it
        session._folder.disown()
        # Disco's destructor would shut the workers down, and wait for threads that are not here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


os.register_at_fork(after_in_child=_disown)
