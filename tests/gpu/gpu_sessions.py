# SPDX-License-Identifier: Apache-2.0
"""What tests of GPUs share: the devices, sessions on them, and compiled programs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
from tests.gpu import gpu_programs
from tvm_ipc.gpu import discovery
from tvm_ipc.packed_functions import BACKENDS

HERE = Path(__file__).resolve().parent
#: The folder of `sessions_on_gpus.py`, whose scenarios run here too.
HELPERS = HERE.parent / "runtime"
#: Where `cuda_runtime` is.
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
#: Set by a kit: where its compiled programs are.
COMPILED = "TVM_IPC_TEST_PROGRAMS"
#: In the names of devices of the double of the driver, which runs no machine code.
DOUBLE = "Pretend"
# Up to eight threads that share a GPU capture graphs here; read when CUDA is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def why_no_gpu() -> str:
    """Why nothing can be tested on a GPU here; empty if it can."""
    if "cuda" not in BACKENDS:
        return "this version of tvm_ipc has no backend for GPUs"
    found = discovery.find()
    if not found.devices:
        return f"wants an NVIDIA GPU: {found.reason or 'the driver finds none'}"
    if not any(one.kernels for one in found.devices):
        return f"no kernels for {found.devices[0].name}: {found.devices[0].reason}"
    return ""


def on_devices(workers: int) -> list[int]:
    """The device of each worker: all that there are, in turn."""
    found = [one.id for one in discovery.find().devices if one.kernels]
    return [found[i % len(found)] for i in range(workers)]


def open_session(workers: int, **options: Any) -> tvm_ipc.Session:
    """A session on as many GPUs as there are, with the functions that tests call in workers."""
    options = {"device": "cuda", "threads": True, "timeout": 60, "arena_limit": "64M", **options}
    if options["device"] == "cuda":
        options.setdefault("device_ids", on_devices(workers))
    with pytest.MonkeyPatch.context() as patch:
        # Threads capture collectives here, and nobody allocates memory while graphs are replayed.
        patch.setenv("TVM_IPC_CUDA_GRAPHS_OF_THREADS", "1")
        session = tvm_ipc.Session(workers, **options)
    session.import_python_module("tests.runtime.collective_worker")
    session.import_python_module("tests.gpu.gpu_worker")
    here = workers if options["threads"] else 1
    session.get_global_func("tests.gpu.share_process")(str(time.monotonic_ns()), here)
    return session


def of_kit_or_new(target: str, made: Path) -> Path:
    """The folder with programs for a target."""
    if folder := os.environ.get(COMPILED):
        return Path(folder)
    if tvm.base._RUNTIME_ONLY:
        pytest.skip(f"wants TVM's compiler, or a kit's programs ({COMPILED})")
    subprocess.run(
        [sys.executable, str(HERE / "compile_gpu_programs.py"), str(made), target], check=True
    )
    return made


def target_of(device: discovery.Gpu) -> str:
    """The target of the kit whose machine code runs on a device."""
    if DOUBLE in device.name and COMPILED in os.environ:
        pytest.skip("the double of the driver cannot run what was compiled for a GPU")
    major, _, minor = device.capability.partition(".")
    known = [int(name[3:]) for name in gpu_programs.TARGETS if name.startswith("sm_")]
    fitting = [n for n in known if n // 10 == int(major) and n % 10 <= int(minor)]
    if not fitting:
        pytest.skip(f"programs are compiled for {known}, not for capability {device.capability}")
    return f"sm_{max(fitting)}"
