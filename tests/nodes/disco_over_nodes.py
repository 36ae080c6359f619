# SPDX-License-Identifier: Apache-2.0
"""A controller of two nodes: waits to be killed, or runs a session of Disco over their workers."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tvm_ffi
from tvm.runtime import disco

import tvm_ipc  # noqa: F401
from tvm_ipc.nodes.listen_address import address_towards
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
from tvm_ipc.nodes.start_and_watch_agents import NodePool
from tvm_ipc.runtime.worker_pool_interface import PoolRequest


@tvm_ffi.register_object("runtime.disco.ProcessSession")
class Session(disco.Session):
    def __init__(self, num_workers: int, key: str) -> None:
        make = disco._ffi_api.SessionProcess
        self.__init_handle_by_constructor__(
            make, num_workers, 1, "tvm_ipc.create_process_pool", key
        )


def main(workers: int, what: str, **places: Any) -> None:
    where = NodeAddresses(**places) if places else NodeAddresses(2)
    address = address_towards(places.get("hosts", ()))
    request = PoolRequest((workers, 1), "mpi")
    nodes = NodePool(where, request, address=address, timeout=60.0)
    told = [{**(node.facts or {}), "shares_memory": node.shares_memory} for node in nodes.nodes]
    print(json.dumps(told), flush=True)
    if what == "wait":
        sys.stdin.read()
        sys.exit("nobody killed it")
    session = Session(workers, nodes.key)
    x = session.empty((1000, 1000), "float32")  # more than a connection's buffers hold
    for rank in range(workers):
        x.debug_copy_from(rank, np.full((1000, 1000), rank, "float32"))
    for rank in range(workers):
        assert (x.debug_get_from_remote(rank).numpy() == rank).all()
    nodes.check()
    session.shutdown()
    nodes.finish()
    print("ok", flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
