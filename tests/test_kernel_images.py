# SPDX-License-Identifier: Apache-2.0
"""The kernels in the library: what is compiled, when, how it is found, and builds without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[1] / "tvm_ipc" / "csrc" / "cuda"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs the extra `dev`"),
]
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(images LANGUAGES CXX)
include(cuda/images.cmake)
add_executable(show show.cc)
target_link_libraries(show PRIVATE tvm_ipc_images)
"""
SHOW = """
#include <cstdio>

#include "cuda/embedded_kernel_images.h"

int main() {
  using namespace tvm_ipc::cuda;
  for (size_t i = 0; i < kNumKernelImages; ++i) {
    const KernelImage& one = kKernelImages[i];
    std::printf("%s %d %d %.*s\\n", one.source, one.capability, int(one.ptx), int(one.size()),
                reinterpret_cast<const char*>(one.data));
  }
}
"""
#: In the place of what calls NVRTC: an image is the source and the target, and each call is noted.
COMPILE = """
import pathlib, sys

def find_nvrtc():
    return "nowhere"

if __name__ == "__main__":
    source, target, image = sys.argv[1:]
    pathlib.Path(image).write_text(pathlib.Path(source).read_text() + " for " + target)
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(pathlib.Path(source).stem + "." + target + "\\n")
"""


class Build:
    """A small project with kernels of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.kernels = root, root / "cuda" / "kernels"
        self.kernels.mkdir(parents=True)
        for name in ("images.cmake", "embedded_kernel_images.h"):
            shutil.copy(CUDA / name, root / "cuda")
        (root / "CMakeLists.txt").write_text(PROJECT)
        (root / "show.cc").write_text(SHOW)
        (self.kernels / "compile.py").write_text(COMPILE)
        for name in ("first", "second"):
            (self.kernels / f"{name}.cu").write_text(name)
        (self.kernels / "common.h").write_text("")

    def configure(self, *options: str, python: str = sys.executable) -> str:
        command = [
            "cmake",
            "-S",
            ".",
            "-B",
            "build",
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={python}",
        ]
        done = subprocess.run(
            [*command, "-DCMAKE_CXX_FLAGS=-I.", *options],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return "" if done.returncode == 0 else " ".join(done.stdout.split())

    def images(self) -> list[str]:
        """Build it, and return the table: source, capability, whether it is PTX, bytes."""
        subprocess.run(
            ["cmake", "--build", "build"], cwd=self.root, check=True, capture_output=True
        )
        show = subprocess.run([self.root / "build" / "show"], check=True, capture_output=True)
        return show.stdout.decode().splitlines()

    def calls(self) -> list[str]:
        """What has been compiled since this was asked last."""
        calls = self.kernels / "calls"
        found = sorted(calls.read_text().split()) if calls.exists() else []
        calls.unlink(missing_ok=True)
        return found


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


TWO = "-DTVM_IPC_CUDA_TARGETS=compute_90;sm_90"


def test_the_table_has_every_source_for_every_target(build: Build) -> None:
    assert build.configure("-DTVM_IPC_CUDA=ON", TWO) == ""
    wanted = [f"{name} 90 {ptx} {name} for {target}" for name in ("first", "second")
              for ptx, target in ((0, "sm_90"), (1, "compute_90"))]  # fmt: skip
    assert build.images() == wanted


def test_only_what_has_changed_is_compiled_again(build: Build) -> None:
    assert build.configure("-DTVM_IPC_CUDA=ON", "-DTVM_IPC_CUDA_TARGETS=sm_80") == ""
    build.images()
    assert build.calls() == ["first.sm_80", "second.sm_80"]
    build.images()
    assert build.calls() == []
    (build.kernels / "common.h").write_text("// changed")
    build.images()
    assert build.calls() == ["first.sm_80", "second.sm_80"]
    (build.kernels / "first.cu").write_text("new")
    (build.kernels / "third.cu").write_text("third")
    assert [line.split()[3] for line in build.images()] == ["new", "second", "third"]


def test_a_target_that_is_none(build: Build) -> None:
    said = build.configure("-DTVM_IPC_CUDA=ON", "-DTVM_IPC_CUDA_TARGETS=90")
    assert "TVM_IPC_CUDA_TARGETS: 90 is neither sm_NN nor compute_NN" in said


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python that sees no package at all."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_without_nvrtc_the_error_says_both_ways_out(build: Build, bare_python: str) -> None:
    for name in ("compile.py", "reduce.cu"):
        shutil.copy(CUDA / "kernels" / name, build.kernels)
    said = build.configure("-DTVM_IPC_CUDA=ON", python=bare_python)
    assert "pip install 'nvidia-cuda-nvrtc==13.0.*'" in said
    assert "set the environment variable TVM_IPC_CUDA=OFF for pip" in said


@pytest.mark.parametrize("option", [(), ("-DTVM_IPC_CUDA=OFF",)])
def test_a_build_without_kernels_wants_no_nvrtc(
    option: tuple[str, ...], build: Build, bare_python: str
) -> None:
    (build.kernels / "compile.py").unlink()
    assert build.configure(*option, python=bare_python) == ""
    assert build.images() == []


@pytest.mark.parametrize(
    ("switch", "wanted"),
    [(None, True), ("ON", True), ("OFF", False), ("off", False), ("0", False), ("", False)],
)
def test_what_a_build_downloads(switch: str | None, wanted: bool) -> None:
    pytest.importorskip("scikit_build_core", reason="needs the packages of the extra `dev`")
    variables = {name: value for name, value in os.environ.items() if name != "TVM_IPC_CUDA"}
    if switch is not None:
        variables["TVM_IPC_CUDA"] = switch
    found = {}
    for what in ("wheel", "editable", "sdist"):
        code = f"from scikit_build_core import build; print(*build.get_requires_for_build_{what}())"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=CUDA.parents[2], env=variables,
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found[what] = "nvidia-cuda-nvrtc==13.0.*" in done.stdout
    assert found == {"wheel": wanted, "editable": wanted, "sdist": False}
