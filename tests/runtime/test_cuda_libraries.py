# SPDX-License-Identifier: Apache-2.0
"""Which processes load what of CUDA, on pretend GPUs."""

from __future__ import annotations

import json

from tests import cuda_double

LOADED = """
from pathlib import Path

import numpy as np
import tvm
import tvm_ipc
from tvm_ffi import register_global_func


@register_global_func("tests.loaded", override=True)
def loaded():
    maps = Path("/proc/self/maps").read_text()
    names = ("libcuda.so", "libcudart.so", "libtvm_runtime_cuda.so")
    return ",".join(name for name in names if name in maps)
"""
IN_WORKER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import loaded
import tvm, tvm_ipc
with tvm_ipc.Session(2) as session:
    session.import_python_module("loaded")
    function = session.get_global_func("tests.loaded")
    before = function().debug_get_from_remote(1)
    x = session.empty((3,), "float32", device="cuda:1")
    session.sync()
    print(json.dumps([before, function().debug_get_from_remote(1), loaded.loaded()]))
"""


def test_workers_on_cpus_load_nothing_until_a_tensor_is_to_be_on_a_gpu(tmp_path) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    out, report = cuda_double.run(IN_WORKER.format(folder=str(tmp_path)))
    before, after, here = json.loads(out)
    everything = "libcuda.so,libcudart.so,libtvm_runtime_cuda.so"
    assert (before, after, here) == ("", everything, everything)
    assert report.violations == []


SHARED = """
import tvm, tvm_ipc
find = tvm.get_global_func("DeviceAllocator.")
before = [bool(find(tvm.cuda(i), 2)) for i in range(2)]
with tvm_ipc.Session(2, device="cuda", device_ids=[0, 0], threads=True, timeout=20):
    print(before, [bool(find(tvm.cuda(i), 2)) for i in range(2)])
"""


def test_threads_that_share_a_gpu_keep_its_memory_by_stream() -> None:
    """TVM's own pool would give what one of them still uses to the other one."""
    out, report = cuda_double.run(SHARED)
    assert out == "[False, False] [True, False]\n"
    assert report.violations == []
