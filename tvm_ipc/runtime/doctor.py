# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc doctor` finds out: what works here, what does not, and why."""

from __future__ import annotations

import ctypes
import json
import platform
import resource
import subprocess
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm_ipc
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import blas, config, library, repair

#: Engines of later versions, named so that the table says that they were not forgotten.
_LATER = ("cuda", "nccl", "mpi")
#: Characters of a line before its fact.
_NAMES = 23
#: Nobody waits longer for a compiler.
_COMPILER_SECONDS = 60


def examine(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Look at this process's TVM and at the machine, and run two workers once.

    `progress` hears what is being done, for those who wait.
    """
    progress("loading TVM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TVM and we would warn of is in the answer
        tvm_facts = _tvm()
    native = _native_info()
    progress("starting two workers")
    backends = _backends(tvm_facts["problem"])
    progress("linking with the C++ compiler")
    compiler = _compiler(tvm_facts["problem"])
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
        "cxx": compiler,
        "blas": _blas(tvm_facts["problem"]),
        "cpu": {
            "model": _cpu_model(),
            "cores": config.available_cores(),
            "instruction_sets": native.get("instruction_sets"),
            "instruction_set": native.get("instruction_set"),
        },
        "memory": {
            "physical": native.get("physical_memory"),
            "cgroup_limit": _cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
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


def render(facts: dict[str, Any], width: int | None = None) -> str:
    """Set the facts as a table for people; lines break at a width, if there is one."""
    lines = [f"tvm-ipc {facts['version']}, Python {facts['python']}, {facts['system']}"]
    for title, rows in _sections(facts):
        lines += ["", title]
        for name, text in rows:
            first, *more = _broken(text, width and max(width - _NAMES, _NAMES))
            lines.append(f"  {name:<20} {first}")
            lines += [f"  {'':<20} {line}" for line in more]
    return "\n".join(lines)


def _broken(text: str, width: int | None) -> list[str]:
    lines = text.splitlines() or [""]
    if width is None:
        return lines
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in wrapper.wrap(line) or [""]]


def _sections(facts: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Packages", [(p["package"], _package(p)) for p in facts["packages"]]
    tvm = facts["tvm"]
    yield (
        "TVM",
        [
            ("mode", tvm["mode"] or "unknown"),
            ("found broken", "\n".join(_defects(tvm)) or "nothing"),
            ("native library", tvm["library"] or f"not loaded: {tvm['problem']}"),
            ("CUDA library of TVM", tvm["cuda"] or "unknown"),
            *((name, value) for name, value in tvm["settings"].items() if value is not None),
        ],
    )
    yield (
        "Backends",
        [
            (name, ("available: " if b["available"] else "not available: ") + b["reason"])
            for name, b in facts["backends"].items()
        ],
    )
    compiler = facts["cxx"]
    yield (
        "C++ compiler",
        [
            ("command", compiler["command"] or "none found"),
            ("version", compiler["version"] or "unknown"),
            ("links", "yes" if compiler["works"] else f"no: {compiler['reason']}"),
            *((name, value) for name, value in compiler["settings"].items() if value is not None),
        ],
    )
    products = facts["blas"]
    yield (
        "Matrix products",
        [
            ("OpenBLAS", products["library"] or f"not available: {products['reason']}"),
            ("kernels beside it", products["kernels"] or "unknown"),
        ],
    )
    cpu, memory, limits = facts["cpu"], facts["memory"], facts["limits"]
    yield (
        "Processor",
        [
            ("model", cpu["model"] or "unknown"),
            ("cores", f"{cpu['cores']} usable by this process"),
            ("instruction sets", ", ".join(cpu["instruction_sets"] or ()) or "unknown"),
            ("in use", cpu["instruction_set"] or "unknown"),
            *((name, value or "not set") for name, value in facts["threads"].items()),
        ],
    )
    yield (
        "Shared memory",
        [
            ("memfd", _yes_no(facts["system_calls"]["memfd"])),
            ("pidfd", _yes_no(facts["system_calls"]["pidfd"])),
            ("physical memory", _size(memory["physical"], "unknown")),
            ("cgroup memory.max", _size(memory["cgroup_limit"], "no limit")),
            ("RLIMIT_AS", _size(memory["address_space_limit"], "no limit")),
            ("RLIMIT_NOFILE", str(limits["open_files"] or "no limit")),
            ("default arena limit", _size(memory["default_arena_limit"], "unknown")),
            ("workers per session", f"at most {limits['max_workers'] or 'unknown'}"),
        ],
    )
    yield "Configuration", [(k, _plain(v)) for k, v in facts["configuration"].items()]


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
        facts["problem"] = _one_line(error)
    return facts


def _native_info() -> dict[str, Any]:
    """Return what the native library says of this machine; nothing if it is not there."""
    try:
        import tvm_ffi

        info = tvm_ffi.get_global_func("tvm_ipc.native_info", allow_missing=True)
    except ImportError:
        return {}
    return dict(json.loads(info())) if info is not None else {}


def _backends(problem: str | None) -> dict[str, dict[str, Any]]:
    driver = "an" if library.has_nvidia_driver() else "no"
    later = f"not in this version of tvm_ipc; {driver} NVIDIA driver was found"
    reasons = {"cuda": later, "nccl": later, "mpi": "not in this version of tvm_ipc"}
    if problem is None:
        works, reason = _try_shm()
    else:
        works, reason = False, problem
    return {
        "shm": {"available": works, "reason": reason},
        **{name: {"available": False, "reason": reasons[name]} for name in _LATER},
    }


def _try_shm() -> tuple[bool, str]:
    """Start two workers and let them add."""
    import numpy as np

    start = time.monotonic()
    try:
        with tvm_ipc.Session(2) as session:
            ones = np.ones(8, "float32")
            source = session.put(ones)
            target = session.empty(ones.shape, "float32")
            session.allreduce(source, target)
            right = all(np.array_equal(session.get(target, rank), 2 * ones) for rank in range(2))
    except Exception as error:
        return False, _one_line(error)
    seconds = time.monotonic() - start
    if not right:
        return False, "an all-reduce of two workers gave a wrong sum"
    return True, f"two workers started, added and ended in {seconds:.1f} s"


def _blas(problem: str | None) -> dict[str, Any]:
    """Load the BLAS; a failure becomes an answer."""
    nothing = {"library": None, "kernels": None, "path": None}
    if problem is not None:
        return {**nothing, "reason": problem}
    try:
        return {**blas.information(), "reason": None}
    except Exception as error:
        return {**nothing, "reason": _one_line(error)}


def _compiler(problem: str | None) -> dict[str, Any]:
    """Find the compiler that TVM would take, and link a library with it."""
    facts: dict[str, Any] = {
        "command": None,
        "version": None,
        "works": False,
        "reason": problem,
        "settings": config.compiler_settings(),
    }
    if problem is not None:
        return facts
    from tvm.support import cc

    facts["command"] = command = cc.get_cc()
    if command is None:
        facts["reason"] = (
            "there is none; without it load_vm_module takes paths of libraries only, and not what "
            "tvm.compile returned: install g++ or clang, or name one in the environment variable "
            "CXX"
        )
        return facts
    try:
        with tempfile.TemporaryDirectory(prefix="tvm_ipc-") as folder:
            source, linked = Path(folder, "answer.cc"), Path(folder, "answer.so")
            source.write_text('extern "C" int Answer() { return 42; }\n')
            _run_compiler(command, "-shared", "-fPIC", "-o", str(linked), str(source))
            facts["works"] = ctypes.CDLL(str(linked)).Answer() == 42
        facts["version"] = _run_compiler(command, "--version").partition("\n")[0]
    except Exception as error:
        facts["reason"] = _one_line(error)
    return facts


def _run_compiler(command: str, *arguments: str) -> str:
    """Run it and return what it prints."""
    try:
        done = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMPILER_SECONDS,
            check=False,
        )
    except OSError as error:
        hint = "; TVM takes all of it for one path" if " " in command else ""
        raise IPCError(f"{command!r} cannot be started: {error.strerror}{hint}") from error
    except subprocess.TimeoutExpired as error:
        raise IPCError(f"{command} took more than {_COMPILER_SECONDS} s for one line") from error
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0:
        raise IPCError(f"{command} ended with exit code {done.returncode}: {text or 'no words'}")
    return text


def _configuration() -> dict[str, Any]:
    try:
        values = config.Config.from_environment()
    except tvm_ipc.errors.IPCError as error:
        return {"problem": str(error)}
    return {
        "timeout": values.timeout,
        "arena_limit": values.arena_limit,
        "instruction_set": values.instruction_set,
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None)


def _cgroup_limit(membership: Path, root: Path) -> int | None:
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
        for part in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
            try:
                text = (directory / part / name).read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number of nearly 2**63.
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def _resource_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _package(package: dict[str, Any]) -> str:
    installed, tested = package["installed"] or "missing", package["tested"]
    if tested is None:
        return f"{installed} (tvm-ipc is not installed, so the tested version is unknown)"
    return f"{installed} " + ("(tested)" if package["matches"] else f"(tested with {tested})")


def _defects(tvm: dict[str, Any]) -> Iterator[str]:
    for defect in tvm["found"]:
        yield f"{defect}: " + ("mended" if defect in tvm["mended"] else "not mended")


def _one_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    ours = isinstance(error, tvm_ipc.errors.IPCError)
    return text if ours else f"{type(error).__name__}: {text}"


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


def _size(number: int | None, absent: str) -> str:
    if number is None:
        return absent
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >> shift:
            return f"{number / (1 << shift):.1f} {unit}"
    return f"{number} bytes"


def _plain(value: Any) -> str:
    return "default" if value is None else str(value)
