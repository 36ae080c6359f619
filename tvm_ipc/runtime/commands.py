# SPDX-License-Identifier: Apache-2.0
"""The commands of a session on their way to its workers, and what comes back of them.

Disco runs commands in its workers without catching anything: an exception ends the worker, in
the controller's process too. So every command goes through the native function
`tvm_ipc.worker.guard`, which catches, reports to the controller's hub, ends the other ranks'
waits, and skips what follows until the controller has heard. The controller never waits on
Disco's own pipes; it waits on the hub, which also notices dead workers: it sends a ticket behind
the commands, and every worker that comes to it tells the hub.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import tvm_ffi
from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.errors import (
    DeadlineError,
    RankError,
    SessionClosedError,
    WorkerDiedError,
    WorkerError,
    describe,
)
from tvm_ipc.runtime.processes import ProcessPool
from tvm_ipc.runtime.references import DPackedFunc, DRef

_log: Final = logging.getLogger("tvm_ipc.session")
_api: Any = disco._ffi_api
_wait = tvm_ffi.get_global_func("tvm_ipc.session.wait")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_recover = tvm_ffi.get_global_func("tvm_ipc.session.recover")
_abort = tvm_ffi.get_global_func("tvm_ipc.session.abort")
_detach = tvm_ffi.get_global_func("tvm_ipc.session.detach")
_release = tvm_ffi.get_global_func("tvm_ipc.session.release")

#: A Python signal handler, Ctrl-C among them, runs at least this often while we wait.
SLICE_SECONDS: Final = 0.1
#: The workers' own deadline comes first: it knows who is missing.
_GRACE_SECONDS: Final = 2.0
#: Commands that may be on their way; they fit into a pipe, so that writing never blocks.
_COMMANDS_ON_THE_WAY: Final = 48 << 10
_COMMAND_BYTES: Final = 64
#: One counter for all sessions: a ticket also names a value on its way to the controller.
tickets = itertools.count(1)
_numbers = itertools.count(1)


class CommandSession(disco.Session):  # type: ignore[misc]
    """A Disco session that sends guarded commands. Its subclass starts and ends it."""

    __slots__ = ("__dict__", "__weakref__")
    #: The worker processes, if there are any.
    _pool: ProcessPool | None
    #: The process of each worker.
    _pids: tuple[int, ...]
    #: Raw functions that every worker has: they cannot fail, so nothing guards them.
    _guard: DRef
    _done: DRef
    _lookup: DRef

    def _prepare(self, pool: ProcessPool | None, timeout: float) -> None:
        """Set the state that commands need; before anything is sent."""
        self.timeout = timeout
        #: What log lines call it.
        self._name = f"session {next(_numbers)}"
        self._pool = pool
        self._closed = False
        self._why_unusable = ""
        self._on_the_way = 0
        #: Registers of references that ended, to be freed on the workers.
        self._freed: deque[int] = deque()
        self._functions: dict[str, DPackedFunc] = {}

    def _start_commands(self) -> None:
        """Make ready to send: every worker has joined."""
        self._pids = tuple(json.loads(_report(self))["pids"])
        self._guard = self._raw_function("tvm_ipc.worker.guard")
        self._done = self._raw_function("tvm_ipc.worker.done")
        self._lookup = self._raw_function("tvm_ipc.worker.get_global_func")

    @property
    def usable(self) -> bool:
        """Whether commands can be sent: not closed, nobody died, no deadline passed."""
        return not (self._closed or self._why_unusable)

    def _check_usable(self) -> None:
        if self._closed:
            raise SessionClosedError("the session is closed")
        if self._why_unusable:
            raise SessionClosedError(f"the session is not usable any more: {self._why_unusable}")

    def _break(self, why: str) -> None:
        _log.error("%s: %s", self._name, why)
        self._why_unusable = why
        _abort(self)
        if self._pool is not None:
            self._pool.kill()
            self._pool.mute()

    def _raw_function(self, name: str) -> DRef:
        """Return a function that every worker is known to have."""
        reference = _api.SessionGetGlobalFunc(self, name)
        return DRef(reference, self, _detach(reference))

    def _command(self, *args: Any) -> DRef:
        """Send one command to every worker."""
        self._check_usable()
        if any(isinstance(a, disco.DRef) and getattr(a, "session", None) is not self for a in args):
            raise ValueError(
                "a value of another session has no meaning in this one: get it there, put it here"
            )
        size = _COMMAND_BYTES * len(args) + sum(
            len(a) for a in args if isinstance(a, (str, bytes, bytearray, tvm_ffi.Shape))
        )
        if self._on_the_way + size > _COMMANDS_ON_THE_WAY:
            self._pass_ticket()
        return self._send(size, *args)

    def _send(self, size: int, *args: Any) -> DRef:
        try:
            while self._freed and self._on_the_way + _COMMAND_BYTES <= _COMMANDS_ON_THE_WAY:
                _release(self, self._freed.popleft())
                self._on_the_way += _COMMAND_BYTES
            with self._watch_large_command(size):
                reference = _api.SessionCallPacked(self, 0, 0, *args)
        except Exception as error:
            if "Write Error" in str(error):  # a worker's pipe has nobody at its end
                self._raise_died(f"a command could not be sent: {error}")
            raise  # an argument that Disco cannot send: nothing was sent
        self._on_the_way += size
        return DRef(reference, self, _detach(reference))

    @contextlib.contextmanager
    def _watch_large_command(self, size: int) -> Iterator[None]:
        """End the workers if one of them does not take a command that fills its pipe."""
        if size <= _COMMANDS_ON_THE_WAY or self._pool is None:
            yield
            return
        timer = threading.Timer(self.timeout, self._pool.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def call_packed(self, func: disco.DRef, *args: Any) -> DRef:
        """Call a function on every worker; the result stays there."""
        return self._command(self._guard, func, *args)

    def _get_cached_method(self, name: str) -> DPackedFunc:
        if name not in self._functions:
            self._functions[name] = self.get_global_func(name)
        return self._functions[name]

    def get_global_func(self, name: str) -> DPackedFunc:
        """Return a function by its global name; an error at the next sync if a worker lacks it."""
        arguments.text("get_global_func: name", name, "the name of a function")
        return DPackedFunc.of(self.call_packed(self._lookup, name))

    def sync(self) -> None:
        """Wait until every worker has done every command; raise what went wrong."""
        self._check_usable()
        self._pass_ticket()

    def _sync_worker(self, worker_id: int) -> None:
        self.sync()

    def _sync_all(self) -> None:
        self.sync()

    def _pass_ticket(self) -> None:
        ticket = next(tickets)
        self._send(_COMMAND_BYTES, self._done, ticket)
        end = time.monotonic() + self.timeout + _GRACE_SECONDS
        while True:
            progress = _wait(self, ticket, SLICE_SECONDS)
            if progress == 0:
                self._on_the_way = 0
                break
            if progress == 2:
                self._raise_report()
            if time.monotonic() > end:
                self._raise_deadline(ticket)

    def _raise_deadline(self, ticket: int) -> None:
        report = json.loads(_report(self))
        late = [rank for rank, done in enumerate(report["done"]) if done < ticket]
        who = ", ".join(f"rank {rank} (pid {self._pids[rank]})" for rank in late)
        parts = [f"{who} did not answer within {self.timeout:g} s"]
        parts += [f"rank {e['rank']}: {e['kind']}: {e['message']}" for e in report["errors"]]
        parts.append("the session is no longer usable; a longer timeout may be what it needs")
        self._break("; ".join(parts))
        raise DeadlineError("; ".join(parts))

    def _raise_report(self) -> None:
        """Raise what the workers reported; they have passed the ticket, or one is dead."""
        report = json.loads(_report(self))
        errors = [RankError(**error) for error in report["errors"]]
        causes = tuple(e for e in errors if e.kind != "PeerError") or tuple(errors)
        causes = tuple(sorted(causes, key=lambda e: e.rank))
        for error in causes:
            _log.warning("%s: rank %d: %s: %s", self._name, error.rank, error.kind, error.message)
        if report["dead"] or report["left"]:
            self._raise_died("".join(f"\n{e}" for e in causes if e.kind != "PeerError"))
        # What was looked up since the error was skipped: it is no function.
        self._functions.clear()
        # No worker is inside an operation, so the group may start afresh.
        _recover(self)
        _log.info("%s: recovered: its workers take commands again", self._name)
        self._on_the_way = 0
        if all(error.kind == "DeadlineError" for error in causes):
            raise DeadlineError(describe(causes))
        raise WorkerError(causes)

    def _raise_died(self, details: str) -> None:
        end = time.monotonic() + 1.0
        while True:  # a broken pipe can be known before the hub has heard of the death
            report = json.loads(_report(self))
            dead = {*report["dead"], *report["left"]}
            codes = self._pool.ended(wait=dead) if self._pool else {}
            if dead or codes or time.monotonic() > end:
                break
            time.sleep(0.01)
        who = ", ".join(
            f"rank {rank} (pid {self._pids[rank]}"
            + (f", exit code {codes[rank]})" if rank in codes else ")")
            for rank in sorted(dead | codes.keys())
        )
        message = f"{who or 'a worker'} died; the session is no longer usable"
        self._break(message)
        raise WorkerDiedError(f"{message}{details}", tuple(sorted(dead | codes.keys())))
