# SPDX-License-Identifier: Apache-2.0
"""How ranks on GPUs come to memory that all of them map, on the double of CUDA: all of them by the
same way, which is tried with data before it is taken, and what is written in it is what was read.
"""

from __future__ import annotations

import pytest

from tests import cuda_double
from tvm_ipc.gpu import discovery

pytestmark = [
    pytest.mark.skipif(
        "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
    ),
]

SUMS = """
import numpy as np
import tvm_ipc
tvm_ipc.runtime_only()  # starts in half the time
from tvm_ipc.packed_functions import AllReduceStrategy

with tvm_ipc.Session(3, device="cuda", backend="cuda", timeout=60) as session:
    allreduce = session.get_global_func("tvm_ipc.allreduce")
    out = session.empty((5000,), "float32")
    for round in range(rounds):
        for strategy in AllReduceStrategy:
            x = session.put(np.arange(5000, dtype="float32") + round)
            session.call_packed(allreduce, x, 0, 0, int(strategy), 0, out)
            del x  # its memory is somebody else's from now on
            for rank in range(3):
                wanted = 3 * (np.arange(5000, dtype="float32") + round)
                np.testing.assert_array_equal(session.get(out, rank), wanted)
print("right")
"""

#: Calls of the driver by which another rank's memory is mapped.
FILE, LEGACY = "cuMemImportFromShareableHandle", "cuIpcOpenMemHandle"


def run(rounds: int = 1, **settings: object) -> cuda_double.Report:
    if not discovery.find().architectures:
        pytest.skip("this library was built without its CUDA kernels")
    out, report = cuda_double.run(f"rounds = {rounds}" + SUMS, devices=3, **settings)
    assert out == "right\n"
    assert report.violations == []
    return report


def test_files_are_the_first_way_and_nothing_is_given_to_legacy_handles() -> None:
    calls = run().calls
    assert calls[FILE] == 6  # of two peers, for three ranks
    assert LEGACY not in calls


def test_without_virtual_memory_handles_of_allocations_are_the_way() -> None:
    calls = run(attributes="102=0,103=0").calls
    assert calls[LEGACY] == 6
    assert FILE not in calls


@pytest.mark.parametrize("peers", ["none", "0-1"])
def test_one_pair_that_cannot_reach_each_other_is_enough_for_all(peers: str) -> None:
    """Those that could map each other's memory do not stay with it."""
    calls = run(peers=peers).calls
    # The memory of the host, which each maps of all three, and the control block.
    assert calls["cuMemHostRegister"] == 12


def test_a_way_that_the_driver_promises_and_refuses_is_left_by_all() -> None:
    calls = run(fail=f"{FILE}:1=801").calls
    assert calls[LEGACY] == 6
    calls = run(fail=f"{FILE}:1=801,{LEGACY}:1=801").calls
    assert calls["cuMemHostRegister"] == 12


WAY = """
import tvm_ipc
tvm_ipc.runtime_only()

with tvm_ipc.Session(2, device="cuda", threads=True, timeout=60) as session:
    print(session)
"""


@pytest.mark.parametrize(
    ("way", "settings"),
    [("vmm", {}), ("legacy", {"attributes": "102=0,103=0"}), ("host", {"peers": "none"})],
)
def test_a_session_says_how_memory_is_mapped(way: str, settings: dict[str, str]) -> None:
    if not discovery.find().architectures:
        pytest.skip("this library was built without its CUDA kernels")
    said = cuda_double.run(WAY, **settings)[0]
    assert said == f"<tvm_ipc.Session: 2 threads on cuda 0, 1, memory by {way}, open>\n"


def test_inputs_whose_memory_is_used_again_at_once() -> None:
    """With operations that begin late: who is slow still reads what it was given."""
    run(rounds=3, delay="7:300")


def test_no_code_of_the_host_touches_memory_of_a_device() -> None:
    run(guard=1)
