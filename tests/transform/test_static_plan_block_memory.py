# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: one storage for many tensors, and the same results."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from memory_programs import planned, prepared, run, storages
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc.transform import StaticPlanBlockMemory

UPSTREAM = transform.StaticPlanBlockMemory()
OURS = StaticPlanBlockMemory()


def same_results(module: tvm.IRModule, *arguments: np.ndarray) -> None:
    """Run both plans; ours must give what TVM's gives, and need no more."""
    expected, given = (run(module, plan, *arguments) for plan in (UPSTREAM, OURS))
    np.testing.assert_array_equal(given, expected)
    assert planned(OURS(module)) <= planned(UPSTREAM(module))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, "float32")


def test_types_share_a_storage():
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((4, 64), "float32"), w: R.Tensor((64, 256), "float32")):
            with R.dataflow():
                wide = R.matmul(x, w)
                half = R.astype(wide, "float16")
                whole = R.astype(half, "float32")
                out = R.sum(whole)
                R.output(out)
            return out

    module = prepared(Model)
    # float32 4 KB, float16 2 KB, float32 4 KB; no more than two at once.
    assert storages(UPSTREAM(module)) == {"global": [4096, 2048, 4]}
    assert storages(OURS(module)) == {"global": [6144, 4]}
    same_results(module, random(4, 64), random(64, 256))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_symbolic_sizes_are_packed_in_their_unit(rows):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64, 256), "float32")):
            with R.dataflow():
                wide = R.matmul(x, w)
                half = R.astype(wide, "float16")
                whole = R.astype(half, "float32")
                again = R.nn.relu(whole)
                out = R.sum(again, axis=1)
                R.output(out)
            return out

    module = prepared(Model)
    assert storages(UPSTREAM(module)) == {"global": [1024, 512, 1024, 4]}
    assert storages(OURS(module)) == {"global": [2048, 4]}
    same_results(module, random(rows, 64), random(64, 256))
