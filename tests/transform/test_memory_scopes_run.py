# SPDX-License-Identifier: Apache-2.0
"""Programs with memory scopes of every origin, in real workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.script_forms import F8


@pytest.fixture(scope="module")
def session() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(num_workers=2) as session:
        yield session


@I.ir_module
class Scoped:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("llvm", 0, "ipc_memory")]})

    @T.prim_func(private=True)
    def double(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32", scope="ipc_memory")):
        for i in range(8):
            b[i] = a[i] * T.float32(2)

    @T.prim_func(private=True)
    def add_one(a: T.Buffer((8,), "float32", scope="ipc_memory")):
        for i in range(8):
            a[i] = a[i] + T.float32(1)

    @R.function
    def out_of_a_primfunc(x: F8):
        cls = Scoped
        y = R.call_tir(cls.double, (x,), out_ty=F8)
        z = R.ccl.allreduce(y, "sum", False)
        return R.add(y, z)

    @R.function(pure=False)
    def in_place(x: F8):
        cls = Scoped
        y = R.add(x, x)
        z = R.call_tir_inplace(cls.add_one, (y,), inplace_indices=[0], out_ty=F8)
        return z

    @R.function
    def hinted(x: F8):
        y = R.hint_on_device(x, R.device(1, 0), "ipc_memory")
        z = R.add(y, y)
        return R.ccl.allreduce(z, "max", False)

    @R.function
    def on_a_vdevice(x: R.Tensor((8,), "float32", "llvm:0")):
        y: R.Tensor((8,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        z: R.Tensor((8,), "float32", "llvm:1") = R.add(y, y)
        return R.ccl.allreduce(z, "min", False)


@pytest.fixture(scope="module")
def functions(session):
    program = tvm.compile(
        Scoped, target="llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", world_size=2)
    )
    return session.load_vm_module(program)


def call(session, function) -> tuple[list[np.ndarray], list[np.ndarray]]:
    xs = [np.arange(8, dtype="float32") + 10 * rank for rank in range(2)]
    argument = session.empty((8,), "float32")
    for rank, x in enumerate(xs):
        argument.debug_copy_from(rank, x)
    result = function(argument)
    return xs, [session.get(result, rank=rank) for rank in range(2)]


def test_a_scope_flows_out_of_a_primfunc(session, functions):
    xs, results = call(session, functions["out_of_a_primfunc"])
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_array_equal(result, 2 * x + 2 * sum(xs))


def test_a_kernel_writes_a_copy_in_its_scope(session, functions):
    xs, results = call(session, functions["in_place"])
    for x, result in zip(xs, results, strict=True):
        np.testing.assert_array_equal(result, 2 * x + 1)


def test_a_hint(session, functions):
    xs, results = call(session, functions["hinted"])
    for result in results:
        np.testing.assert_array_equal(result, 2 * np.max(xs, axis=0))


def test_a_scope_of_a_vdevice_is_no_device_of_its_own(session, functions):
    xs, results = call(session, functions["on_a_vdevice"])
    for result in results:
        np.testing.assert_array_equal(result, 2 * np.min(xs, axis=0))
