# SPDX-License-Identifier: Apache-2.0
"""What test_async_on_gpus.py does with works on GPUs, each scenario in a process of its own.

python async_on_gpus.py SCENARIO WORKERS processes|threads
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np
import pytest

import tvm_ipc
from tests.runtime.places import BACKEND
from tests.runtime.sessions_on_gpus import open_session
from tvm_ipc.errors import DeadlineError, WorkerError


def beside(session: tvm_ipc.Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session.get_global_func("tests.works.beside")(folder)
        session.sync()


def in_order(session: tvm_ipc.Session) -> None:
    for seed in range(3):
        session.get_global_func("tests.works.in_order")(seed, 3)
        session.sync()


def kept(session: tvm_ipc.Session) -> None:
    session.get_global_func("tests.works.kept")(6)
    session.sync()


def captured(session: tvm_ipc.Session) -> None:
    for waits in (False, True):
        session.get_global_func("tests.works.captured")(waits)
        refused = (
            f"{'wait' if waits else 'start'}: a CUDA graph is being captured, and requests are "
        )
        with pytest.raises(WorkerError, match=refused):
            session.sync()
    in_order(session)


def deadline(session: tvm_ipc.Session) -> None:
    """One that a rank does not post ends at its deadline, and the session goes on."""
    x, y = session.put(np.arange(9.0)), session.empty((9,), "float64")
    post = session.get_global_func("tests.call_unless")
    post(1, "tvm_ipc.start", "tvm_ipc.allreduce", x, 0, 0, 3, 0, y)
    with pytest.raises((WorkerError, DeadlineError), match=r"waited 3 s for rank 1"):
        session.sync()
    in_order(session)


SCENARIOS = {one.__name__: one for one in (beside, in_order, kept, captured, deadline)}


def main() -> None:
    name, workers, kind = sys.argv[1:]
    timeout = 3 if name == "deadline" else 60
    settings = {"timeout": timeout, "backend": BACKEND}
    with open_session(int(workers), kind == "threads", **settings) as session:
        session.import_python_module("tests.runtime.gpu_async")
        SCENARIOS[name](session)
    print("done")


if __name__ == "__main__":
    main()
