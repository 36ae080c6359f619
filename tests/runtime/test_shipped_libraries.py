# SPDX-License-Identifier: Apache-2.0
"""Which file of a node is taken for a library of the controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvm_ipc.runtime import send_library_to_nodes


def test_a_node_takes_no_library_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be replaced between the look at its digest and its load."""
    library = tmp_path / "model.so"
    library.write_bytes(b"code")
    digest = send_library_to_nodes.digest_of(library)
    monkeypatch.setenv("TVM_IPC_FOLDER_OF_NODE", str(tmp_path))
    assert send_library_to_nodes._find_library(str(library), digest) == library
    if os.geteuid() == 0:
        os.chown(library, 12345, -1)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert send_library_to_nodes._find_library(str(library), digest) is None
    monkeypatch.delenv("TVM_IPC_FOLDER_OF_NODE")
    assert send_library_to_nodes._find_library(str(library), digest) == library, (
        "on one machine the user names it"
    )
