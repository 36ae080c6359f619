# SPDX-License-Identifier: Apache-2.0
"""Collect the facts that `tvm-ipc doctor` reports; a failed check is a fact with a reason."""

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
from tvm_ipc.cpu import openblas_discovery
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import find_launcher, find_mpi
from tvm_ipc.packed_functions import BACKENDS, backend_of_nodes
from tvm_ipc.runtime import config, repair_disco_import, shared_libraries
from tvm_ipc.this_machine import available_cores, cpu_model
from tvm_ipc.tools.doctor import gpus
from tvm_ipc.tools.doctor.cxx_compiler import try_compiler
from tvm_ipc.tools.doctor.feature_readiness_and_advice import verdict
from tvm_ipc.tools.format import error_text
from tvm_ipc.tvm_private_names import has_compiler


def examine(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Check TVM, the backends, the GPUs, the compiler and the limits of this machine.

    The verdict about these facts comes first. `progress` is called with a description of each step.
    """
    progress("loading TVM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the facts contain the subjects of the warnings
        tvm_facts = _tvm()
    native = _native_info()
    progress("asking for GPUs")
    gpu_facts = gpus.examine(tvm_facts["problem"])
    progress("starting two workers")
    backends = _backends(tvm_facts["problem"], [gpu["id"] for gpu in gpu_facts["devices"]])
    progress("linking with the C++ compiler")
    compiler = try_compiler(tvm_facts["problem"])
    facts = {
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
            for version in shared_libraries.versions()
        ],
        "tvm": tvm_facts,
        "backends": backends,
        "node_launcher": _node_launcher(),
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
            "address_space_limit": _resource_limit(resource.RLIMIT_AS),
            "default_arena_limit": native.get("default_arena_limit"),
        },
        "system_calls": {"memfd": native.get("memfd"), "pidfd": native.get("pidfd")},
        "limits": {
            "open_files": _resource_limit(resource.RLIMIT_NOFILE),
            "max_workers": native.get("max_workers"),
        },
        "threads": config.thread_settings(),
        "configuration": _configuration(),
    }
    return {"verdict": verdict(facts), **facts}


def _tvm() -> dict[str, Any]:
    """Load TVM and the native library; a failure is reported as `problem`."""
    facts: dict[str, Any] = {
        "mode": None,
        "settings": config.tvm_settings(),
        "found": [],
        "patched": [],
        "library": None,
        "cuda": None,
        "problem": None,
    }
    try:
        facts["mode"] = "compiler and runtime" if has_compiler() else "runtime only"
        patches = repair_disco_import.patch_disco()
        facts["found"], facts["patched"] = list(patches.found), list(patches.patched)
        facts["cuda"] = shared_libraries.load_cuda()
        facts["library"] = str(shared_libraries.load())
    except Exception as error:
        facts["problem"] = error_text(error)
    return facts


def _native_info() -> dict[str, Any]:
    """Return the native library's facts about this machine; nothing if it is not loaded."""
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
            works, reason = False, "this machine has no GPU"
        else:
            works, reason = _try(name, devices) if problem is None else (False, problem)
        facts[name] = {"available": works, "reason": reason}
    return facts


def _try(backend: str, gpu_ids: list[int]) -> tuple[bool, str]:
    """Return whether two workers can run an all-reduce with a backend, and how it went."""
    import numpy as np

    device = BACKENDS[backend]
    ids, location = None, ""
    if device != "cpu":
        ids = (gpu_ids * 2)[:2] or None
        location = " on one GPU" if len(gpu_ids) == 1 else " on two GPUs"
    session_options: dict[str, Any] = {"device": device, "device_ids": ids, "backend": backend}
    if backend == backend_of_nodes():
        session_options["hosts"], location = 2, " on two simulated nodes"
    start = time.monotonic()
    try:
        with tvm_ipc.Session(2, **session_options) as session:
            ones = np.ones(8, "float32")
            source = session.put(ones)
            target = session.empty(ones.shape, "float32")
            session.allreduce(source, target)
            correct = all(np.array_equal(session.get(target, rank), 2 * ones) for rank in range(2))
    except Exception as error:
        return False, error_text(error)
    seconds = time.monotonic() - start
    if not correct:
        return False, f"an all-reduce of two workers{location} returned a wrong sum"
    return True, f"two workers{location} ran an all-reduce; start to exit took {seconds:.1f} s"


def _node_launcher() -> dict[str, Any]:
    """Find the MPI that starts nodes; a failure is reported as `reason`."""
    facts: dict[str, Any] = {"found": False, "kind": None, "version": None, "launcher": None}
    facts["found"] = find_launcher() is not None
    try:
        mpi = find_mpi()
    except IPCError as error:
        return {**facts, "reason": error_text(error)}
    found = {"kind": mpi.kind, "version": mpi.version, "launcher": str(mpi.mpiexec)}
    return {**facts, **found, "reason": None}


def _blas(problem: str | None) -> dict[str, Any]:
    """Load the BLAS library; a failure is reported as `reason`."""
    installed = openblas_discovery.installed()
    missing = {"installed": installed, "library": None, "kernels": None, "path": None}
    if problem is not None:
        return {**missing, "reason": problem}
    try:
        return {"installed": True, **openblas_discovery.information(), "reason": None}
    except Exception as error:
        return {**missing, "reason": error_text(error)}


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


def cgroup_limit(membership: Path, root: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups; None without one."""
    limits = []
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, group in entries:
        if controllers == "":
            directory, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            directory, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group as the root although the path names the host's.
        for path in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
            try:
                text = (directory / path / name).read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number of nearly 2**63.
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def _resource_limit(kind: int) -> int | None:
    """Return the soft limit of a resource; None without one."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
