# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc doctor` finds out: what works here, what does not, and why."""

from __future__ import annotations

import json
import platform
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ipc
from tvm_ipc.contract import BACKENDS, backend_of_nodes
from tvm_ipc.doctor import gpus
from tvm_ipc.doctor.compiler import try_compiler
from tvm_ipc.doctor.machine import cgroup_limit, resource_limit
from tvm_ipc.doctor.reason import reason_of
from tvm_ipc.errors import IPCError
from tvm_ipc.machine import available_cores, cpu_model
from tvm_ipc.runtime import blas, config, library, repair


def examine(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Look at this process's TVM and at the machine, and run two workers once.

    `progress` hears what is being done, for those who wait.
    """
    progress("loading TVM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TVM and we would warn of is in the answer
        tvm_facts = _tvm()
    native = _native_info()
    progress("asking for GPUs")
    gpu_facts = gpus.examine(tvm_facts["problem"])
    progress("starting two workers")
    backends = _backends(tvm_facts["problem"], [gpu["id"] for gpu in gpu_facts["devices"]])
    progress("linking with the C++ compiler")
    compiler = try_compiler(tvm_facts["problem"])
    return {
        "version": tvm_ipc.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": [
            {
                "package": version.package,
                "installed": version.installed,
                "tested": version.tested,
                "matches": version.matches,
            }
            for version in library.versions()
        ],
        "tvm": tvm_facts,
        "backends": backends,
        "gpus": gpu_facts,
        "cxx": compiler,
        "blas": _blas(tvm_facts["problem"]),
        "cpu": {
            "model": cpu_model(),
            "cores": available_cores(),
            "instruction_sets": native.get("instruction_sets"),
            "instruction_set": native.get("instruction_set"),
        },
        "memory": {
            "physical": native.get("physical_memory"),
            "cgroup_limit": cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
            "address_space_limit": resource_limit(resource.RLIMIT_AS),
            "default_arena_limit": native.get("default_arena_limit"),
        },
        "system_calls": {"memfd": native.get("memfd"), "pidfd": native.get("pidfd")},
        "limits": {
            "open_files": resource_limit(resource.RLIMIT_NOFILE),
            "max_workers": native.get("max_workers"),
        },
        "threads": config.thread_settings(),
        "configuration": _configuration(),
    }


def _tvm() -> dict[str, Any]:
    """Load TVM and everything of ours; a failure becomes an answer."""
    facts: dict[str, Any] = {
        "mode": None,
        "settings": config.tvm_settings(),
        "found": [],
        "mended": [],
        "library": None,
        "cuda": None,
        "problem": None,
    }
    try:
        import tvm

        facts["mode"] = "runtime only" if tvm._RUNTIME_ONLY else "compiler and runtime"
        repaired = repair.repair()
        facts["found"], facts["mended"] = list(repaired.found), list(repaired.mended)
        facts["cuda"] = library.load_cuda()
        facts["library"] = str(library.load())
    except Exception as error:
        facts["problem"] = reason_of(error)
    return facts


def _native_info() -> dict[str, Any]:
    """Return what the native library says of this machine; nothing if it is not there."""
    try:
        import tvm_ffi

        info = tvm_ffi.get_global_func("tvm_ipc.native_info", allow_missing=True)
    except ImportError:
        return {}
    return dict(json.loads(info())) if info is not None else {}


def _backends(problem: str | None, devices: list[int]) -> dict[str, dict[str, Any]]:
    facts = {}
    for name, device in BACKENDS.items():
        if problem is None and device != "cpu" and not devices:
            works, reason = False, "there is no GPU to try it on"
        else:
            works, reason = _try(name, devices) if problem is None else (False, problem)
        facts[name] = {"available": works, "reason": reason}
    return facts


def _try(backend: str, gpu_ids: list[int]) -> tuple[bool, str]:
    """Start two workers and let them add; on GPUs, if they are what the backend is for."""
    import numpy as np

    device = BACKENDS[backend]
    ids, shared = None, ""
    if device != "cpu":
        ids = (gpu_ids * 2)[:2] or None
        shared = " on one GPU" if len(gpu_ids) == 1 else " on two GPUs"
    where: dict[str, Any] = {"device": device, "device_ids": ids, "backend": backend}
    if backend == backend_of_nodes():
        where["hosts"], shared = 2, " on two nodes of this machine"
    start = time.monotonic()
    try:
        with tvm_ipc.Session(2, **where) as session:
            ones = np.ones(8, "float32")
            source = session.put(ones)
            target = session.empty(ones.shape, "float32")
            session.allreduce(source, target)
            right = all(np.array_equal(session.get(target, rank), 2 * ones) for rank in range(2))
    except Exception as error:
        return False, reason_of(error)
    seconds = time.monotonic() - start
    if not right:
        return False, f"an all-reduce of two workers{shared} gave a wrong sum"
    return True, f"two workers{shared} started, added and ended in {seconds:.1f} s"


def _blas(problem: str | None) -> dict[str, Any]:
    """Load the BLAS; a failure becomes an answer."""
    nothing = {"library": None, "kernels": None, "path": None}
    if problem is not None:
        return {**nothing, "reason": problem}
    try:
        return {**blas.information(), "reason": None}
    except Exception as error:
        return {**nothing, "reason": reason_of(error)}


def _configuration() -> dict[str, Any]:
    try:
        values = config.Config.from_environment()
    except IPCError as error:
        return {"problem": str(error)}
    return {
        "timeout": values.timeout,
        "arena_limit": values.arena_limit,
        "instruction_set": values.instruction_set,
    }
