# SPDX-License-Identifier: Apache-2.0
"""The bytes in shared memory that tell who has the same one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import proof
from tvm_ipc.nodes.proof import FOLDER, Proof, digest


def test_who_reads_the_bytes_has_the_same_memory(tmp_path: Path) -> None:
    with Proof() as one, Proof() as other:
        assert digest(one.path) == one.digest != other.digest
        assert one.path.parent == FOLDER and one.path.stat().st_mode & 0o777 == 0o600
        (tmp_path / one.path.name).write_bytes(b"the same name in another memory")
        assert digest(tmp_path / one.path.name) != one.digest
    assert digest(one.path) is None


def test_files_of_processes_that_were_killed_go() -> None:
    orphan = FOLDER / "tvm_ipc-proof-of-a-test"
    with Proof() as one:
        orphan.write_bytes(b"nobody has locked this")
        with Proof():
            assert not orphan.exists() and digest(one.path) == one.digest


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "FOLDER", tmp_path / "none")
    with pytest.raises(IPCError, match=r"no file can be made in .*none: .*No such file"):
        Proof().__enter__()


@pytest.mark.parametrize("step", ["link", "write"])
def test_a_file_that_cannot_be_made_leaves_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(step)

    def opened() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    before = opened()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(IPCError, match=f"no file can be made in {FOLDER}: {step}"):
            Proof().__enter__()
    assert opened() == before
