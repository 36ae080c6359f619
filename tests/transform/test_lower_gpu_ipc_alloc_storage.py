# SPDX-License-Identifier: Apache-2.0
"""LowerGPUIPCAllocStorage: exact bytes, everywhere, or an error."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.script_forms import alloc, alloc_in, alloc_storage
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import LowerGPUIPCAllocStorage


def lower(module: tvm.IRModule) -> tvm.IRModule:
    return LowerGPUIPCAllocStorage()(module)


def test_the_size_of_a_storage_is_in_bytes():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(shape: R.Shape(["m"])):
            m = T.int64()
            storage = alloc_storage(m * 2, "ipc_memory", dtype="float16")
            x = alloc_in(storage, 0, m, dtype="float16")
            return x

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(shape: R.Shape(["m"])):
            m = T.int64()
            storage: R.Any = R.call_packed(
                "runtime.disco.cuda_ipc.alloc_storage",
                R.shape([m * 2]),
                R.dtype("uint8"),
                ty_args=(R.Any,),
            )
            x = alloc_in(storage, 0, m, dtype="float16")
            return x

    tvm.ir.assert_structural_equal(lower(Before), Expected)


def test_a_tensor_gets_a_storage_of_its_shape_and_type():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(shape: R.Shape(["m", "n"])):
            m = T.int64()
            n = T.int64()
            x = alloc(m, n, dtype="float16", scope="ipc_memory")
            return x

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(shape: R.Shape(["m", "n"])):
            m = T.int64()
            n = T.int64()
            gv: R.Any = R.call_packed(
                "runtime.disco.cuda_ipc.alloc_storage",
                R.shape([m, n]),
                R.dtype("float16"),
                ty_args=(R.Any,),
            )
            x = alloc_in(gv, 0, m, n, dtype="float16")
            return x

    tvm.ir.assert_structural_equal(lower(Before), Expected)


def test_branches_and_several_functions():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool")):
            if c:
                x = alloc(4, scope="ipc_memory")
                y = x
            else:
                z = alloc(4, scope="ipc_memory")
                y = z
            return y

        @R.function(pure=False, private=True)
        def other():
            x = alloc(4, scope="ipc_memory")
            return x

    text = lower(Before).script()
    assert text.count("runtime.disco.cuda_ipc.alloc_storage") == 3
    assert "ipc_memory" not in text


def test_other_scopes_are_left_alone():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main():
            storage = alloc_storage(16, dtype="float32")
            x = alloc_in(storage, 0, 4)
            y = alloc(4)
            return (x, y)

    tvm.ir.assert_structural_equal(lower(Before), Before)


def test_refused_because_it_was_lowered_already():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main():
            storage: R.Any = R.vm.alloc_storage(
                R.shape([16]), R.prim_value(0), R.dtype("uint8"), R.str("ipc_memory")
            )
            return storage

    with pytest.raises(TransformError, match=r"function 'main'.*before LowerAllocTensor"):
        lower(Before)


@pytest.mark.parametrize(
    ("lowering", "factor"),
    [(LowerGPUIPCAllocStorage, 1), (relax.transform.LowerGPUIPCAllocStorage, 4)],
    ids=["ours", "upstream's"],
)
def test_bytes_that_a_program_takes_in_real_workers(lowering, factor, tmp_path):
    n = 65536

    @I.ir_module
    class Program:
        @R.function
        def main(x: R.Tensor((65536,), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                z = R.ccl.allreduce(y, "sum", False)
                R.output(z)
            return z

    passes = relax.transform
    target = tvm.target.Target("llvm")
    with target:
        module = tvm.transform.Sequential(
            [
                passes.LegalizeOps(),
                passes.ToNonDataflow(),
                passes.RemovePurityChecking(),
                passes.CallTIRRewrite(),
                passes.IPCAllReduceRewrite(int(tvm_ipc.packed_functions.AllReduceStrategy.ONESHOT)),
                passes.StaticPlanBlockMemory(),
                lowering(),
                passes.LowerAllocTensor(),
                passes.KillAfterLastUse(),
                passes.LowerRuntimeBuiltin(),
                passes.VMShapeLower(),
                passes.AttachGlobalSymbol(),
            ]
        )(Program)
    executable = relax.build(module, target, relax_pipeline=None)
    executable.export_library(str(tmp_path / "program.so"))
    with tvm_ipc.Session(2) as session:
        vm = session.load_vm_module(tmp_path / "program.so")
        result = vm["main"](session.put(np.arange(n, dtype="float32")))
        np.testing.assert_array_equal(session.get(result, 1), 4 * np.arange(n, dtype="float32"))
        stats = session.get_global_func("tvm_ipc.arena_stats")()
        for rank in range(2):
            peak = json.loads(stats.debug_get_from_remote(rank))["peak_in_use"]
            assert peak == factor * 4 * n
