# SPDX-License-Identifier: Apache-2.0
"""What may happen while weights are loaded: a death, Ctrl-C, a file that is larger than memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.weights import weight_files
from tvm_ipc.errors import WorkerDiedError, WorkerError

ARRAYS = {f"layers.{k}.w": np.arange(k, k + 60, dtype="float32").reshape(12, 5) for k in range(40)}
CUTS = weight_files.cuts_of(ARRAYS, 2)


def later(what: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(0.3, what)
    timer.start()
    return timer


def right(session: Any, path: Path) -> None:
    weight_files.compare(session, tvm_ipc.load_weights(session, path, CUTS), CUTS, ARRAYS)


@pytest.mark.parametrize("kind", ["file", "mapping"])
def test_a_worker_is_killed_while_it_loads(kind: str, tmp_path: Path) -> None:
    path = weight_files.write(tmp_path / "model.safetensors", ARRAYS)
    source = path if kind == "file" else ARRAYS
    with tvm_ipc.Session(2, timeout=60) as session:
        os.kill(session.pids[1], signal.SIGSTOP)  # so that it does load when it dies
        timer = later(lambda: os.kill(session.pids[1], signal.SIGKILL))
        start = time.monotonic()
        with pytest.raises(WorkerDiedError) as raised:
            tvm_ipc.load_weights(session, source, CUTS)
        assert raised.value.ranks == (1,)
        assert time.monotonic() - start < 20
        timer.join()


def test_ctrl_c_while_weights_are_loaded(tmp_path: Path) -> None:
    path = weight_files.write(tmp_path / "model.safetensors", ARRAYS)
    with tvm_ipc.Session(2, timeout=60) as session:
        right(session, path)
        for _ in range(2):
            os.kill(session.pids[1], signal.SIGSTOP)
            timer = later(lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                with pytest.raises(KeyboardInterrupt):
                    tvm_ipc.load_weights(session, path, CUTS)
            finally:
                timer.join()
                os.kill(session.pids[1], signal.SIGCONT)
            right(session, path)


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """Its names are as they should be, and there is nothing in it: it takes no room on the disk."""
    size = 1 << 43
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(weight_files.with_header(json.dumps({"w": entry}).encode()))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("the file system has no files of 8 TB")
    cuts = weight_files.cuts_of({"w": np.empty((0,), "float32")}, 2)
    cuts["w"] = type(cuts["w"])(**{**vars(cuts["w"]), "shape": (size // 4,)})
    good = weight_files.write(tmp_path / "good.safetensors", ARRAYS)
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        with pytest.raises(
            WorkerError, match=rf"MemoryError: load_weights: 'w': {size // 2} bytes"
        ):
            tvm_ipc.load_weights(session, path, cuts)
        right(session, good)
