# SPDX-License-Identifier: Apache-2.0
"""TVM's own CUDA runtime, and what TVM compiles for CUDA, on the double."""

from __future__ import annotations

import pytest

from tests import cuda_double

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
)

PROGRAM = """
import numpy as np
import tvm
from tvm import relax
from tvm.s_tir import dlight
from tvm.script import ir as I, relax as R

target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
device = tvm.cuda(0)
gpu = lambda array: tvm.runtime.tensor(array, device)

@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((16, 48), "DTYPE"), w: R.Tensor((48, 64), "DTYPE")):
        with R.dataflow():
            product = R.matmul(x, w)
            softmax = R.nn.softmax(product)
            total = R.sum(R.exp(softmax), axis=[1], keepdims=True)
            largest = R.max(product, axis=[0])
            result = R.add(R.multiply(softmax, total), largest)
            R.output(result)
        return result

def reference(x, w):
    product = x.astype("float64") @ w.astype("float64")
    softmax = np.exp(product - product.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    return softmax * np.exp(softmax).sum(1, keepdims=True) + product.max(0)

def compiled(graphs=False):
    with target, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": graphs}):
        module = relax.transform.LegalizeOps()(Model)
        module = relax.transform.AnnotateTIROpPattern()(module)
        module = relax.transform.FuseOps()(module)
        module = relax.transform.FuseTIR()(module)
        module = dlight.ApplyDefaultSchedule(
            dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(),
            dlight.gpu.GeneralReduction(), dlight.gpu.Fallback(),
        )(module)
        return tvm.compile(module, target=target)
"""


def test_devices() -> None:
    out, _ = cuda_double.run(
        """
import tvm
print([tvm.cuda(i).exist for i in range(4)], tvm.cuda(0).compute_version, tvm.cuda(2).device_name)
print(tvm.cuda(0).warp_size, tvm.cuda(0).max_threads_per_block, tvm.cuda(0).multi_processor_count)
""",
        devices=3,
        multiprocessors=5,
    )
    assert out.splitlines() == ["[True, True, True, False] 9.0 Pretend GPU 2", "32 1024 5"]


def test_tensors_go_to_and_fro() -> None:
    _, report = cuda_double.run(
        """
import numpy as np, tvm
for dtype in ("float32", "int64", "float16", "bool"):
    for shape in ((), (1,), (0, 3), (7, 1001)):
        array = np.asarray(np.random.rand(*shape) * 9, dtype)
        there = tvm.runtime.tensor(array, tvm.cuda(0))
        other = tvm.runtime.empty(shape, dtype, tvm.cuda(1))
        there.copyto(other)
        tvm.cuda(0).sync()  # a copy from device to device, which `numpy` does not wait for
        tvm.cuda(1).sync()
        np.testing.assert_array_equal(other.numpy(), array)
del there, other
"""
    )
    assert not report.violations
    assert "allocation" not in report.leaks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shuffle", [0, 1])
def test_a_relax_module_agrees_with_numpy(dtype: str, shuffle: int) -> None:
    _, report = cuda_double.run(
        PROGRAM.replace("DTYPE", dtype)
        + f"""
vm = relax.VirtualMachine(compiled(), device)
rng = np.random.default_rng(0)
for _ in range(3):
    x, w = rng.random((16, 48)).astype("{dtype}"), rng.random((48, 64)).astype("{dtype}")
    result = vm["main"](gpu(x), gpu(w)).numpy()
    np.testing.assert_allclose(result, reference(x, w), rtol=2e-5)
""",
        shuffle=shuffle,
        delay=f"{shuffle}:200" if shuffle else "0:0",
    )
    assert report.calls["cuLaunchKernelEx"] >= 9
    assert not report.violations


def test_a_module_is_exported_and_loaded_elsewhere(tmp_path) -> None:
    library = str(tmp_path / "model.so")
    cuda_double.run(PROGRAM.replace("DTYPE", "float32") + f"compiled().export_library({library!r})")
    cuda_double.run(
        f"""
import numpy as np, tvm
from tvm import relax
vm = relax.VirtualMachine(tvm.runtime.load_module({library!r}), tvm.cuda(1))
x = tvm.runtime.tensor(np.ones((16, 48), "float32"), tvm.cuda(1))
w = tvm.runtime.tensor(np.ones((48, 64), "float32"), tvm.cuda(1))
result = vm["main"](x, w).numpy()
np.testing.assert_allclose(result, np.exp(1 / 64) + 48, rtol=1e-6)
"""
    )


def test_graphs_replay_what_was_captured() -> None:
    _, report = cuda_double.run(
        PROGRAM.replace("DTYPE", "float32")
        + """
vm = relax.VirtualMachine(compiled(graphs=True), device)
rng = np.random.default_rng(0)
x, w = gpu(np.zeros((16, 48), "float32")), gpu(np.zeros((48, 64), "float32"))
for _ in range(4):
    new = rng.random((16, 48)).astype("float32"), rng.random((48, 64)).astype("float32")
    x.copyfrom(new[0])
    w.copyfrom(new[1])
    result = vm["main"](x, w).numpy()
    np.testing.assert_allclose(result, reference(*new), rtol=2e-5)
"""
    )
    assert report.calls["cuGraphLaunch"] == 3  # the first call runs the kernels, then captures
    assert report.calls["cuStreamBeginCapture"] == 1
    assert not report.violations
