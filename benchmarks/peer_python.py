# SPDX-License-Identifier: Apache-2.0
"""One rank of a peer that is called from Python: mpi4py, or gloo through torch.distributed.

Runs in the peer's own environment, so it imports nothing of ours. Speaks the line protocol that
peer.h describes. Usage: peer_python.py SOCKET {mpi4py|gloo RANK RANKS STORE}
"""

from __future__ import annotations

import os
import socket
import sys
from time import perf_counter
from typing import Any, Protocol

import numpy as np


class Engine(Protocol):
    rank: int
    ranks: int

    def prepare(self, dtype: str, count: int) -> str: ...

    def run(self, iterations: int, rewriting: bool) -> float: ...


def term(count: int, rank: int) -> Any:
    """The closed form of peer.h."""
    return np.resize((np.arange(13) + rank).astype(np.float32), count)


def expected(count: int, ranks: int) -> Any:
    total = ranks * np.arange(13) + ranks * (ranks - 1) // 2
    return np.resize(total.astype(np.float32), count)


class Mpi4py:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD
        self.rank, self.ranks = self.comm.Get_rank(), self.comm.Get_size()

    def prepare(self, dtype: str, count: int) -> str:
        if dtype != "float32":
            return "unsupported"
        self.send = term(count, self.rank)
        self.recv = np.full(count, -1, np.float32)
        self.comm.Allreduce(self.send, self.recv)
        return "ok" if np.array_equal(self.recv, expected(count, self.ranks)) else "bad"

    def run(self, iterations: int, rewriting: bool) -> float:
        send, recv = [self.send, self.mpi.FLOAT], [self.recv, self.mpi.FLOAT]
        allreduce = self.comm.Allreduce
        self.comm.Barrier()
        start = perf_counter()
        for i in range(iterations):
            if rewriting:
                self.send.fill(i & 1)
            allreduce(send, recv)
        return perf_counter() - start


class Gloo:
    def __init__(self, rank: int, ranks: int, store: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        self.rank, self.ranks = rank, ranks
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def prepare(self, dtype: str, count: int) -> str:
        self.data = self.torch.from_numpy(term(count, self.rank))
        self.data = self.data.to(getattr(self.torch, dtype))
        try:
            self.dist.all_reduce(self.data)
        except RuntimeError:
            return "unsupported"
        got = self.data.to(self.torch.float32, copy=True).numpy()
        # torch reduces in place: zeros stay what they are however often they are added.
        self.data.zero_()
        return "ok" if np.array_equal(got, expected(count, self.ranks)) else "bad"

    def run(self, iterations: int, rewriting: bool) -> float:
        data, allreduce = self.data, self.dist.all_reduce
        self.dist.barrier()
        start = perf_counter()
        for i in range(iterations):
            if rewriting:
                data.fill_(i & 1)
            allreduce(data)
        seconds = perf_counter() - start
        data.zero_()
        return seconds


def main(path: str, engine: str, *rest: str) -> None:
    peer: Engine = Mpi4py() if engine == "mpi4py" else Gloo(int(rest[0]), int(rest[1]), rest[2])
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link.sendall(f"{peer.rank} {os.getpid()}\n".encode())
    for line in link.makefile("r"):
        command, first, second = line.split()
        if command == "prepare":
            answer = peer.prepare(first, int(second))
        else:
            answer = f"{peer.run(int(first), second == '1'):.9f}"
        link.sendall(f"{answer}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
