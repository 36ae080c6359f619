# SPDX-License-Identifier: Apache-2.0
"""What sessions give back: values nobody comes for, and folders of programs that were killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tvm_ffi import register_global_func

import tvm_ipc
from tests.runtime.disco_kinds import call
from tvm_ipc.errors import SessionClosedError, WorkerError
from tvm_ipc.runtime.scratch_dir import ScratchDir, remove_orphans


def memory() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_value_that_came_while_another_rank_failed() -> None:
    """From a process: the bytes, which wait in the hub."""
    with tvm_ipc.Session(2) as session:
        session.import_python_module("tests.runtime.worker_functions")
        x = session.put(np.ones(1 << 20, "int8"))
        session.sync()

        def fetch_in_vain() -> None:
            call(session, "tests.fail_on", 0, "ValueError", "in the way")
            with pytest.raises(WorkerError):
                session.get(x, 1)

        fetch_in_vain()
        before = memory()
        for _ in range(100):
            fetch_in_vain()
        gc.collect()
        assert memory() - before < 50 << 20


def test_value_of_a_thread_that_came_while_another_rank_failed() -> None:
    with tvm_ipc.Session(2, threads=True) as session:
        session.import_python_module("tests.runtime.worker_functions")
        value = session.get_global_func("tests.tracked")()
        for _ in range(3):
            call(session, "tests.fail_on", 0, "ValueError", "in the way")
            with pytest.raises(WorkerError):
                value.debug_get_from_remote(1)
        del value
        gc.collect()
        alive = session.get_global_func("tests.tracked_alive")()
        assert [alive.debug_get_from_remote(rank) for rank in range(2)] == [0, 0]


def test_array_for_a_command_that_was_skipped() -> None:
    with tvm_ipc.Session(2, threads=True) as session:
        session.import_python_module("tests.runtime.worker_functions")
        target = session.empty((1 << 20,), "int8")
        session.sync()

        def copy_in_vain() -> None:
            call(session, "tests.fail_on", 0, "ValueError", "in the way")
            target.debug_copy_from(0, np.ones(1 << 20, "int8"))
            with pytest.raises(WorkerError):
                session.sync()

        copy_in_vain()
        before = memory()
        for _ in range(100):
            copy_in_vain()
        gc.collect()
        assert memory() - before < 50 << 20


# ---- folders --------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.undo()
    tempfile.tempdir = None


OWNER = """
import os, signal, sys
from tvm_ipc.runtime.scratch_dir import ScratchDir
folder = ScratchDir()
(folder.path() / "file").write_text("text")
print(folder.path(), flush=True)
sys.stdin.read()
"""


def owner() -> tuple[subprocess.Popen[str], Path]:
    """A process that owns a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_folder_of_a_killed_program_is_removed_by_the_next(
    signum: signal.Signals, temporary: Path
) -> None:
    process, folder = owner()
    with process:
        with tvm_ipc.Session(1):
            assert (folder / "file").exists(), "its owner lives"
        process.send_signal(signum)
    assert folder.exists()
    with tvm_ipc.Session(1):
        assert not folder.exists()


def test_folders_of_others_are_left_alone(temporary: Path) -> None:
    own = ScratchDir()
    own.path()
    kept = [temporary / "tvm_ipc-other", temporary / "something"]
    for path in kept:
        path.mkdir()
    (temporary / "tvm_ipc_session-link").symlink_to(kept[0])
    (temporary / "tvm_ipc_session-file").write_text("text")
    remove_orphans()
    assert own.path().is_dir()
    assert all(path.is_dir() for path in kept)
    own.remove()
    assert sorted(p.name for p in temporary.iterdir()) == [
        "something",
        "tvm_ipc-other",
        "tvm_ipc_session-file",
        "tvm_ipc_session-link",
    ]


def test_folder_that_is_removed_while_it_is_made_is_made_again(temporary: Path) -> None:
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            remove_orphans()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(200):
            folder = ScratchDir()
            (folder.path() / "file").write_text("text")
            assert (folder.path() / "file").read_text() == "text"
            folder.remove()
    finally:
        stop.set()
        thread.join()
    remove_orphans()
    assert list(temporary.iterdir()) == []


def test_folder_is_made_when_it_is_needed_and_removed_at_the_end(temporary: Path) -> None:
    with tvm_ipc.Session(1) as session:
        assert list(temporary.iterdir()) == []
        session._shutdown.scratch_dir.path()
        assert len(list(temporary.iterdir())) == 1
    assert list(temporary.iterdir()) == []


# ---- exceptions without text ----------------------------------------------------------------


@register_global_func("tests.speechless", override=True)
def speechless() -> object:
    """A function that the FFI makes of a Python one without our help."""

    def fail() -> None:
        raise ValueError("\udc80")

    return fail


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("rank", range(2))
def test_exception_that_the_ffi_loses_is_an_error_all_the_same(rank: int) -> None:
    with tvm_ipc.Session(2, threads=True) as session:
        function = session.get_global_func("tests.speechless")()
        session.sync()
        session.import_python_module("tests.runtime.worker_functions")
        # An unrelated error before it, which must not come home for it.
        call(session, "tests.fail_on", rank, "ValueError", "unrelated")
        with pytest.raises(WorkerError, match="unrelated"):
            session.sync()
        session.call_packed(function)
        with pytest.raises(WorkerError, match="a Python exception without a printable text"):
            session.sync()
        session.sync()


@pytest.mark.parametrize("threads", [False, True])
def test_a_closed_session_that_nobody_holds_is_gone_at_once(threads: bool) -> None:
    """And so are its descriptors, which many sessions would have until Python looks for cycles."""
    gc.collect()
    before = len([*Path("/proc/self/fd").iterdir()])
    gc.disable()
    try:
        for _ in range(2):
            with tvm_ipc.Session(2, threads=threads) as session:
                x = session.put(np.ones(3, "int8"))
                assert session.get(x, 1).tolist() == [1, 1, 1]
            gone = weakref.ref(session)
            with pytest.raises(SessionClosedError, match="closed"):
                session.put(np.ones(3, "int8"))
            del session, x
            assert gone() is None
        assert len([*Path("/proc/self/fd").iterdir()]) == before
    finally:
        gc.enable()
