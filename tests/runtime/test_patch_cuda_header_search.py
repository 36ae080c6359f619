# SPDX-License-Identifier: Apache-2.0
"""Without a CUDA toolkit TVM finds the headers of wheels, and says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm.support import nvcc

from tvm_ipc.gpu import patch_cuda_header_search


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_cuda_path() -> str:
        raise RuntimeError("Cannot find CUDA path")

    monkeypatch.setattr(nvcc, "find_cuda_path", find_cuda_path)
    monkeypatch.setattr(nvcc, "_find_cuda_target_include", lambda _: None)
    patch_cuda_header_search.patch()


def wheels(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as the wheels of the extra `cuda` make."""
    include = root / "nvidia" / "cu13" / "include"
    (include / "cccl").mkdir(parents=True)
    (include / "cuda_runtime.h").touch()
    monkeypatch.setattr("sys.path", [str(root)])
    monkeypatch.delitem(__import__("sys").modules, "nvidia", raising=False)
    return include


@pytest.mark.usefixtures("no_toolkit")
def test_headers_of_wheels_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = wheels(tmp_path, monkeypatch)
    assert nvcc.find_cuda_path() == str(include.parent)
    # Where TVM looks for `cccl`, beside what else it finds.
    assert nvcc._find_cuda_target_include(str(include.parent)) == str(include)


@pytest.mark.usefixtures("no_toolkit")
def test_without_headers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_cuda_header_search, "_wheels", lambda: None)
    with pytest.raises(RuntimeError, match=r"Cannot find CUDA path: .* '\.\[cuda\]' in a checkout"):
        nvcc.find_cuda_path()


def no_which() -> str:
    raise FileNotFoundError(2, "No such file or directory", "which")


def test_without_the_program_which_nvcc_is_looked_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "find_cuda_path", no_which)
    monkeypatch.setattr(nvcc, "_find_cuda_target_include", lambda path: f"{path}/include")
    patch_cuda_header_search.patch()
    monkeypatch.setattr(patch_cuda_header_search, "_wheels", lambda: None)
    monkeypatch.setattr(patch_cuda_header_search.shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        RuntimeError, match=r"Cannot find CUDA path: .* '\.\[cuda\]' in a checkout"
    ) as raised:
        nvcc.find_cuda_path()
    assert raised.value.__suppress_context__
    monkeypatch.undo()
    compiler = tmp_path / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert patch_cuda_header_search._on_path() == str(tmp_path / "toolkit")


def test_a_toolkit_without_headers_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = wheels(tmp_path, monkeypatch)
    monkeypatch.setattr(nvcc, "find_cuda_path", lambda: "/usr/local/nothing")
    patch_cuda_header_search.patch()
    assert nvcc.find_cuda_path() == str(include.parent)


def test_a_toolkit_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(tmp_path, monkeypatch)
    monkeypatch.setattr(nvcc, "find_cuda_path", lambda: "/toolkit")
    monkeypatch.setattr(nvcc, "_find_cuda_target_include", lambda path: f"{path}/targets/include")
    patch_cuda_header_search.patch()
    mended = nvcc.find_cuda_path
    patch_cuda_header_search.patch()
    assert nvcc.find_cuda_path is mended
    assert nvcc.find_cuda_path() == "/toolkit"
    assert nvcc._find_cuda_target_include("/toolkit") == "/toolkit/targets/include"
