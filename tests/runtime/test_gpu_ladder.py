# SPDX-License-Identifier: Apache-2.0
"""Workers on GPUs that find no memory that all of them can map, on the double of CUDA."""

from __future__ import annotations

import pytest

from tests import cuda_double

#: No device reaches another one, and a process fails to pin memory of the host the second time: the
#: first time it is the control block, the second time the memory of a rank.
NOTHING = {"devices": 2, "memory": 1 << 30, "peers": "none", "fail": "cuMemHostRegister:2=1"}
BEGINNING = """
import logging, sys
import numpy as np
import tvm_ipc
tvm_ipc.runtime_only()  # starts in half the time
import tvm
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")

def try_it(session):
    x, out = session.empty((3,), "float32"), session.empty((3,), "float32")
    session.copy_to_worker_0(tvm.runtime.tensor(np.arange(3, dtype="float32")), x)
    session.broadcast_from_worker0(x, out)
    session.allreduce(out, x)
    session.sync_worker_0()
    print([x.debug_get_from_remote(rank).numpy().tolist() for rank in range(2)])
"""
OURS = """
with tvm_ipc.Session(2, device="cuda", threads={threads}, timeout=60) as session:
    try_it(session)
    session.init_ccl("nccl", 0, 1)
    try:
        session.init_ccl("cuda", 0, 1)
    except ValueError as error:
        print(error)
"""
OF_DISCO = """
session = tvm.runtime.disco.ProcessSession(2)
tvm_ipc.init_ccl(session, device="cuda")
try_it(session)
session.shutdown()
"""
ONE_BACKEND = """
try:
    tvm_ipc.Session(2, device="cuda", backend="cuda", timeout=60)
except tvm_ipc.errors.IPCError as error:
    print(error)
"""


@pytest.mark.parametrize("threads", [False, True])
def test_the_last_rung_is_nccl(threads: bool) -> None:
    out, report = cuda_double.run(BEGINNING + OURS.format(threads=threads), **NOTHING)
    lines = out.splitlines()
    assert "goes on with the backend nccl: there is no memory that all ranks" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:4]] == ["vmm", "legacy", "host"]
    assert lines[-2] == str([[0.0, 2.0, 4.0]] * 2)
    assert "this session was opened with the backend 'nccl'" in lines[-1]
    assert report.violations == []


def test_the_last_rung_is_nccl_in_a_session_of_disco() -> None:
    out, _ = cuda_double.run(BEGINNING + OF_DISCO, **NOTHING)
    assert "goes on with the backend nccl" in out
    assert out.splitlines()[-1] == str([[0.0, 2.0, 4.0]] * 2)


def test_a_backend_that_was_asked_for_is_not_exchanged() -> None:
    out, _ = cuda_double.run(BEGINNING + ONE_BACKEND, **NOTHING)
    assert "there is no memory that all ranks of the session can map" in out
    assert "cuMemHostRegister: CUDA_ERROR_INVALID_VALUE" in out
    assert "goes on" not in out
