# SPDX-License-Identifier: Apache-2.0
"""What is known of each session of Disco: its processes, its end, and what its workers report."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import RankError, SessionClosedError, WorkerDiedError, WorkerError, causes
from tvm_ipc.runtime.disco_processes import Worker
from tvm_ipc.runtime.own_worker import refuse_own_worker

_get_function = tvm_ffi.get_global_func("tvm_ipc.session.get_function")
_recover = tvm_ffi.get_global_func("tvm_ipc.session.recover")
_report = tvm_ffi.get_global_func("tvm_ipc.session.report")

GUARD: Final = "tvm_ipc.worker.guard"
LOOKUP: Final = "tvm_ipc.worker.get_global_func"
COPY_FROM_HOST: Final = "tvm_ipc.worker.copy_from_host"
COPY_TO_HOST: Final = "tvm_ipc.worker.copy_to_host"
_DONE: Final = "tvm_ipc.worker.done"
_FUNCTIONS: Final = (GUARD, LOOKUP, COPY_FROM_HOST, COPY_TO_HOST, _DONE)
#: How long the system may take to tell of the end of a process whose pipe has ended.
_DEATH_SECONDS: Final = 2.0

#: Disco's own functions, by the names of those that took their place.
originals: dict[str, Any] = {}


class State:
    """What is known of a session of Disco."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.owner = os.getpid()
        self.shut_down = False
        #: Functions that every worker has; empty before `init_ccl`. The first catches what others
        #: raise, and reports it to the session's hub.
        self.functions: dict[str, Any] = {}
        self._tickets = itertools.count(1)

    def exit_codes(self) -> dict[int, int]:
        """Return how those worker processes ended that did."""
        codes = {worker.worker_id: worker.exit_code() for worker in self.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def check(self, wait: float = 0.0) -> None:
        """Raise if the session was shut down, or a worker process has died."""
        if self.shut_down:
            raise SessionClosedError("the session was shut down")
        if self.owner != os.getpid():
            raise SessionClosedError(
                f"the session is of process {self.owner}, from which this one was forked; open "
                "one here"
            )
        end = time.monotonic() + wait
        while not (codes := self.exit_codes()):
            if time.monotonic() >= end:
                return
            time.sleep(0.01)
        who = ", ".join(
            f"rank {rank} (pid {self.workers[rank - 1].pid}, exit code {code})"
            for rank, code in codes.items()
        )
        raise WorkerDiedError(
            f"{who} died; the session is no longer usable: shut it down and open a new one; the "
            "worker's own output may say more",
            tuple(codes),
        )

    def guard(self, session: Any) -> None:
        """From now on, report what functions raise; the workers have joined."""
        for name in _FUNCTIONS:
            self.functions[name] = _get_function(session, name)

    def call(self, session: Any, function: Any, *args: Any) -> Any:
        """Call a function on every worker, where an error of it is reported."""
        return originals["SessionCallPacked"](session, 0, 0, self.functions[GUARD], function, *args)

    def wait(self, session: Any, rank: int, native: Any, *args: Any) -> Any:
        """Call a native function that waits for a worker; raise what the worker reported till then.

        If there is anything, everybody comes to rest, and what others reported is raised with it.
        """
        wanted = f"the rank of a worker, 0 to {session.num_workers - 1}"
        arguments.integer("worker_id", rank, wanted, 0, session.num_workers - 1)
        result, errors = self._heard_after(session, rank, native, *args)
        if not errors:
            return result
        for rank in range(session.num_workers):
            sync = originals["SessionSyncWorker"]
            _, errors = self._heard_after(session, rank, sync, session, rank)
        _recover(session)
        # What was looked up since the error was skipped: it is no function.
        getattr(session, "_cache", {}).clear()
        raise WorkerError(causes(RankError(**error) for error in errors))

    def _heard_after(self, session: Any, rank: int, native: Any, *args: Any) -> tuple[Any, Any]:
        """Call a native function that waits for a worker; return its result, and all errors so far.

        The result comes over Disco's pipe and errors over the hub, where they may be later. A
        ticket that the worker reads before it answers comes over the hub too, behind its errors.
        """
        if not self.functions:
            return self._answer(native, *args), []
        ticket = next(self._tickets)
        done = self.functions[_DONE]
        originals["SessionCallPacked"](session, 0, 0, done, ticket)
        result = self._answer(native, *args)
        while True:  # what it waits for has been sent
            report = json.loads(_report(session))
            if report["done"][rank] >= ticket or rank in report["dead"] + report["left"]:
                return result, report["errors"]
            time.sleep(0.0005)

    def _answer(self, native: Any, *args: Any) -> Any:
        """Call a native function that waits for an answer of a worker, which may die."""
        try:
            result = native(*args)
        except RuntimeError:
            if self.workers:
                self.check(_DEATH_SECONDS)  # the cause, if it is one
            raise
        self.check()  # else what came was not what was asked for
        return result


#: Every session that was made here, by its address. One that is gone is forgotten when its
#: address, or its pool of processes, is.
_states: dict[int, State] = {}


def _address(session: Any) -> int:
    address: int = session.__chandle__()
    return address


def remember(session: Any, workers: list[Worker]) -> None:
    """Note a session that was just made, and its worker processes."""
    _states[_address(session)] = State(workers)


def forget(workers: list[Worker]) -> None:
    """Forget the session whose worker processes these were."""
    for address in [a for a, state in _states.items() if state.workers is workers]:
        del _states[address]


def kept_state(session: Any) -> State:
    """Return what is known of a session, which is kept from now on."""
    return _states.setdefault(_address(session), State([]))


def state_of(session: Any) -> State:
    """Return what is known of a session, be it nothing."""
    return _states.get(_address(session)) or State([])


def usable(session: Any) -> State:
    """Return what is known of a session; raise if it cannot be used."""
    refuse_own_worker(session)
    state = state_of(session)
    state.check()
    return state


def disown() -> None:
    """Keep a process that was forked away from the sessions of its parent.

    A destructor would wait for threads that are not here.
    """
    keep = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIObjectIncRef
    for address, state in _states.items():
        if state.workers:
            keep(ctypes.c_void_p(address))
