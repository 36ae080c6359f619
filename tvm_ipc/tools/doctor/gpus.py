# SPDX-License-Identifier: Apache-2.0
"""Check the CUDA driver, devices and libraries, and memory access between pairs of devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

from tvm_ipc.errors import IPCError
from tvm_ipc.gpu import discovery
from tvm_ipc.pip_install_commands import install_extra
from tvm_ipc.runtime import config, shared_libraries
from tvm_ipc.tools.format import bytes_text, error_text

#: How two devices share memory, by the sharing mode that the probe reports.
_SHARING_MODES = {
    "vmm": "direct access to each other's memory, by file descriptors",
    "legacy": "direct access to each other's memory, by CUDA IPC handles",
    "host": "through pinned host memory",
    "none": "no way to share memory works",
    "direct": "direct access to each other's memory, according to the driver",
    "apart": "no direct access, according to the driver: through pinned host memory",
}
_INSTALL = install_extra("cuda")
#: Width of the table's first column, in characters.
_LABEL = 20
_LINKS = {"same device": "one device", "nvlink": "NVLink", "pcie": "PCIe"}


def examine(problem: str | None) -> dict[str, Any]:
    """Query the driver, and probe memory sharing between devices."""
    facts: dict[str, Any] = {
        "driver": None,
        "driver_installed": False,
        "reason": problem,
        "visible": config.visible_gpus(),
        "devices": [],
        "architectures": [],
        "pairs": None,
        "pairs_reason": None,
        "cudart": None,
        "nccl": {"version": None, "path": None, "reason": problem},
        "toolkit": None,
        "toolkit_reason": problem,
    }
    if problem is not None:
        return facts
    facts["driver_installed"] = shared_libraries.has_nvidia_driver()
    try:
        gpus = discovery.find()
        facts["driver"], facts["reason"] = gpus.driver or None, gpus.reason or None
        facts["devices"] = [vars(gpu) for gpu in gpus.devices]
        facts["architectures"] = list(gpus.architectures)
    except Exception as error:
        facts["reason"] = error_text(error)
    facts["cudart"] = shared_libraries.cudart()
    facts["nccl"] = _nccl()
    facts["toolkit"], facts["toolkit_reason"] = _toolkit()
    if facts["devices"]:
        ids = [gpu["id"] for gpu in facts["devices"]]
        facts["pairs"], facts["pairs_reason"] = _pairs(ids, gpus.links)
    return facts


def _nccl() -> dict[str, Any]:
    info = discovery.ask("tvm_ipc.nccl.info")
    if info is None:
        return {
            "version": None,
            "path": None,
            "reason": "this build of tvm_ipc does not include it",
        }
    number = int(info["version"])
    version = f"{number // 10000}.{number % 10000 // 100}.{number % 100}" if number else None
    return {"version": version, "path": info["path"] or None, "reason": info["reason"] or None}


def _toolkit() -> tuple[str | None, str | None]:
    """Return the CUDA toolkit that TVM compiles with, or the reason why there is none."""
    from tvm.support import nvcc

    try:
        return str(nvcc.find_cuda_path()), None
    except (OSError, RuntimeError) as error:
        return None, error_text(IPCError(str(error)))


def _pairs(
    devices: list[int], links: tuple[tuple[str, ...], ...]
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Probe memory sharing for each pair of devices; return the results or why there are none.

    The probe exports, imports, writes and reads memory. A library without the probe reports the
    links that the driver knows.
    """
    try:
        probe = discovery.ask("tvm_ipc.cuda.probe", devices)
    except Exception as error:
        return None, error_text(error)
    if probe is None and not links:
        return None, "this build of tvm_ipc does not include it"
    rows = (
        probe["pairs"]
        if probe is not None
        else [[_pair_from_link(link) for link in row] for row in links]
    )
    indices = combinations_with_replacement(range(len(devices)), 2)
    return [{"devices": [devices[i], devices[j]], **rows[i][j]} for i, j in indices], None


def _pair_from_link(link: str) -> dict[str, str]:
    return {"rung": "direct" if link else "apart", "link": link, "reason": ""}


def rows(
    facts: dict[str, Any], tvm: str | None, *, verbose: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table; `tvm` is the state of TVM's own CUDA library.

    Without `verbose` there are no paths, no messages of the system's loader, and without a driver
    nothing but that.
    """
    visible = facts["visible"]
    visibility = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    if facts["driver"] is None and not facts["driver_installed"] and not verbose:
        yield "driver", "not installed"
        return
    if facts["driver"] is None:
        yield "driver", f"not available: {facts['reason']}"
    else:
        yield "driver", f"for CUDA {facts['driver']}"
        if not facts["devices"]:
            yield "devices", f"none: {facts['reason'] or 'the driver finds none'}{visibility}"
    for gpu in facts["devices"]:
        runs = f"runs the kernels for {gpu['kernels']}" if gpu["kernels"] else gpu["reason"]
        memory = bytes_text(gpu["memory"])
        description = f"{gpu['name']}, {memory}, compute capability {gpu['capability']}; {runs}"
        yield f"GPU {gpu['id']}", description + visibility
        visibility = ""
    yield from _pair_rows(facts)
    compiled = ", ".join(facts["architectures"])
    yield "tvm_ipc kernels", f"compiled for {compiled}" if compiled else "not in this library"
    yield from _library_rows(facts, tvm, verbose)


def _library_rows(
    facts: dict[str, Any], tvm: str | None, verbose: bool
) -> Iterator[tuple[str, str]]:
    nccl = facts["nccl"]
    if verbose:
        yield "CUDA library of TVM", tvm or "unknown"
        yield "libcudart", facts["cudart"] or f"not found: {_INSTALL}"
        available = f"{nccl['version']}, {nccl['path']}"
        yield "NCCL", available if nccl["version"] else f"not available: {nccl['reason']}"
        yield "toolkit for TVM", facts["toolkit"] or f"not found: {facts['toolkit_reason']}"
        return
    yield "CUDA runtime", "found" if facts["cudart"] else f"not found: {_INSTALL}"
    yield "NCCL", nccl["version"] or f"not available: {_INSTALL}"
    yield "toolkit for TVM", "found" if facts["toolkit"] else f"not found: {_INSTALL}"


def _pair_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how pairs of devices share memory; pairs with the same result are in one row."""
    if facts["pairs_reason"] is not None:
        yield "between GPUs", f"not probed: {facts['pairs_reason']}"
    pairs_by_result: dict[str, list[str]] = {}
    for pair in facts["pairs"] or ():
        first, second = pair["devices"]
        if first == second and pair["rung"] == "direct":
            continue
        how = _SHARING_MODES.get(pair["rung"], pair["rung"])
        if pair["link"] and first != second:
            how += f", over {_LINKS.get(pair['link'], pair['link'])}"
        if pair["reason"]:
            how += f" ({pair['reason']})"
        pairs_by_result.setdefault(how, []).append(
            str(first) if first == second else f"{first}-{second}"
        )
    for how, names in pairs_by_result.items():
        label, pairs = f"GPUs {', '.join(names)}", ", ".join(names)
        yield (label, how) if len(label) <= _LABEL else ("between GPUs", f"{pairs}: {how}")
