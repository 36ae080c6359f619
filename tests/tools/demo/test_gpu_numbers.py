# SPDX-License-Identifier: Apache-2.0
"""The decoder for GPUs on the double of CUDA: the tokens and logits of NumPy."""

from __future__ import annotations

import pytest

import tvm_ipc
from tests import cuda_double
from tvm_ipc.gpu import discovery

pytestmark = pytest.mark.skipif(
    "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
)

PROGRAM = """
import numpy as np
import tvm
import tvm_ffi
from tests.tools.demo.reference import Reference
from tvm import relax

import tvm_ipc
from tvm_ipc.examples.tensor_parallel_decoder import decoder_model as model
from tvm_ipc.examples.tensor_parallel_decoder import random_weights as weights
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config

CONFIG = Config(layers=2, hidden=64, heads=8, kv_heads=4, inner=96, vocabulary=128, context=80)
target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
gpu = tvm.cuda(0)
with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": GRAPHS}):
    mod = tvm_ipc.get_pipeline(target, 1)(model.build(CONFIG, 1, device="cuda"))
    assert ("run_or_capture" in mod.script()) is GRAPHS
    vm = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=None), gpu)
given = [tvm.runtime.tensor(value, gpu) for _, value, _ in weights.make(CONFIG)]
nothing = [np.full(shape, np.nan, "float32") for shape in model.cache_shapes(CONFIG, 1)]
caches = [tvm.runtime.tensor(value, gpu) for value in nothing]
for prompt in ([3, 5, 17, 99, 4, 4, 28], [1], list(range(30, 100))):
    expected, logits = Reference(CONFIG).generate(prompt, 8)
    tokens = tvm.runtime.tensor(np.array(prompt, "int32"), gpu)
    said = [vm["prefill"](tokens, tvm_ffi.Shape([len(prompt)]), caches, given)]
    for total in range(len(prompt) + 1, len(prompt) + 8):
        said.append(vm["decode"](said[-1], tvm_ffi.Shape([total]), caches, given))
    assert [int(token.numpy()[0]) for token, _ in said] == expected
    np.testing.assert_allclose([row.numpy().ravel() for _, row in said], logits, atol=1e-5)
print("right")
"""


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_tokens_and_logits_are_those_of_numpy(graphs: bool) -> None:
    out, report = cuda_double.run(f"GRAPHS = {graphs}\n{PROGRAM}", shuffle=1)
    assert out.split() == ["right"]
    assert report.violations == []
    assert (report.calls.get("cudaGraphLaunch", 0) > 0) is graphs


STORY = """
from tvm_ipc.tools import demo

SIZES = "--layers 2 --hidden 96 --heads 8 --kv-heads 4 --inner 64 --vocabulary 256"
raise SystemExit(demo.main(
    f"--device cuda --workers 2 --prompt-length 20 --tokens 6 {SIZES} {MORE}".split()
))
"""


@pytest.mark.parametrize(
    ("more", "devices", "says"),
    [
        ("", 1, "1 GPU: Pretend GPU 0; 2 workers share it"),
        ("--sequence-parallel --overlap 2", 2, "8 of them overlapped with matmuls"),
        ("--threads", 2, "threads, 1/2 of the weights each"),
    ],
    ids=["a shared GPU", "sequence parallel", "threads"],
)
def test_workers_say_the_same(more: str, devices: int, says: str) -> None:
    assert tvm_ipc.Session  # which loads the library
    if not discovery.find().architectures:
        pytest.skip("this library was built without its CUDA kernels")
    out, report = cuda_double.run(f"MORE = {more!r}\n{STORY}", devices=devices)
    story = " ".join(out.split())
    assert "the same 6 tokens on 1 and 2 workers" in story
    assert says in story
    assert report.violations == []
