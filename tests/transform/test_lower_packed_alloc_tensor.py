# SPDX-License-Identifier: Apache-2.0
"""LowerPackedAllocTensor: tensors at offsets that compiled kernels accept."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.transform.memory_programs import compiled
from tests.transform.script_forms import alloc_in, alloc_storage
from tvm_ipc.transform import LowerPackedAllocTensor


def lower(module: tvm.IRModule) -> tvm.IRModule:
    return LowerPackedAllocTensor()(module)


@I.ir_module
class Doubled:
    """(x + x) + (x + x), the first sum n * 64 bytes into the storage."""

    @T.prim_func(s_tir=True)
    def double(x: T.handle, y: T.handle):
        n = T.int64()
        a = T.match_buffer(x, (n, 4), "float32")
        b = T.match_buffer(y, (n, 4), "float32")
        for i, j in T.grid(n, 4):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vi, vj] + a[vi, vj]

    @R.function(pure=False)
    def main(x: R.Tensor(("n", 4), "float32")):
        n = T.int64()
        storage = alloc_storage(n * 128)
        a = alloc_in(storage, n * 64, n, 4)
        Doubled.double(x, a)
        b = alloc_in(storage, 0, n, 4)
        Doubled.double(a, b)
        return b


def test_offsets_become_calls_and_zero_stays():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), shape: R.Shape(["n"])):
            n = T.int64()
            storage = alloc_storage(n * 128)
            if c:
                x = alloc_in(storage, n * 64, n, dtype="float16")
                y = x
            else:
                z = alloc_in(storage, 0, n, dtype="float16")
                y = z
            return y

        @R.function(pure=False, private=True)
        def other(storage: R.Any):
            x = alloc_in(storage, 64, 2, 3, dtype="int8")
            return x

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), shape: R.Shape(["n"])):
            n = T.int64()
            storage = alloc_storage(n * 128)
            if c:
                x = R.call_packed(
                    "tvm_ipc.alloc_tensor",
                    storage,
                    R.prim_value(n * 64),
                    R.shape([n]),
                    R.dtype("float16"),
                    ty_args=(R.Tensor((n,), "float16"),),
                )
                y = x
            else:
                z = alloc_in(storage, 0, n, dtype="float16")
                y = z
            return y

        @R.function(pure=False, private=True)
        def other(storage: R.Any):
            x = R.call_packed(
                "tvm_ipc.alloc_tensor",
                storage,
                R.prim_value(64),
                R.shape([2, 3]),
                R.dtype("int8"),
                ty_args=(R.Tensor((2, 3), "int8"),),
            )
            return x

    lowered = lower(Before)
    tvm.ir.assert_structural_equal(lowered, Expected)
    relax.analysis.well_formed(lowered)


def test_a_second_run_changes_nothing():
    once = lower(Doubled)
    assert "tvm_ipc.alloc_tensor" in once.script()
    assert lower(once).same_as(once)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_runs_with_symbolic_offsets(rows):
    machine = relax.VirtualMachine(compiled(Doubled), tvm.cpu())
    x = np.random.default_rng(0).random((rows, 4), "float32")
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), 4 * x)
