# SPDX-License-Identifier: Apache-2.0
"""A matrix product goes on while its rows arrive. The link is emulated: memory is no slow link."""

import statistics
import time

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm  # noqa: F401  # R.comm

ROWS, WIDTH, ROUNDS = 256, 512, 20


@I.ir_module
class Linear:
    @R.function
    def main(
        x: R.Tensor((ROWS, WIDTH), "float32"), w: R.Tensor((WIDTH, WIDTH), "float32")
    ) -> R.Tensor((2 * ROWS, WIDTH), "float32"):
        with R.dataflow():
            rows = R.comm.allgather(x, workers=2)  # those of the other worker come over the link
            y = R.nn.relu(R.matmul(rows, w))
            R.output(y)
        return y


random = np.random.default_rng(0)
x = random.normal(size=(2, ROWS, WIDTH)).astype("float32")
w = random.normal(size=(WIDTH, WIDTH)).astype("float32")
results = {}
with tvm_ipc.Session(num_workers=2) as session:
    session.emulate_link(latency=20e-6, bandwidth=0.5e9)  # 20 us, 0.5 GB/s
    mine, weight = session.scatter(x), session.put(w)
    for chunks in (None, 2):
        pipeline = tvm_ipc.get_pipeline("llvm", world_size=2, overlap=chunks)
        program = tvm.compile(Linear, target="llvm", relax_pipeline=pipeline)
        main = session.load_vm_module(program)["main"]
        times = []
        for _ in range(ROUNDS):
            session.sync()
            started = time.perf_counter()
            result = main(mine, weight)
            session.sync()
            times.append((time.perf_counter() - started) * 1e3)
        results[chunks] = session.get(result, rank=1)
        name = "one after the other" if chunks is None else f"overlapped, {chunks} chunks"
        print(f"{name:22} {statistics.median(times):6.2f} ms, median of {ROUNDS}")

assert np.allclose(results[None], results[2], rtol=1e-4, atol=1e-4)
print("the results agree")
