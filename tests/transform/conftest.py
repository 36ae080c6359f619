# SPDX-License-Identifier: Apache-2.0
"""Kernels for compilers of the tests, compiled once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi

from tests.transform.codegen_programs import HEAD, SCALED, Compile


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile C++ to an object file that the program is linked with, or to a loaded library."""

    def run(source: str, names: list[str], *, library: bool = False) -> tvm.runtime.Module:
        folder = tmp_path_factory.mktemp("cpp")
        (folder / "kernels.cc").write_text(HEAD + source)
        target = str(folder / ("kernels.so" if library else "kernels.o"))
        command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared" if library else "-c"]
        command += [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
        command += [str(folder / "kernels.cc"), "-o", target]
        subprocess.run(command, check=True, capture_output=True)
        if library:
            return tvm.runtime.load_module(target)
        return tvm.runtime.load_static_library(target, names)

    return run


@pytest.fixture(scope="session")
def scaled(compile_cpp: Compile) -> tvm.runtime.Module:
    return compile_cpp(SCALED.format(name="scaled"), ["scaled"])


@pytest.fixture(scope="session")
def values() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 4)), rng.standard_normal(4)
    return x.astype("float32"), w.astype("float32")


@pytest.fixture
def register(request: pytest.FixtureRequest) -> Callable[..., None]:
    def put(name: str, function: Callable[..., None]) -> None:
        tvm_ffi.register_global_func(name, function, override=True)
        request.addfinalizer(lambda: tvm_ffi.registry.remove_global_func(name))

    return put
