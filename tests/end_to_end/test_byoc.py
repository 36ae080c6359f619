# SPDX-License-Identifier: Apache-2.0
"""The guide to one's own compiler: its programs run, and its compiler is right at every batch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc.transform import RunModuleCodegen

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "bring_your_own_compiler.md"
#: Not in order, so that no result can be what the call before left.
BATCHES = [3, 0, 1, 64, 2, 17, 5, 0, 33, 7, 128, 4, 31, 6, 100, 8, 15, 1, 9, 65]


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The compiler of the guide."""
    path = tmp_path_factory.mktemp("guide") / "guide_compiler.py"
    path.write_text(blocks()[0])
    spec = importlib.util.spec_from_file_location("guide_compiler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@I.ir_module
class Model:
    """Two chains, one with two results, between kernels of TVM."""

    @R.function
    def main(
        x: R.Tensor(("n", 16), "float32"),
        s: R.Tensor(("n", 16), "float32"),
        w: R.Tensor((16, 16), "float32"),
    ):
        n = T.int64()
        with R.dataflow():
            a: R.Tensor((n, 16), "float32") = R.matmul(x, w)
            b = R.tanh(R.add(a, s))
            c = R.multiply(b, s)
            d: R.Tensor((n, 16), "float32") = R.matmul(c, w)
            e = R.nn.relu(R.add(R.multiply(d, d), b))
            R.output(b, e)
        return (b, e)


def expected(x: np.ndarray, s: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    b = np.tanh(x @ w + s)
    d = (b * s) @ w
    return b, np.maximum(d * d + b, 0)


@pytest.fixture(scope="module")
def library(guide: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given: list[str] = []

    def compile_fn(functions, options):
        given.extend(variable.name_hint for variable in functions.get_global_vars())
        return guide.compile_cpp(functions, options)

    module = RunModuleCodegen("cpp", compile_fn, {"flags": ["-O2"]})(guide.partition()(Model))
    assert len(given) == 2
    path = tmp_path_factory.mktemp("library") / "model.so"
    tvm.compile(module, "llvm").export_library(str(path))
    return path


def data(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = ((rows, 16), (rows, 16), (16, 16))
    return tuple(rng.standard_normal(shape).astype("float32") for shape in shapes)  # type: ignore[return-value]


def test_the_compiler_has_60_lines() -> None:
    assert sum(bool(line.strip()) for line in blocks()[0].splitlines()) <= 60


@pytest.mark.slow
def test_every_program_of_the_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("".join(blocks()))
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "R.call_dps_packed" in result.stdout
    assert "nonsense" in result.stdout.split("exit status")[1], "what the system's compiler said"


def test_20_batch_sizes_in_the_virtual_machine(library: Path) -> None:
    assert len(BATCHES) == 20
    vm = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    for rows in BATCHES:
        inputs = data(rows)
        results = vm["main"](*map(tvm.runtime.tensor, inputs))
        for result, right in zip(results, expected(*inputs), strict=True):
            np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_20_batch_sizes_in_workers(library: Path, threads: bool) -> None:
    with tvm_ipc.Session(2, threads=threads) as session:
        main = session.load_vm_module(str(library))["main"]
        first = session.get_global_func("vm.builtin.tuple_getitem")
        for rows in BATCHES:
            inputs = data(rows)
            results = main(*map(session.put, inputs))
            for index, right in enumerate(expected(*inputs)):
                result = first(results, index)
                for rank in range(2):
                    np.testing.assert_allclose(
                        session.get(result, rank), right, rtol=1e-4, atol=1e-5
                    )


@pytest.mark.slow
def test_a_model_with_collectives_goes_through_our_pipeline(guide: ModuleType) -> None:
    @I.ir_module
    class Parallel:
        @R.function
        def main(x: R.Tensor(("n", 16), "float32"), w: R.Tensor((16, 16), "float32")):
            n = T.int64()
            with R.dataflow():
                a: R.Tensor((n, 16), "float32") = R.matmul(x, w)
                b = R.exp(R.tanh(a))
                c: R.Tensor((n, 16), "float32") = R.ccl.allreduce(b, "sum")
                d = R.nn.relu(R.multiply(c, c))
                R.output(d)
            return d

    for lower in (True, False):
        codegen = RunModuleCodegen("cpp", guide.compile_cpp, {"flags": []}, lower=lower)
        module = codegen(guide.partition()(Parallel))
        pipeline = tvm_ipc.get_pipeline("llvm", world_size=2)
        executable = relax.build(module, "llvm", relax_pipeline=pipeline)
        x, _, w = data(5)
        with tvm_ipc.Session(2) as session:
            main = session.load_vm_module(executable)["main"]
            result = session.get(main(session.put(x), session.put(w)), rank=1)
        total = 2 * np.exp(np.tanh(x @ w))
        np.testing.assert_allclose(result, total * total, rtol=1e-4)
