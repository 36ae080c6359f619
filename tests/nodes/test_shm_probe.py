# SPDX-License-Identifier: Apache-2.0
"""The bytes in shared memory that tell who has the same one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import shm_probe
from tvm_ipc.nodes.shm_probe import FOLDER, ShmProbe, digest
from tvm_ipc.runtime.scratch_dir import PREFIX, remove_orphans


def test_who_reads_the_bytes_has_the_same_memory(tmp_path: Path) -> None:
    with ShmProbe() as one, ShmProbe() as other:
        assert digest(one.path) == one.digest != other.digest
        assert one.path.parent.parent == FOLDER
        assert one.path.parent.stat().st_mode & 0o777 == 0o700  # other users cannot read the file
        (tmp_path / one.path.name).write_bytes(b"the same name in another memory")
        assert digest(tmp_path / one.path.name) != one.digest
    assert digest(one.path) is None


def test_files_of_processes_that_were_killed_go() -> None:
    orphan = FOLDER / f"{PREFIX}of-a-test"
    with ShmProbe() as one:
        orphan.mkdir()  # nobody has locked this
        (orphan / "proof").touch()
        with ShmProbe():
            assert not orphan.exists() and digest(one.path) == one.digest


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Fail instead of waiting indefinitely in an open."""

    def end(*_: object) -> None:
        pytest.fail("still waiting after 5 seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


#: What a stranger can put into a folder that everybody may write to.
_STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": _make_socket,
    "file": Path.touch,
    "link to a fifo": lambda path: (
        os.mkfifo(path.with_name("fifo")),
        path.symlink_to(path.with_name("fifo")),
    ),
    "link to a file": lambda path: (
        path.with_name("file").write_bytes(b"somebody's"),
        path.symlink_to(path.with_name("file")),
    ),
    "link to nowhere": lambda path: path.symlink_to(path.with_name("none")),
}


@pytest.mark.parametrize("kind", _STRANGE)
@pytest.mark.usefixtures("no_hang")
def test_what_is_no_folder_of_ours_is_neither_opened_nor_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_probe, "FOLDER", tmp_path)
    strange = tmp_path / f"{PREFIX}x"
    _STRANGE[kind](strange)
    before = strange.lstat()
    with ShmProbe() as one:
        assert digest(one.path) == one.digest
    assert (digest(strange) is None) == (kind != "file")
    assert os.path.samestat(strange.lstat(), before)
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_bytes() == b"somebody's"


def test_files_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_probe, "FOLDER", tmp_path)
    theirs = tmp_path / f"{PREFIX}x"
    theirs.mkdir()
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        remove_orphans(tmp_path)
        assert theirs.exists()
    with ShmProbe():
        assert not theirs.exists()


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_probe, "FOLDER", tmp_path / "none")
    with pytest.raises(IPCError, match=r"no file can be created in .*none: .*No such file"):
        ShmProbe().__enter__()


@pytest.mark.parametrize("step", ["mkdir", "write"])
def test_a_file_that_cannot_be_made_leaves_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(step)

    def opened() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    before = opened()
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "mkdir") if step == "mkdir" else (Path, "write_bytes")), fail)
        with pytest.raises(IPCError, match=f"no file can be created in {FOLDER}: {step}"):
            ShmProbe().__enter__()
    assert opened() == before
