# SPDX-License-Identifier: Apache-2.0
"""Summarize the facts of `tvm-ipc doctor`: what is ready, and what to do where something is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tvm_ipc.cpu import openblas_discovery
from tvm_ipc.nodes.find_mpi_installation import INSTALL as INSTALL_MPI
from tvm_ipc.packed_functions import backend_of_nodes, backends_of
from tvm_ipc.tools.format import list_text

_TRIED: Final = "2 workers tried"
_INSTALL_DRIVER: Final = "install the driver, or start the container with it"


def verdict(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per feature: its name, whether it is ready, and a text with what to do.

    CPUs, several machines and GPUs always have an entry; other features only if they are not ready.
    """
    problem = facts["tvm"]["problem"]
    if problem is not None:
        return [_entry("cpus", False, f"Not ready: TVM or the native library fails: {problem}")]
    return [_cpus(facts), *_unready(facts), _nodes(facts), *_gpus(facts)]


def _entry(feature: str, ready: bool, text: str) -> dict[str, Any]:
    return {"feature": feature, "ready": ready, "text": _sentence(text)}


def _cpus(facts: dict[str, Any]) -> dict[str, Any]:
    shm = facts["backends"][backends_of("cpu")[0]]
    if shm["available"]:
        return _entry("cpus", True, f"Ready on CPUs: {_TRIED}")
    return _entry(
        "cpus",
        False,
        f"Not ready on CPUs: 2 workers failed: {_sentence(shm['reason'])} If that does not help, "
        "run again with TVM_IPC_LOG=debug, which prints each step of a session",
    )


def _unready(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what sessions on CPUs can do without, and compiled programs cannot."""
    tvm, compiler, blas = facts["tvm"], facts["cxx"], facts["blas"]
    unpatched = [defect for defect in tvm["found"] if defect not in tvm["patched"]]
    if unpatched:
        pair = " ".join(f"{p['package']}=={p['tested']}" for p in facts["packages"])
        yield _entry(
            "disco",
            False,
            f"Disco: incomplete, {list_text(unpatched)}. Run: pip install --force-reinstall {pair}",
        )
    if not compiler["works"]:
        yield _entry("compiler", False, f"Compiling models: not ready: {compiler['reason']}")
    if not blas["installed"]:
        text = "OpenBLAS: not installed, so matmuls run in slower kernels of TVM. Run pip install "
        yield _entry("blas", False, text + openblas_discovery.DISTRIBUTION)
    elif blas["library"] is None:
        yield _entry("blas", False, f"OpenBLAS: not ready: {blas['reason']}")


def _nodes(facts: dict[str, Any]) -> dict[str, Any]:
    mpi, backend = facts["node_launcher"], facts["backends"][backend_of_nodes()]
    if backend["available"]:
        return _entry("nodes", True, f"Several machines: {mpi['kind']} works")
    if mpi["found"]:
        return _entry("nodes", False, f"Several machines: not ready: {backend['reason']}")
    return _entry(
        "nodes",
        False,
        f"Several machines: no MPI. To use them, run {INSTALL_MPI}, or install the system's Open "
        "MPI or MPICH",
    )


def _gpus(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    gpus, backends = facts["gpus"], facts["backends"]
    devices = gpus["devices"]
    if not gpus["driver_installed"]:
        text = f"GPUs: no NVIDIA driver. To use a GPU, {_INSTALL_DRIVER}"
        yield _entry("gpus", False, text)
    elif not devices:
        reason = gpus["reason"] or "NVIDIA's driver finds no GPU"
        visible = gpus["visible"]
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        yield _entry("gpus", False, f"GPUs: not ready: {reason}{hidden}")
    elif not gpus["architectures"]:
        yield _entry(
            "gpus",
            False,
            "GPUs: not ready: tvm_ipc was built without GPU kernels. Build it without "
            "TVM_IPC_CUDA=OFF",
        )
    elif not backends["cuda"]["available"]:
        yield _entry("gpus", False, f"GPUs: not ready: {backends['cuda']['reason']}")
    else:
        names = [gpu["name"] for gpu in devices]
        counts = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        yield _entry("gpus", True, f"GPUs: {list_text(counts)} ready, {_TRIED}")
    # Two ranks of NCCL cannot share a GPU, so a trial on one GPU always fails.
    if len(devices) > 1 and not backends["nccl"]["available"]:
        yield _entry(
            "nccl",
            False,
            "NCCL: not ready, so GPUs of several machines cannot be used: "
            f"{backends['nccl']['reason']}",
        )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
