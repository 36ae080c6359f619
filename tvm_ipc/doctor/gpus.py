# SPDX-License-Identifier: Apache-2.0
"""What of CUDA is there: the driver, devices, libraries, and how devices reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Any

from tvm_ipc.doctor.reason import reason_of
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config, gpus, library

#: What a pair of devices has, by the name of the rung of the ladder.
_RUNGS = {
    "vmm": "each maps the other's memory, by file descriptors",
    "legacy": "each maps the other's memory, by CUDA IPC handles",
    "host": "through pinned memory of the host",
    "none": "nothing of ours works",
    "direct": "each maps the other's memory, the driver says",
    "apart": "no direct way, the driver says: through pinned memory of the host",
}
#: Characters of the first column of the table.
_LABEL = 20
_LINKS = {"same device": "one device", "nvlink": "NVLink", "pcie": "PCIe"}


def examine(problem: str | None) -> dict[str, Any]:
    """Ask the driver, and try what devices can do with each other's memory."""
    facts: dict[str, Any] = {
        "driver": None,
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
    try:
        found = gpus.find()
        facts["driver"], facts["reason"] = found.driver or None, found.reason or None
        facts["devices"] = [vars(gpu) for gpu in found.devices]
        facts["architectures"] = list(found.architectures)
    except Exception as error:
        facts["reason"] = reason_of(error)
    facts["cudart"] = library.cudart()
    facts["nccl"] = _nccl()
    facts["toolkit"], facts["toolkit_reason"] = _toolkit()
    if facts["devices"]:
        ids = [one["id"] for one in facts["devices"]]
        facts["pairs"], facts["pairs_reason"] = _pairs(ids, found.links)
    return facts


def _nccl() -> dict[str, Any]:
    said = gpus.ask("tvm_ipc.nccl.info")
    if said is None:
        return {"version": None, "path": None, "reason": "not in this version of tvm_ipc"}
    number = int(said["version"])
    version = f"{number // 10000}.{number % 10000 // 100}.{number % 100}" if number else None
    return {"version": version, "path": said["path"] or None, "reason": said["reason"] or None}


def _toolkit() -> tuple[str | None, str | None]:
    """Return the folder with which TVM compiles for CUDA, or why there is none."""
    from tvm.support import nvcc

    try:
        return str(nvcc.find_cuda_path()), None
    except (OSError, RuntimeError) as error:
        return None, reason_of(IPCError(str(error)))


def _pairs(
    devices: list[int], links: tuple[tuple[str, ...], ...]
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Let each pair of devices export, import, write and read memory; a failure is an answer.

    Where the library has no such trial, what the driver says of their links is the answer.
    """
    try:
        said = gpus.ask("tvm_ipc.cuda.probe", devices)
    except Exception as error:
        return None, reason_of(error)
    if said is None and not links:
        return None, "not in this version of tvm_ipc"
    rows = said["pairs"] if said is not None else [[_linked(one) for one in row] for row in links]
    places = combinations_with_replacement(range(len(devices)), 2)
    return [{"devices": [devices[i], devices[j]], **rows[i][j]} for i, j in places], None


def _linked(link: str) -> dict[str, str]:
    return {"rung": "direct" if link else "apart", "link": link, "reason": ""}


def rows(facts: dict[str, Any], tvm: str | None) -> Iterator[tuple[str, str]]:
    """Set the facts as rows of a table, with what became of TVM's own library."""
    visible = facts["visible"]
    hides = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    if facts["driver"] is None:
        yield "driver", f"not available: {facts['reason']}"
    else:
        yield "driver", f"for CUDA {facts['driver']}"
        if not facts["devices"]:
            yield "devices", f"none: {facts['reason'] or 'the driver finds none'}{hides}"
    for gpu in facts["devices"]:
        runs = f"runs our kernels for {gpu['kernels']}" if gpu["kernels"] else gpu["reason"]
        memory = f"{gpu['memory'] / (1 << 30):.1f} GiB"
        about = f"{gpu['name']}, {memory}, compute capability {gpu['capability']}; {runs}"
        yield f"GPU {gpu['id']}", about + hides
        hides = ""
    yield from _between(facts)
    compiled = ", ".join(facts["architectures"])
    yield "our kernels", f"compiled for {compiled}" if compiled else "not in this library"
    yield "CUDA library of TVM", tvm or "unknown"
    yield "libcudart", facts["cudart"] or "not found: pip install 'tvm-ipc[cuda]'"
    nccl = facts["nccl"]
    found = f"{nccl['version']}, {nccl['path']}"
    yield "NCCL", found if nccl["version"] else f"not available: {nccl['reason']}"
    yield "TVM compiles with", facts["toolkit"] or f"nothing: {facts['toolkit_reason']}"


def _between(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What pairs of devices have, those that have the same in one row."""
    if facts["pairs_reason"] is not None:
        yield "between GPUs", f"not tried: {facts['pairs_reason']}"
    alike: dict[str, list[str]] = {}
    for pair in facts["pairs"] or ():
        first, second = pair["devices"]
        if first == second and pair["rung"] == "direct":
            continue
        how = _RUNGS.get(pair["rung"], pair["rung"])
        if pair["link"] and first != second:
            how += f", over {_LINKS.get(pair['link'], pair['link'])}"
        if pair["reason"]:
            how += f" ({pair['reason']})"
        alike.setdefault(how, []).append(str(first) if first == second else f"{first}-{second}")
    for how, which in alike.items():
        label, pairs = f"GPUs {', '.join(which)}", ", ".join(which)
        yield (label, how) if len(label) <= _LABEL else ("between GPUs", f"{pairs}: {how}")
