# SPDX-License-Identifier: Apache-2.0
"""Calls of the driver that fail: a session on GPUs goes on by another way, or says what failed."""

from __future__ import annotations

import json

import pytest

from tests import cuda_double
from tvm_ipc.gpu import discovery

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
)

PROGRAM = """
import ctypes, gc, json
import numpy as np
import tvm_ipc
tvm_ipc.runtime_only()  # starts in half the time

def sums():
    options = {"threads": True, "timeout": 10, "arena_limit": 1 << 20}
    with tvm_ipc.Session(2, device="cuda", **options) as session:
        send, total = session.empty((1000,), "float32"), session.empty((1000,), "float32")
        for worker in range(2):
            send.debug_copy_from(worker, np.full(1000, worker + 1, "float32"))
        session.allreduce(send, total, "sum")
        session.sync()
        for worker in range(2):
            assert (total.debug_get_from_remote(worker).numpy() == 3).all()

driver = ctypes.CDLL("libcuda.so.1")
found = {}
for call in CALLS:
    driver.tvm_ipc_double_fail(f"{call}:NTH=999".encode())
    try:
        sums()
        found[call] = ""
    except Exception as error:
        found[call] = f"{type(error).__name__}: {error}"
    driver.tvm_ipc_double_fail(b"")
    gc.collect()  # the threads of a session end with it
sums()
print(json.dumps(found))
"""
#: Without these ranks share no virtual memory, but other memory.
ANOTHER_WAY = (
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
)
#: Without these nothing goes.
NEEDED = (
    "cuModuleLoadData",
    "cuStreamCreate",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuFuncGetAttribute",
)
#: What comes to an end goes on to it.
AT_THE_END = ("cuMemUnmap", "cuMemRelease", "cuStreamDestroy", "cuMemHostUnregister")


@pytest.mark.parametrize("nth", [1, 2])
def test_each_call_that_fails_once(nth: int) -> None:
    """Ranks are threads here, so one of them meets the failure, and the other hears of it."""
    if not discovery.find().architectures:
        pytest.skip("the library was built without kernels for GPUs")
    calls = (*ANOTHER_WAY, *NEEDED, *AT_THE_END)
    program = PROGRAM.replace("CALLS", repr(calls)).replace("NTH", str(nth))
    out, report = cuda_double.run(program, timeout=300, memory=4 << 30)
    found = json.loads(out.splitlines()[-1])
    assert list(found) == list(calls)
    for call in (*ANOTHER_WAY, *AT_THE_END):
        assert found[call] == "", call
    for call in NEEDED:
        if call == "cuMemHostRegister" and nth == 2:
            continue  # the ranks of a process share the one that there is
        assert call in found[call], f"{call}: {found[call]}"
        assert "CUDA_ERROR_UNKNOWN" in found[call]
    assert not report.violations
