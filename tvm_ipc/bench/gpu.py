# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, for measurements: which each worker has, and what is compiled for."""

from __future__ import annotations

from tvm_ipc.runtime import gpus, library

_WHERE = "tvm-ipc bench --device cuda"


def shared(workers: int) -> list[int]:
    """Return the GPU of each worker: its own, or one that workers share."""
    gpus.require(_WHERE, [0], given=False)
    ids = [one.id for one in gpus.find().devices]
    return [ids[worker % len(ids)] for worker in range(workers)]


def target() -> dict[str, str]:
    """Return a target for the first GPU, for which TVM can compile from now on."""
    gpus.require(_WHERE, [0], given=False)
    library.require_cuda()
    capability = gpus.find().devices[0].capability
    return {"kind": "cuda", "arch": f"sm_{capability.replace('.', '')}"}
