# SPDX-License-Identifier: Apache-2.0
"""What tests of sessions on nodes have workers do."""

from __future__ import annotations

import os
import socket
import time

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


assert tvm_ipc.__version__
