# SPDX-License-Identifier: Apache-2.0
"""Temporary folders under a umask that takes all access, and among very many others."""

from __future__ import annotations

import fcntl
import itertools
import tempfile
import time
import types
from pathlib import Path

import pytest

from tests.child_python import run
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import scratch_dir
from tvm_ipc.runtime.scratch_dir import ScratchDir, remove_orphans

#: Runs without the right to open what its mode forbids, which root has.
UMASK = """
import ctypes, os, sys
if "again" not in sys.argv:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
import tempfile
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.scratch_dir import ScratchDir
tempfile.gettempdir()
os.umask(0o777)
try:
    ScratchDir().path()
except IPCError as error:
    print(error)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_umask_without_access_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UMASK)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run(program, environment={"TMPDIR": str(temporary)})
    assert "cannot be locked: Permission denied; the umask must leave its owner" in done.stdout
    assert list(temporary.iterdir()) == []


def test_a_file_system_without_locks_is_an_error(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(IPCError, match="No locks available"):
        ScratchDir().path()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_others_always_remove_is_an_error(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scratch_dir._lock

    def lock(path: str) -> int:
        Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(scratch_dir, "_lock", lock)
    with pytest.raises(IPCError, match="No such file"):
        ScratchDir().path()
    assert list(temporary.iterdir()) == []


def until_none_is_left(temporary: Path) -> int:
    """Remove orphans; return how many calls it took."""
    calls = 0
    while any(temporary.iterdir()):
        began = time.monotonic()
        remove_orphans()
        assert time.monotonic() - began < 5.0
        calls += 1
    return calls


@pytest.fixture
def slow_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a millisecond pass between two looks at the time."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks) / 1000)
    monkeypatch.setattr(scratch_dir, "time", clock)


def test_very_many_folders_are_removed_by_many_calls(temporary: Path, slow_system: None) -> None:
    """No start of a session waits for all of them."""
    for number in range(800):
        (temporary / f"tvm_ipc_session-{number}").mkdir()
    assert until_none_is_left(temporary) > 2


def test_a_large_folder_is_removed_by_many_calls(temporary: Path, slow_system: None) -> None:
    inner = temporary / "tvm_ipc_session-large" / "inner"
    inner.mkdir(parents=True)
    (inner / "link").symlink_to("/")
    for number in range(800):
        (inner / f"{number}").touch()
    assert until_none_is_left(temporary) > 1


def test_other_entries_do_not_hold_up_the_search(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders in use, and folders that cannot be opened, are tried and skipped."""
    owned = [ScratchDir() for _ in range(50)]
    for one in owned:
        one.path()
    (temporary / "tvm_ipc_session-orphan").mkdir()
    for _ in range(1000):
        remove_orphans()
        if not (temporary / "tvm_ipc_session-orphan").exists():
            break
    assert len(list(temporary.iterdir())) == len(owned)
    for one in owned:
        one.remove()
