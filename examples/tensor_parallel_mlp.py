# SPDX-License-Identifier: Apache-2.0
"""A model for one device is cut for four workers: a plan for its weights is all that is needed."""

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm

WORKERS = 4


@I.ir_module
class MLP:
    @R.function
    def main(
        x: R.Tensor((64, 256), "float32"),
        up: R.Tensor((256, 1024), "float32"),
        down: R.Tensor((1024, 256), "float32"),
    ):
        R.func_attr({"num_input": 1})  # the parameters after the first are weights
        with R.dataflow():
            h = R.nn.gelu(R.matmul(x, up))
            y = R.matmul(h, down)
            R.output(y)
        return y


# As Megatron does it: columns of the first weight, rows of the second, and one sum after them.
plan = {"up": comm.Shard(1), "down": comm.Shard(0)}
parallel = tvm_ipc.parallelize(MLP, plan, WORKERS)
print(parallel)
assert parallel.collectives == {"allreduce": 1}

pipeline = tvm_ipc.get_pipeline("llvm", world_size=WORKERS)
program = tvm.compile(parallel.module, target="llvm", relax_pipeline=pipeline)

random = np.random.default_rng(0)
x, up, down = (
    random.normal(size=shape).astype("float32") / 16
    for shape in ((64, 256), (256, 1024), (1024, 256))
)
with tvm_ipc.Session(num_workers=WORKERS) as session:
    # Each worker gets its part of each weight, and only that.
    weights = tvm_ipc.load_weights(session, {"up": up, "down": down}, parallel.shards)
    main = session.load_vm_module(program)["main"]
    y = session.get(main(session.broadcast(x), *weights.values()), rank=3)

one = tvm.relax.VirtualMachine(tvm.compile(MLP, target="llvm"), tvm.cpu())
expected = one["main"](*(tvm.runtime.tensor(value) for value in (x, up, down))).numpy()
print(f"largest difference from one worker: {np.abs(y - expected).max():.1e}")
assert np.allclose(y, expected, rtol=1e-4, atol=1e-5)
