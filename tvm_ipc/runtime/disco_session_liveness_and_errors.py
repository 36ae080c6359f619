# SPDX-License-Identifier: Apache-2.0
"""Keep the state of Disco's own sessions: processes, shutdown, and errors of the workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import SessionClosedError, WorkerDiedError, WorkerError, causes
from tvm_ipc.runtime.disco_processes import Worker
from tvm_ipc.runtime.refuse_calls_from_own_workers import refuse_reentrant
from tvm_ipc.runtime.start_child_process import describe_exit_code
from tvm_ipc.runtime.worker_error_reports import rank_errors
from tvm_ipc.tvm_private_names import forget_functions

_log: Final = logging.getLogger("tvm_ipc.session")
_get_function = tvm_ffi.get_global_func("tvm_ipc.session.get_function")
_recover = tvm_ffi.get_global_func("tvm_ipc.session.recover")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")
_weak_reference = tvm_ffi.get_global_func("tvm_ipc.session.weak_reference")

GUARD: Final = "tvm_ipc.worker.guard"
LOOKUP: Final = "tvm_ipc.worker.get_global_func"
COPY_FROM_HOST: Final = "tvm_ipc.worker.copy_from_host"
COPY_TO_HOST: Final = "tvm_ipc.worker.copy_to_host"
_DONE: Final = "tvm_ipc.worker.done"
_FUNCTIONS: Final = (GUARD, LOOKUP, COPY_FROM_HOST, COPY_TO_HOST, _DONE)
#: Seconds in which the exit code of a process is known after its pipe has closed.
_DEATH_SECONDS: Final = 2.0

#: Disco's original functions, by the names of the functions that replace them.
originals: dict[str, Any] = {}


class State:
    """The state of one session of Disco."""

    def __init__(self, workers: list[Worker] | None, reference: Callable[[bool], Any]) -> None:
        #: Whether Disco ends worker processes when it destroys the session.
        self.has_processes = workers is not None
        self.workers = [] if workers is None else workers
        #: A native weak reference, which returns the session or None. With True as its argument,
        #: the session is never destroyed. No other session gets the address meanwhile.
        self.reference = reference
        self.owner = os.getpid()
        self.shut_down = False
        #: Functions that every worker has; empty before `init_ccl`. The guard catches exceptions of
        #: the others, and reports them to the session server.
        self.functions: dict[str, Any] = {}
        self._tickets = itertools.count(1)

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the worker processes that have ended."""
        codes = {worker.worker_id: worker.process.poll() for worker in self.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _any_ended(self, seconds: float) -> bool:
        """Return whether a worker process ends within some seconds, or has ended."""
        deadline = time.monotonic() + seconds
        while self.workers and not self.exit_codes() and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(self.exit_codes())

    def check(self) -> None:
        """Raise if the session was shut down, or a worker process has died."""
        if self.shut_down:
            raise SessionClosedError("the session was shut down")
        if self.owner != os.getpid():
            raise SessionClosedError(
                f"the session is of process {self.owner}, from which this one was forked; open "
                "one here"
            )
        codes = self.exit_codes()
        if not codes:
            return
        dead_ranks = ", ".join(
            f"rank {rank} (pid {self.workers[rank - 1].process.pid}, {describe_exit_code(code)})"
            for rank, code in codes.items()
        )
        raise WorkerDiedError(
            f"{dead_ranks} died; the session is no longer usable: shut it down and open a new one; "
            "the worker's own output may have details",
            tuple(codes),
        )

    def guard(self, session: Any) -> None:
        """Report exceptions of functions from now on; the workers have joined."""
        for name in _FUNCTIONS:
            self.functions[name] = _get_function(session, name)

    def call(self, session: Any, function: Any, *args: Any) -> Any:
        """Call a function on every worker, where its exceptions are reported."""
        return originals["SessionCallPacked"](session, 0, 0, self.functions[GUARD], function, *args)

    def wait(self, session: Any, rank: int, native: Any, *args: Any) -> Any:
        """Call a native function that waits for a worker, and raise the errors reported until then.

        After an error this waits for all workers, and raises their errors too.
        """
        expected = f"the rank of a worker, {arguments.ranks_below(session.num_workers)}"
        arguments.integer("worker_id", rank, expected, 0, session.num_workers - 1)
        result, errors = self._wait_and_report(session, rank, native, *args)
        if not errors:
            return result
        for rank in range(session.num_workers):
            sync = originals["SessionSyncWorker"]
            _, errors = self._wait_and_report(session, rank, sync, session, rank)
        _recover(session)
        # Look-ups since the error were skipped, so their results are no functions.
        forget_functions(session)
        raise WorkerError(causes(rank_errors(errors)))

    def _wait_and_report(self, session: Any, rank: int, native: Any, *args: Any) -> tuple[Any, Any]:
        """Call a native function that waits for a worker; return its result and all errors so far.

        The result arrives through Disco's pipe. Errors arrive through the session server, possibly
        later. The worker reads a ticket before it sends the result, and reports the ticket through
        the session server after its errors.
        """
        if not self.functions:
            return self._check_answer(native, *args), []
        ticket = next(self._tickets)
        done = self.functions[_DONE]
        originals["SessionCallPacked"](session, 0, 0, done, ticket)
        result = self._check_answer(native, *args)
        while True:  # the ticket has been sent
            report = json.loads(_report(session))
            if report["done"][rank] >= ticket or rank in report["dead"] + report["left"]:
                return result, report["errors"]
            time.sleep(0.0005)

    def _check_answer(self, native: Any, *args: Any) -> Any:
        """Call a native function that waits for a worker; raise if the worker has died."""
        result = None
        try:
            result = native(*args)
        except RuntimeError:
            if not self._any_ended(_DEATH_SECONDS):
                raise
            # A death is the cause. It is raised outside of this block, so that Python does not
            # print both errors.
            _log.debug("a session of Disco: a worker did not answer", exc_info=True)
        self.check()  # after a death the result is not the answer
        return result


#: The sessions of this process, by address. The entry of a destroyed session is dropped when
#: another session is made, or when its process pool is destroyed.
_states: dict[int, State] = {}


def _address(session: Any) -> int:
    address: int = session.__chandle__()
    return address


def remember(session: Any, workers: list[Worker] | None) -> None:
    """Add a new session and its worker processes, and drop those that were destroyed."""
    _drop(lambda state: state.reference(False) is None)
    _states[_address(session)] = State(workers, _weak_reference(session))


def forget(workers: list[Worker]) -> None:
    """Drop the session that had these worker processes."""
    _drop(lambda state: state.workers is workers)


def _drop(is_dropped: Callable[[State], bool]) -> None:
    # Other threads may add and drop sessions meanwhile.
    for address, state in _states.copy().items():
        if is_dropped(state) and _states.get(address) is state:
            _states.pop(address, None)


def kept_state(session: Any) -> State:
    """Return the state of a session, which is kept from now on."""
    return _states.setdefault(_address(session), State(None, _weak_reference(session)))


def state_of(session: Any) -> State:
    """Return the state of a session; a new state if none is kept."""
    return _states.get(_address(session)) or State(None, _weak_reference(session))


def usable(session: Any) -> State:
    """Return the state of a session; raise if the session cannot be used."""
    refuse_reentrant(session)
    state = state_of(session)
    state.check()
    return state


def disown() -> None:
    """Keep the parent's sessions alive in a forked child, also those that were shut down.

    A destructor would wait for threads that only the parent has.
    """
    for state in _states.copy().values():
        state.reference(True)


def end_at_exit(shut_down: Callable[[Any], None]) -> None:
    """End the sessions with worker processes that are open at the end of the program.

    Disco does that when it destroys a session, by calls of Python. Modules may be empty by then,
    and an error would end this process by a signal. So these sessions are not destroyed.
    """
    for state in _states.copy().values():
        if not state.has_processes or state.owner != os.getpid():
            continue
        session = state.reference(True)
        if session is None:
            continue
        with contextlib.suppress(Exception):  # of workers that have died
            if not state.shut_down:
                originals["SessionSyncWorker"](session, 0)  # a thread of this process
                shut_down(session)
        for worker in state.workers:
            worker.kill()
