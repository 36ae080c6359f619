# SPDX-License-Identifier: Apache-2.0
"""Choose the GPUs of workers and the target to compile for, for `tvm-ipc demo` and `bench`."""

from __future__ import annotations

from tvm_ipc.arguments import counted
from tvm_ipc.errors import IPCError
from tvm_ipc.gpu import discovery
from tvm_ipc.runtime import shared_libraries


def require_gpus(command: str, threads: int = 0) -> None:
    """Raise if this machine has no GPU that works, or cannot compile for GPUs.

    `threads` is the number of workers that are threads. Threads can only share a GPU before TVM
    allocates memory on it, and the demo's session with one worker, which runs first, does that.
    """
    discovery.require(f"tvm-ipc {command} --device cuda", [0], given=False)
    gpus = len(discovery.find().devices)
    if threads > gpus:
        raise IPCError(
            f"tvm-ipc {command} --device cuda --threads: {threads} threads cannot share "
            f"{counted(gpus, 'GPU')}; leave out --threads, or use fewer --workers"
        )
    shared_libraries.require_cuda()


def target() -> dict[str, str]:
    """Return a TVM target whose architecture all GPUs of this machine support."""
    capability = min(tuple(map(int, gpu.capability.split("."))) for gpu in discovery.find().devices)
    return {"kind": "cuda", "arch": "sm_" + "".join(map(str, capability))}


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
