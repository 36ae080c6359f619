# SPDX-License-Identifier: Apache-2.0
"""Check and assign the GPUs of the demo's workers."""

from __future__ import annotations

from tvm_ipc.arguments import counted
from tvm_ipc.errors import IPCError
from tvm_ipc.gpu import discovery
from tvm_ipc.runtime import shared_libraries


def require(workers: int, *, threads: bool) -> None:
    """Raise if this machine cannot compile for GPUs or run `workers` workers on them.

    Threads can only share a GPU before TVM allocates memory on it, and the session with one worker,
    which runs first, allocates memory.
    """
    discovery.require("tvm-ipc demo --device cuda", [0], given=False)
    gpus = len(discovery.find().devices)
    if threads and workers > gpus:
        raise IPCError(
            f"tvm-ipc demo --device cuda --threads: {workers} threads cannot share "
            f"{counted(gpus, 'GPU')}; leave out --threads, or use fewer --workers"
        )
    shared_libraries.require_cuda()


def architecture() -> str:
    """Return the CUDA architecture that all GPUs of this machine support."""
    capability = min(tuple(map(int, gpu.capability.split("."))) for gpu in discovery.find().devices)
    return "sm_" + "".join(map(str, capability))


def gpu_of_workers(workers: int) -> list[int]:
    """Return the id of each worker's GPU; workers share GPUs if there are fewer."""
    ids = [gpu.id for gpu in discovery.find().devices]
    return [ids[rank % len(ids)] for rank in range(workers)]


def names() -> list[str]:
    """Return the name of each GPU."""
    return [gpu.name for gpu in discovery.find().devices]


def check_memory(need: int, purpose: str) -> None:
    """Raise if one GPU cannot hold `need` bytes."""
    first = discovery.find().devices[0]
    if need > first.memory:
        raise IPCError(
            f"{purpose} needs about {need >> 20} MiB on one GPU, but GPU {first.id} ({first.name}) "
            f"has {first.memory >> 20} MiB; reduce --layers, --hidden or --context"
        )
