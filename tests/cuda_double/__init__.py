# SPDX-License-Identifier: Apache-2.0
"""A double of the CUDA driver and of its runtime library: pretend GPUs on a machine without one.

`Double().environment(devices=4)` are the variables under which a process finds them; see README.md.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNELS = "tvm_ipc/csrc/cuda/kernels"
#: Of the files that the libraries are built from.
SUFFIXES = {".cc", ".h", ".txt", ".map"}


def _cache() -> Path:
    """A folder of this user alone, which outlives the tests."""
    folder = Path(tempfile.gettempdir(), f"tvm_ipc_cuda_double-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    return folder


@functools.cache
def build() -> Path:
    """The folder with libcuda.so.1, libcudart.so.13 and libnccl.so.2, built if sources are new."""
    digest = hashlib.sha256(os.environ.get("CXX", "").encode())
    root = HERE.parents[1]
    kernels = [*(root / "tests/native").glob("cuda_*"), *(root / KERNELS).glob("*")]
    double = (path for path in HERE.rglob("*") if path.suffix in SUFFIXES)
    for source in sorted(path for path in (*double, *kernels) if path.is_file()):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    folder = _cache() / digest.hexdigest()[:16]
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for command in (
                ["cmake", "-S", str(HERE), "-B", str(folder), "-G", "Ninja"],
                ["cmake", "--build", str(folder)],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise RuntimeError(f"{command}\n{done.stdout}\n{done.stderr}")
            (folder / "complete").touch()
    return folder


@dataclass
class Report:
    """What the processes of a run said when they ended."""

    leaks: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    processes: int = 0


def skip_without_kernels() -> None:
    """Skip a test that needs the CUDA kernels of the library."""
    # Not at the top: this module also builds the double for tests of the native library alone.
    import pytest

    import tvm_ipc
    from tvm_ipc.gpu import discovery

    assert tvm_ipc.Session  # which loads the library
    if not discovery.find().architectures:
        pytest.skip("this library was built without its CUDA kernels")


def read_report(path: str | Path) -> Report:
    """Sums over all processes that wrote to the file `TVM_IPC_DOUBLE_REPORT`."""
    report = Report()
    if not Path(path).exists():
        return report
    for line in Path(path).read_text().splitlines():
        one: dict[str, Any] = json.loads(line)
        report.processes += 1
        report.violations += one["violations"]
        for sums, part in ((report.leaks, one["leaks"]), (report.calls, one["calls"])):
            for name, count in part.items():
                sums[name] = sums.get(name, 0) + count
    return report


def environment(**settings: object) -> dict[str, str]:
    """All variables of a process that is to find the double.

    Each setting is TVM_IPC_DOUBLE_ and its name in capitals: `devices=4, fail="cuMemCreate:1=2"`.
    """
    variables = dict(os.environ)
    for name in [name for name in variables if name.startswith("TVM_IPC_DOUBLE_")]:
        del variables[name]
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    for name, folder in (
        ("LD_LIBRARY_PATH", build()),
        ("PYTHONPATH", build()),  # for the double of what a wheel brings
        ("PYTHONPATH", HERE / "autoload"),
    ):
        rest = [part for part in variables.get(name, "").split(os.pathsep) if part]
        variables[name] = os.pathsep.join([str(folder), *rest])
    variables["TVM_IPC_DOUBLE_KERNELS"] = str(build() / "libkernels.so")
    variables["TVM_IPC_DOUBLE_CACHE"] = str(_cache() / "kernels")
    for name, value in settings.items():
        variables[f"TVM_IPC_DOUBLE_{name.upper()}"] = str(value)
    return variables


def run(code: str, timeout: float = 120, **settings: object) -> tuple[str, Report]:
    """What code prints in a fresh interpreter with the double, and the report of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        program = Path(folder, "program.py")  # TVMScript looks at its source
        program.write_text(code)
        done = subprocess.run(
            [sys.executable, str(program)],
            env=environment(report=report, **settings),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout, read_report(report)
