# SPDX-License-Identifier: Apache-2.0
"""Our passes in a pipeline of your own: TVM's passes around them, and what they decided."""

import numpy as np
import tvm
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import Session
from tvm_ipc import transform as ours


@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((4, 32), "float32"), w: R.Tensor((32, 8), "float32")):
        with R.dataflow():
            part = R.matmul(x, w)
            total = R.ccl.allreduce(part, "sum")
            y = R.nn.relu(total)
            R.output(y)
        return y


before = [
    transform.LegalizeOps(),
    transform.RewriteDataflowReshape(),
    transform.ToNonDataflow(),
    transform.RemovePurityChecking(),
    transform.CallTIRRewrite(),
]
in_shared_memory = [  # the names and constructors are those of TVM's own passes
    ours.IPCAllReduceRewrite("auto"),
    ours.StaticPlanBlockMemory(packed=True),
    ours.VerifyCrossRankSafety(world_size=2),
    ours.LowerGPUIPCAllocStorage(),
    ours.EraseMemoryScopes(),
    ours.RequireWorkers(2),
]
after = [
    transform.LowerAllocTensor(),
    transform.KillAfterLastUse(),
    transform.LowerRuntimeBuiltin(),
    transform.ComputePrimValue(),
    transform.VMShapeLower(),
    transform.AttachGlobalSymbol(),
]
with ours.collect_report() as report:
    pipeline = tvm.transform.Sequential([*before, *in_shared_memory, *after])
    program = tvm.compile(Model, target="llvm", relax_pipeline=pipeline)
for one in report.decisions:
    print(f"{one.pass_name}: {one.subject}: {one.verdict}, since {one.reason}")

x, w = (np.random.rand(*shape).astype("float32") for shape in ((4, 32), (32, 8)))
with Session(num_workers=2) as session:
    y = session.get(session.load_vm_module(program)["main"](session.put(x), session.put(w)))
np.testing.assert_allclose(y, 2 * np.maximum(x @ w, 0), rtol=1e-5)
print("two workers: the sum of both products")
