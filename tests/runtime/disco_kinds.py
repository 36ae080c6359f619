# SPDX-License-Identifier: Apache-2.0
"""The kinds of sessions that TVM's own tests of Disco must hold for."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tvm_ipc
from tests.runtime import places  # noqa: F401  puts sessions on GPUs, if it is asked for
from tvm_ipc.errors import WorkerError

HERE = Path(__file__).resolve().parent
#: Made by the user and initialised by us, and made by us.
KINDS = ("disco_threads", "disco_processes", "ipc_threads", "ipc_processes")


class Opened:
    """A session with the backend started and the functions of `worker_functions` known."""

    def __init__(self, session: Any) -> None:
        self.session = session
        session.import_python_module("tests.runtime.worker_functions")
        session._sync_all()

    @property
    def usable(self) -> bool:
        return bool(getattr(self.session, "usable", True))

    def end(self) -> None:
        """End it; references to its values must be gone before."""
        session, self.session = self.session, None
        if isinstance(session, tvm_ipc.Session):
            session.close()
            return
        # A reference to a value that ends after the workers did would abort the process.
        getattr(session, "_cache", {}).clear()
        del session._import_python_module
        gc.collect()
        session._sync_all()
        session.shutdown()


def open_session(kind: str, num_workers: int, num_groups: int = 1) -> Opened:
    maker, _, place = kind.partition("_")
    if maker == "ipc":
        threads = place == "threads"
        return Opened(
            tvm_ipc.Session(num_workers, num_groups=num_groups, threads=threads, timeout=60)
        )
    from tvm.runtime import disco

    made = disco.ThreadedSession if place == "threads" else disco.ProcessSession
    with helpers_importable():
        session = made(num_workers, num_groups)
    tvm_ipc.init_ccl(session)
    return Opened(session)


@contextlib.contextmanager
def helpers_importable() -> Iterator[None]:
    """Processes that are started inside can import the modules beside this one."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def on_workers(reference: Any, ranks: Sequence[int] | int) -> list[Any]:
    """The value on each of these workers; an array where it is a tensor."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    values = [reference.debug_get_from_remote(rank) for rank in ranks]
    return [value.numpy() if hasattr(value, "numpy") else value for value in values]


#: Workers of the session that tests of errors share.
RANKS = 3


def call(session: Any, name: str, *args: Any) -> Any:
    return session.get_global_func(name)(*args)


def errors_at_sync(session: tvm_ipc.Session) -> list[tuple[int, str, str]]:
    """Rank, kind and message of what the next sync raises."""
    with pytest.raises(WorkerError) as error:
        session.sync()
    return [(one.rank, one.kind, one.message) for one in error.value.errors]


def refused(session: tvm_ipc.Session, kind: str, *texts: str) -> set[int]:
    """Return the ranks whose errors the next sync raises: all of a kind, and with these texts."""
    errors = errors_at_sync(session)
    for _, found, message in errors:
        assert found == kind, message
        assert all(text in message for text in texts), message
    return {rank for rank, _, _ in errors}
