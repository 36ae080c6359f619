# SPDX-License-Identifier: Apache-2.0
"""What tests of sessions on nodes have workers do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from pathlib import Path

import numpy as np
import tvm_ffi
from tvm.runtime import Tensor
from tvm.runtime import tensor as as_tensor

import tvm_ipc


@tvm_ffi.register_global_func("tests.nodes.where")
def _where() -> str:
    return f"{socket.gethostname()} {os.environ.get('TVM_IPC_LOG', '')}"


@tvm_ffi.register_global_func("tests.nodes.rank_as_tensor")
def _rank_as_tensor(count: int) -> Tensor:
    rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")()
    return as_tensor(np.full(count, rank, "float32"))


@tvm_ffi.register_global_func("tests.nodes.write_to_standard_streams")
def _write_to_standard_streams(text: str) -> str:
    """Print, as Python and as native code do; return what the descriptors lead to."""
    rank = int(tvm_ffi.get_global_func("runtime.disco.worker_rank")())
    print(f"rank {rank} {text}", flush=True)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.write(number, f"rank {rank} {text}\n".encode())
    return " ".join(str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3))


@tvm_ffi.register_global_func("tests.nodes.add_one")
def _add_one(tensor: Tensor) -> None:
    tensor.copyfrom(tensor.numpy() + 1)


@tvm_ffi.register_global_func("tests.nodes.fail_on")
def _fail_on(rank: int) -> None:
    if tvm_ffi.get_global_func("tvm_ipc.worker.rank")() == rank:
        raise ValueError(f"rank {rank} was told to")


@tvm_ffi.register_global_func("tests.nodes.stay_on")
def _stay_on(rank: int) -> None:
    """Stay in the function on one rank."""
    if tvm_ffi.get_global_func("tvm_ipc.worker.rank")() == rank:
        time.sleep(600)


@tvm_ffi.register_global_func("tests.nodes.reduce_or_gather")
def _reduce_or_gather(first: int) -> None:
    """Call one collective on ranks before this one, and another from it on."""
    x = _of_device(4)
    if tvm_ffi.get_global_func("tvm_ipc.worker.rank")() < first:
        tvm_ffi.get_global_func("tvm_ipc.allreduce")(x, 0, 0, 3, 0, x)
    else:
        tvm_ffi.get_global_func("tvm_ipc.allgather")(x, 0, 0, _of_device(16))


@tvm_ffi.register_global_func("tests.nodes.send_other")
def _send_other(sender: int, receiver: int) -> None:
    """Send more than is received."""
    rank = tvm_ffi.get_global_func("tvm_ipc.worker.rank")()
    if rank == sender:
        tvm_ffi.get_global_func("runtime.disco.nccl.send_to_worker")(_of_device(8), receiver)
    if rank == receiver:
        tvm_ffi.get_global_func("runtime.disco.nccl.recv_from_worker")(_of_device(4), sender)


@tvm_ffi.register_global_func("tests.nodes.nccl_fails_on")
def _nccl_fails_on(rank: int) -> None:
    """Let the next all-reduce of a rank fail in the double of NCCL, when all have met."""
    if tvm_ffi.get_global_func("tvm_ipc.worker.rank")() == rank:
        ctypes.CDLL("libnccl.so.2").ncclDoubleFail(b"ncclAllReduce", 1, 3)


@tvm_ffi.register_global_func("tests.nodes.reduce_for_ever")
def _reduce_for_ever() -> None:
    x = _of_device(4)
    while True:
        tvm_ffi.get_global_func("tvm_ipc.allreduce")(x, 3, 0, 3, 0, x)


@tvm_ffi.register_global_func("tests.nodes.has_no_files")
def _has_no_files(rank: int) -> None:
    """From now on a rank finds none of the files that others have, but what it was sent."""
    if tvm_ffi.get_global_func("tvm_ipc.worker.rank")() == rank:
        from tvm_ipc.models.weights import worker
        from tvm_ipc.runtime import send_library_to_nodes

        found = send_library_to_nodes._find_library
        worker._is_same_file = lambda *_: False  # type: ignore[assignment]
        send_library_to_nodes._find_library = lambda _, digest: found("/dev/null", digest)


def _of_device(count: int) -> Tensor:
    return as_tensor(np.zeros(count, "float32"), tvm_ffi.get_global_func("tvm_ipc.worker.device")())


assert tvm_ipc.__version__
