# SPDX-License-Identifier: Apache-2.0
"""The target for this machine uses nothing that the processor lacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc

HOST = "tvm.codegen.llvm.GetHostCPUFeatures"


@I.ir_module
class Exp:
    @R.function
    def main(x: R.Tensor((257,), "float32")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y


def features(target: tvm.target.Target) -> set[str]:
    return set(map(str, tvm_ffi.get_global_func("target.llvm_get_cpu_features")(target)))


@pytest.fixture
def pretend(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Change what the processor seems to have; a virtual machine hides features."""
    ask = tvm_ffi.get_global_func(HOST)

    def pretend(**features: bool) -> None:
        found = {**{str(name): bool(value) for name, value in ask().items()}, **features}
        tvm_ffi.register_global_func(HOST, lambda: found, override=True)
        request.addfinalizer(lambda: tvm_ffi.register_global_func(HOST, ask, override=True))

    return pretend


def test_programs_run_on_this_processor():
    target = tvm_ipc.cpu_target()
    host = tvm_ffi.get_global_func(HOST)()
    assert not features(target) & {str(name) for name, enabled in host.items() if not enabled}
    vm = relax.VirtualMachine(tvm.compile(Exp, target), tvm.cpu())
    x = np.linspace(-3, 3, 257, dtype="float32")
    np.testing.assert_allclose(vm["main"](tvm.runtime.tensor(x)).numpy(), np.exp(x), rtol=1e-5)


@pytest.mark.parametrize("hidden", [("avx2",), ("avx512f", "fma"), ("sse4.2", "avx", "avx2")])
def test_hidden_features_are_switched_off(pretend, hidden):
    usual = features(tvm_ipc.cpu_target())
    pretend(**dict.fromkeys(hidden, False))
    assert not features(tvm_ipc.cpu_target()) & set(hidden)
    assert features(tvm_ipc.cpu_target()) <= usual


def test_a_processor_that_has_everything_keeps_the_usual_target(pretend):
    named = tvm.target.Target.from_device("cpu")
    pretend(**dict.fromkeys(features(named), True))
    assert str(tvm_ipc.cpu_target()) == str(named)
