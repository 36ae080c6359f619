# SPDX-License-Identifier: Apache-2.0
"""Nodes that do not have the files: worker 0 reads them, and sends each rank its part."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.weights import weight_files
from tests.models.weights.test_load_weights import FLOATS, OTHERS
from tests.models.weights.weight_files import compare
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.errors import IPCError, WorkerDiedError, WorkerError
from tvm_ipc.models.weights import stack, worker
from tvm_ipc.models.weights.files_unreadable_on_other_nodes import RemoteFiles
from tvm_ipc.models.weights.tensor_in_file import File, file_state
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.spmd import ShardSpec

WORKERS = 5


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """Ranks 0 to 2 on a node that has files, the others on one that has none."""
    try:
        find_mpi()
    except IPCError as error:
        pytest.skip(str(error))
    sent = worker._BROADCAST_BYTES
    with tvm_ipc.Session(WORKERS, hosts=2, timeout=60) as opened:
        opened.import_python_module("tests.models.weights.node_without_files")
        yield opened
    worker._BROADCAST_BYTES = sent


def test_parts_are_sent(session: Any, tmp_path: Path) -> None:
    of = {**FLOATS, **OTHERS}
    path = weight_files.write(tmp_path / "model.safetensors", of)
    cuts = weight_files.cuts_of(of, WORKERS)
    compare(session, tvm_ipc.load_weights(session, path, cuts), cuts, of)


def test_what_is_joined_and_converted_and_not_on_worker_0(session: Any, tmp_path: Path) -> None:
    parts = {f"experts.{k}": np.full((60, 10), k, "float32") for k in range(4)}
    path = weight_files.write(tmp_path / "model.safetensors", parts)
    of = {"experts": np.stack([*parts.values()]).astype("float16")}
    mesh = Mesh({"tp": 2}, [2, 4])
    cuts = {"experts": ShardSpec("experts", "experts", (4, 60, 10), "float16", mesh, (Shard(1),))}
    loaded = tvm_ipc.load_weights(session, path, cuts, names={"experts": stack([*parts])})
    for rank in (2, 4):  # the others have none, and are not looked at
        wanted = cuts["experts"].shard(of["experts"], rank)
        np.testing.assert_array_equal(session.get(loaded["experts"], rank), wanted, strict=True)


def test_a_node_has_the_same_file_and_no_other(session: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with path.open() as opened:
        file = File(str(path), file_state(opened.fileno()))
    said = [[file.path, [*file.state]], [f"{path}.no", [*file.state]], [file.path, [1, 2, 3]]]
    assert [worker._is_same_file(where, tuple(state)) for where, state in said] == [
        True,
        False,
        False,
    ]
    runs = (((0, 1),),)
    sends = RemoteFiles(session, [file]).sends([file], [runs], dict.fromkeys(range(WORKERS), runs))
    assert [one["ranks"] for one in sends] == [[3, 4]]


def test_a_number_that_does_not_fit(session: Any, tmp_path: Path) -> None:
    of = {"w": np.array([1.0] * 999 + [70000.0], "float32")}
    path = weight_files.write(tmp_path / "model.safetensors", of)
    cuts = weight_files.cuts_of(of, WORKERS, w="float16")
    with pytest.raises(WorkerError, match=r"'w': 70000.0 does not fit into float16"):
        tvm_ipc.load_weights(session, path, cuts)
    cuts = weight_files.cuts_of(of, WORKERS)
    compare(session, tvm_ipc.load_weights(session, path, cuts), cuts, of)


def test_the_worker_that_gets_it_dies(session: Any, tmp_path: Path) -> None:
    """It is the last test: the session has ended after it."""
    path = weight_files.write(tmp_path / "model.safetensors", FLOATS)
    os.kill(session.pids[4], signal.SIGSTOP)  # so that it does load when it dies
    timer = threading.Timer(0.3, os.kill, (session.pids[4], signal.SIGKILL))
    timer.start()
    with pytest.raises(WorkerDiedError, match="worker 4 of node 1") as raised:
        tvm_ipc.load_weights(session, path, weight_files.cuts_of(FLOATS, WORKERS))
    assert raised.value.ranks == (4,)
    timer.join()
