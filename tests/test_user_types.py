# SPDX-License-Identifier: Apache-2.0
"""What a type checker says of a user's program: nothing of a right one, and each wrong line.

Disco's own classes carry no usable types; what a session has from them is typed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_ipc

pytest.importorskip("mypy", reason="mypy is among the requirements of development only")

PROGRAM = """
import numpy as np
import tvm
import tvm_ipc
from tvm_ipc.errors import WorkerError

with tvm_ipc.Session(2, num_groups=1, timeout=60, arena_limit="512M") as session:
    x = session.put(np.ones(4))
    y = session.scatter([[1.0], [2.0]])
    z = session.empty((4,), np.float32)
    session.allreduce(x, z, "sum")
    result: np.ndarray = session.get(session.allreduce(x, op="max"))
    session.allgather(x, z, in_group=False)
    session.broadcast_from_worker0(x, z)
    other: np.ndarray = session.get(z, rank=1)
    function = session.get_global_func("runtime.disco.worker_rank")
    main = session.load_vm_module("model.so")["main"]
    total: float = session.get(main(x, 3, np.ones(2))).sum()
    pids: tuple[int, ...] = session.pids
    try:
        session.sync()
    except WorkerError as error:
        kinds: list[str] = [one.kind for one in error.errors]
pipeline = tvm_ipc.get_pipeline("llvm", 2, blas=None, dump="folder")
mod = tvm_ipc.spmd.LowerPlacements(streams=None)(tvm.IRModule())
mod = tvm.transform.Sequential([tvm_ipc.transform.LowerExternCalls()])(mod)

with tvm_ipc.Session("2") as wrong:  # wrong
    wrong.allreduce(np.ones(4), x)  # wrong
    wrong.allreduce(x, z, 3)  # wrong
    wrong.broadcast_from_worker0(x)  # wrong
    wrong.empty(4, "float32")  # wrong
    wrong.get(x, rank="1")  # wrong
    wrong.get(np.ones(4))  # wrong
    nothing: int = wrong.get(x)  # wrong
    wrong.import_python_module(3)  # wrong
    wrong.get_global_func(None)  # wrong
tvm_ipc.Session(2, timeout="x")  # wrong
tvm_ipc.get_pipeline("llvm", "2")  # wrong
tvm_ipc.transform.LowerExternCalls(place_argument=True)  # wrong
tvm_ipc.spmd.LowerPlacements()()  # wrong
tvm_ipc.get_pipeline("llvm", 2, dump=3)  # wrong
tvm_ipc.Sesion(2)  # wrong
"""


def test_type_checker_tells_right_from_wrong(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    package = Path(tvm_ipc.__file__).parents[1]
    installed = package.name in ("site-packages", "dist-packages")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent"),
            *("--cache-dir", str(tmp_path / "cache"), program.name),
        ],
        cwd=tmp_path,
        env={**os.environ, **({} if installed else {"MYPYPATH": str(package)})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = {int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.M)}
    lines = enumerate(PROGRAM.splitlines(), 1)
    assert found == {number for number, line in lines if line.endswith("# wrong")}, done.stdout
