# SPDX-License-Identifier: Apache-2.0
"""The steps after an all-reduce as kernels of TVM's, which `allreduce_cuda.py` compares with ours:
compiled where TVM's compiler is, or out of the folder of a kit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tvm_ipc.pip_install_commands import install_extra

COMPILE = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "compile_gpu_programs.py"
INSTEAD = (
    "let --programs be a folder of programs that were compiled elsewhere, without a GPU: "
    "`python tests/gpu/compile_gpu_programs.py FOLDER`"
)


class NoStepsError(Exception):
    """Why there are none, and what to do."""


def find(programs: Path, capability: str) -> Path:
    """Those of a folder for a GPU: compiled for its own generation."""
    major = capability.partition(".")[0]
    fitting = sorted(programs.glob(f"steps.sm_{major}[0-9].so"))
    if not fitting:
        there = ", ".join(sorted(path.name for path in programs.glob("steps.*.so"))) or "none"
        raise NoStepsError(f"{programs} has no steps for capability {capability}, but {there}")
    return fitting[-1].resolve()


def compiled(folder: Path, capability: str) -> Path:
    """Compile them here, in a process of its own."""
    target = f"sm_{capability.replace('.', '')}"
    command = [sys.executable, str(COMPILE), "--only-steps", str(folder), target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NoStepsError(
            f"TVM does not compile them here ({last}): {install_extra('cuda')}, with all of "
            f"apache-tvm; or {INSTEAD}"
        )
    return find(folder, capability)
