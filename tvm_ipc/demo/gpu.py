# SPDX-License-Identifier: Apache-2.0
"""The GPUs that the demo's workers compute on."""

from __future__ import annotations

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import gpus, library


def require(workers: int, *, threads: bool) -> None:
    """Raise, with what to do, where this machine cannot compile for GPUs and run workers on them.

    Threads that share a GPU have to be there before TVM takes memory of it, which the session with
    one worker does first.
    """
    gpus.require("tvm-ipc demo --device cuda", [0], given=False)
    there = len(gpus.find().devices)
    if threads and workers > there:
        raise IPCError(
            f"tvm-ipc demo --device cuda --threads: {workers} workers would share {there} GPU"
            f"{'s' * (there != 1)}, and here only processes do; leave out --threads, or take fewer "
            "--workers"
        )
    library.require_cuda()


def architecture() -> str:
    """Return what all GPUs of this machine run."""
    capability = min(tuple(map(int, one.capability.split("."))) for one in gpus.find().devices)
    return "sm_" + "".join(map(str, capability))


def shared(workers: int) -> list[int]:
    """Return the GPU of each worker: its own, or one that workers share."""
    ids = [one.id for one in gpus.find().devices]
    return [ids[worker % len(ids)] for worker in range(workers)]


def names() -> list[str]:
    """Return the name of each GPU."""
    return [one.name for one in gpus.find().devices]


def check_memory(need: int, what: str) -> None:
    """Raise if one worker alone would have no room for so many bytes."""
    first = gpus.find().devices[0]
    if need > first.memory:
        raise IPCError(
            f"{what} would need about {need >> 20} MiB on one GPU, and GPU {first.id} "
            f"({first.name}) has {first.memory >> 20} MiB; take less --layers, --hidden or "
            "--context"
        )
