# SPDX-License-Identifier: Apache-2.0
"""The commands of a session on their way to its workers, and what comes back of them.

Disco runs commands in its workers without catching anything: an exception ends the worker, in
the controller's process too. So every command goes through the native function
`tvm_ipc.worker.guard`, which catches, reports to the controller's hub, ends the other ranks'
waits, and skips what follows until the controller has recovered. The controller never waits on
Disco's own pipes; it waits on the hub, which also notices dead workers: it sends a ticket behind
the commands, and every worker that comes to it tells the hub.

Any thread may send, wait and close. A lock orders the commands; no thread waits for workers while
it holds it, but for the one that recovers from an error: it lets nobody send until every worker
has come to rest. An error may have cost any command that was on its way. So it is told to each
thread that had one, at that thread's next command or wait, and to the thread that found it.

Ctrl-C may end any of this between any two lines. What is written down before a step is therefore
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
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.contract import Progress
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
from tvm_ipc.runtime.joining import SLICE_SECONDS
from tvm_ipc.runtime.own_worker import refuse_own_worker
from tvm_ipc.runtime.pieces import call_in_pieces
from tvm_ipc.runtime.pools import Pool
from tvm_ipc.runtime.references import DPackedFunc, DRef

_log: Final = logging.getLogger("tvm_ipc.session")
_native = tvm_ffi.get_global_func
_send = _native("tvm_ipc.session.send")
_send_ticket = _native("tvm_ipc.session.send_ticket")
_get_function = _native("tvm_ipc.session.get_function")
_wait = _native("tvm_ipc.session.wait")
_report = _native("tvm_ipc.session.report")
_recover = _native("tvm_ipc.session.recover")
_abort = _native("tvm_ipc.session.abort")

#: The workers' own deadline comes first: it knows who is missing.
_GRACE_SECONDS: Final = 2.0
#: One counter for all sessions: it names values on their way to the controller.
keys = itertools.count(1)
_numbers = itertools.count(1)


class _Caller:
    """What a session knows of one thread that sends commands."""

    __slots__ = ("__weakref__", "error", "last")

    def __init__(self) -> None:
        #: The number of its last command.
        self.last = 0
        #: Makes the error that it has yet to hear of.
        self.error: Callable[[], IPCError] | None = None


class CommandSession(disco.Session):  # type: ignore[misc]
    """A Disco session that sends guarded commands. Its subclass starts and ends it."""

    __slots__ = ("__dict__", "__weakref__")
    #: The process of each worker.
    _pids: tuple[int, ...]

    def _prepare(self, timeout: float) -> None:
        """Set the state that commands need; before anything is sent."""
        self.timeout = timeout
        #: What log lines call it.
        self._name = f"session {next(_numbers)}"
        #: The worker processes, if there are any.
        self._pool: Pool | None = None
        #: Bytes of commands that workers may leave unread; see Outbox.
        self._room = 0
        # Reentrant: a signal handler or a finalizer may use the session that it interrupts.
        self._lock = threading.RLock()
        self._closed = False
        self._why_unusable = ""
        self._functions: dict[str, DPackedFunc] = {}
        #: Raw functions that every worker has: they cannot fail, so nothing guards them.
        self._raw: dict[str, DRef] = {}
        #: Commands are numbered. A ticket has the number of the last command before it.
        self._commands = 0
        self._last_ticket = 0
        #: Up to here every worker is known to have come, and all errors to have been told.
        self._synced = 0
        #: Makes the error from which the session recovers; None if it does not.
        self._news: Callable[[], IPCError] | None = None
        self._local = threading.local()
        self._callers: weakref.WeakSet[_Caller] = weakref.WeakSet()
        #: Makes the error that no thread has heard of yet.
        self._unheard: Callable[[], IPCError] | None = None

    def _start_commands(self) -> None:
        """Make ready to send: every worker has joined."""
        self._pids = tuple(json.loads(_report(self))["pids"])
        for name in ("guard", "done", "find_function"):
            self._raw[name] = DRef(_get_function(self, f"tvm_ipc.worker.{name}"), self)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker."""
        return self._pids

    @property
    def usable(self) -> bool:
        """Whether commands can be sent: not closed, nobody died, no deadline passed."""
        return not (self._closed or self._why_unusable)

    def _caller(self) -> _Caller:
        """What is known of the calling thread; an error if it is a worker of the session.

        To be asked before the lock, whose owner may wait for that worker.
        """
        caller: _Caller | None = getattr(self._local, "caller", None)
        if caller is None:
            refuse_own_worker(self)
            caller = _Caller()
            self._callers.add(caller)
            self._local.caller = caller
        return caller

    def _hear(self) -> None:
        """Raise what the calling thread has yet to hear of."""
        caller = self._caller()
        if caller.error is None:
            return
        try:
            raise caller.error()
        except IPCError:
            caller.error = self._unheard = None  # told; not so if Ctrl-C came before
            raise

    def _enter(self) -> None:
        """Raise why the calling thread may not go on now, if it may not; with the lock."""
        self._finish_recovery()
        self._check_usable()
        if self._pool is not None and self._pool.alarming():
            self._raise_died("")

    def _check_usable(self) -> None:
        self._hear()
        if self._closed:
            raise SessionClosedError("the session is closed")
        if self._why_unusable:
            raise SessionClosedError(f"the session is not usable any more: {self._why_unusable}")

    # ---- sending --------------------------------------------------------------------------

    def _command(self, raw: str, *args: Any) -> DRef | None:
        """Send one command, when there is room for it; None if it is too long for that."""
        self._caller()
        while True:
            with self._lock:
                self._enter()
                self._commands += 1
                self._caller().last = self._commands
                answer = self._try(_send, self, 0, 0, self._raw[raw], *args)
                if isinstance(answer, disco.DRef):
                    return DRef(answer, self)
                if answer > self._room // 2:  # the rest is for registers that are freed first
                    return None
                ticket = self._ticket()
            self._wait_for(ticket)

    def _ticket(self) -> int:
        """Return a ticket behind all commands so far; with the lock."""
        if self._last_ticket < self._commands:
            self._try(_send_ticket, self, self._raw["done"], self._commands)
            self._last_ticket = self._commands
        return self._last_ticket

    def _try(self, send: Any, *args: Any) -> Any:
        try:
            return send(*args)
        except Exception as error:
            if "Write Error" in str(error):  # a worker's pipe has nobody at its end
                self._raise_died(f"a command could not be sent: {error}")
            raise  # an argument that Disco cannot send: nothing was sent

    def call_packed(self, func: disco.DRef, *args: Any) -> DRef:
        """Call a function on every worker; the result stays there."""
        self._check_references(args)
        result = self._command("guard", func, *args)
        if result is not None:
            return result
        return call_in_pieces(self._get_cached_method, self._room, func, args)

    def _check_references(self, args: tuple[Any, ...]) -> None:
        if any(isinstance(a, disco.DRef) and getattr(a, "session", None) is not self for a in args):
            raise ValueError(
                "a value of another session has no meaning in this one: get it there, put it here"
            )

    def _get_cached_method(self, name: str) -> DPackedFunc:
        if name not in self._functions:
            # Not guarded: looked up even if an error makes the workers skip what this thread, or
            # another one that uses the function meanwhile, wants it for.
            function = self._command("find_function", name)
            assert function is not None
            self._functions[name] = DPackedFunc.of(function)
        return self._functions[name]

    def get_global_func(self, name: str) -> DPackedFunc:
        """Return a function by its global name; an error at the next sync if a worker lacks it."""
        arguments.text("get_global_func: name", name, "the name of a function")
        return DPackedFunc.of(self._get_cached_method("tvm_ipc.worker.get_global_func")(name))

    # ---- waiting --------------------------------------------------------------------------

    def sync(self) -> None:
        """Wait until every worker has done every command; raise what went wrong.

        An error reaches every thread with commands that it may have cost: each hears of it once,
        at its next command, `sync`, `get` or `close`. So does a thread without any that finds it.
        """
        self._caller()
        with self._lock:
            self._enter()
            if self._last_ticket <= self._synced:
                self._commands += 1  # ask even those who have done everything: they may be dead
            ticket = self._ticket()
        self._wait_for(ticket)

    def _sync_worker(self, worker_id: int) -> None:
        self.sync()

    def _sync_all(self) -> None:
        self.sync()

    def _wait_for(self, ticket: int) -> None:
        """Wait until every worker has come to the ticket; raise what this thread must hear."""
        end = time.monotonic() + self.timeout + _GRACE_SECONDS
        while True:
            progress = self._wait(ticket)
            with self._lock:
                self._finish_recovery()
                self._hear()
                if progress != Progress.ATTENTION and ticket <= self._synced:
                    return  # known to another thread, which may have closed the session since
                self._enter()
                if progress == Progress.DONE:
                    self._synced = max(self._synced, ticket)
                    return
                if progress == Progress.ATTENTION:
                    self._handle_errors()
                elif time.monotonic() > end:
                    self._raise_deadline(ticket)

    def _wait(self, ticket: int) -> int:
        try:
            return int(_wait(self, ticket, SLICE_SECONDS))
        except RuntimeError:
            if self._closed:  # by another thread
                return Progress.PENDING
            raise

    def _handle_errors(self) -> None:
        """Hear all there is to hear, tell it to whom it concerns, and go on; with the lock."""
        ticket = self._ticket()
        end = time.monotonic() + self.timeout + _GRACE_SECONDS
        while self._wait(ticket) == Progress.PENDING:
            self._check_usable()
            if time.monotonic() > end:
                self._raise_deadline(ticket)
        report = json.loads(_report(self))
        found = causes(RankError(**error) for error in report["errors"])
        if report["dead"] or report["left"]:
            self._raise_died(describe(e for e in found if e.kind != "PeerError"))
        if not found:
            return  # another thread has told them
        for error in found:
            _log.warning("%s: rank %d: %s: %s", self._name, error.rank, error.kind, error.message)
        self._news = lambda: _error_of(found)
        self._finish_recovery()
        self._hear()

    def _tell(self, error: Callable[[], IPCError]) -> None:
        """Let everybody hear of an error whose commands it may have cost, and the finder."""
        self._unheard = error
        for caller in list(self._callers):
            if caller.last > self._synced and caller.error is None:
                caller.error = error
        finder = self._caller()
        finder.error = finder.error or error

    def _finish_recovery(self) -> None:
        """Tell an error, and let the workers go on; with the lock.

        All workers are idle, and nobody has sent anything, or heard, since the error was found: if
        Ctrl-C ends this, whoever comes next does it.
        """
        if self._news is None:
            return
        self._tell(self._news)
        _recover(self)
        _log.info("%s: recovered: its workers take commands again", self._name)
        self._synced = self._commands
        self._news = None

    # ---- the end of a session -------------------------------------------------------------

    def _break(self, error: Callable[[], IPCError]) -> None:
        """Give up, and say why to everybody; with the lock."""
        self._why_unusable = str(error()).partition("\n")[0]
        _log.error("%s: %s", self._name, self._why_unusable)
        self._tell(error)
        _abort(self)
        if self._pool is not None:
            self._pool.kill()
            self._pool.mute()
        self._hear()

    def _raise_deadline(self, ticket: int) -> None:
        report = json.loads(_report(self))
        late = [rank for rank, done in enumerate(report["done"]) if done < ticket]
        who = ", ".join(f"rank {rank} (pid {self._pids[rank]})" for rank in late)
        parts = [f"{who} did not answer within {self.timeout:g} s"]
        # Where it went wrong is not said: what did not answer is the cause.
        errors = [RankError(**{**error, "traceback": ""}) for error in report["errors"]]
        parts += [describe(errors)] if errors else []
        parts.append("the session is no longer usable; a longer timeout may be what it needs")
        self._break(lambda: DeadlineError("; ".join(parts)))

    def _raise_died(self, details: str) -> None:
        end = time.monotonic() + 1.0
        while True:  # a broken pipe can be known before the hub has heard of the death
            report = json.loads(_report(self))
            dead = {*report["dead"], *report["left"]}
            codes = self._pool.ended(wait=dead) if self._pool else {}
            if dead or codes or time.monotonic() > end:
                break
            time.sleep(0.01)
        cause = self._pool.cause() if self._pool else None
        if cause is None and report["lost"]:
            cause = report["lost"][0], ()
        if cause is not None:
            what, _, more = cause[0].partition("\n")
            details = "\n".join(part for part in (details, more) if part)
            self._say_died(what, details, cause[1] or tuple(sorted(dead)))
        ranks = tuple(sorted(dead | codes.keys()))
        who = ", ".join(
            f"rank {rank} (pid {self._pids[rank]}"
            + (f", exit code {codes[rank]})" if rank in codes else ")")
            for rank in ranks
        )
        self._say_died(f"{who or 'a worker'} died", details, ranks)

    def _say_died(self, what: str, details: str, ranks: tuple[int, ...]) -> None:
        message = f"{what}; the session is no longer usable"
        said = f"{message}\n{details}" if details else message
        self._break(lambda: WorkerDiedError(said, ranks))


def _error_of(found: tuple[RankError, ...]) -> IPCError:
    if all(error.kind == "DeadlineError" for error in found):
        return DeadlineError(describe(found))
    return WorkerError(found)
