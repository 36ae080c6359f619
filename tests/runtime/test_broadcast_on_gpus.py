# SPDX-License-Identifier: Apache-2.0
"""A large broadcast between GPUs goes in slices, which all take from each other, on the double."""

from __future__ import annotations

import pytest

from tests import cuda_double
from tvm_ipc.gpu import discovery

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
)

BROADCASTS = """
import numpy as np
import tvm_ipc
tvm_ipc.runtime_only()  # starts in half the time

settings = {"device_ids": [r % devices for r in range(3)], "arena_limit": 64 << 20}
with tvm_ipc.Session(3, device="cuda", timeout=60, **settings) as session:
    broadcast = session.get_global_func("tvm_ipc.broadcast")
    x, y = (session.empty((count,), "int32") for _ in range(2))
    for root, target in ((0, y), (2, y), (1, x)):  # the last one in place
        for rank in range(3):
            x.debug_copy_from(rank, np.arange(count, dtype="int32") * 7 + 1000003 * rank)
        session.call_packed(broadcast, x, root, 0, 0, target)
        wanted = np.arange(count, dtype="int32") * 7 + 1000003 * root
        for rank in range(3):
            np.testing.assert_array_equal(session.get(target, rank), wanted)
print("right")
"""
#: From here on, for three ranks: 8 MB over the links of the root.
LARGE = (4 << 20) // 4


def launches(count: int, devices: int) -> int:
    given = f"count, devices = {count}, {devices}"
    out, report = cuda_double.run(given + BROADCASTS, devices=devices, memory=1 << 30)
    assert out == "right\n"
    assert report.violations == []
    return report.calls["cuLaunchKernel"]


def test_slices_have_a_kernel_more() -> None:
    if not discovery.find().architectures:
        pytest.skip("this library was built without its CUDA kernels")
    whole = launches(LARGE - 5, 3)
    assert launches(LARGE + 5, 3) - whole == 3 * 3, "a second kernel, of each rank and broadcast"
    assert launches(LARGE + 5, 1) == whole, "ranks on one GPU have no links"
