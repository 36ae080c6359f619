# SPDX-License-Identifier: Apache-2.0
"""Our side of the benchmark: a session, the compiled program, and one contestant per way of use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import program
from peers import HERE, OUT

import tvm_ipc
from tvm_ipc.packed_functions import AllReduceStrategy


class Workers:
    """A session of process workers with the benchmark's program loaded."""

    def __init__(
        self,
        ranks: int,
        limit: float,
        threads: bool = False,
        hosts: Any = None,
    ) -> None:
        library = OUT / f"program-{os.getpid()}.so"
        if not library.exists():
            program.build(library, [s for s in AllReduceStrategy if s.name != "DEFAULT"])
        if str(HERE) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            # Worker processes find `ours_worker` by it.
            path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.ranks = ranks
        self.session = tvm_ipc.Session(ranks, timeout=limit, threads=threads, hosts=hosts)
        self.session.import_python_module("ours_worker")
        self.program = self.session.load_vm_module(str(library))

    def call(self, name: str, *arguments: Any) -> list[float]:
        """Calls a function of ours_worker everywhere; what each rank answered."""
        answer = self.session.get_global_func(f"tvm_ipc.bench.{name}")(*arguments)
        return [float(self.session.get(answer, rank)[0]) for rank in range(self.ranks)]

    def time(self, function: str, calls: int) -> float:
        """Seconds for `calls` calls, of which one invocation of the function makes `k`."""
        unroll = int(function.rsplit("_", 1)[1])
        times = max(1, round(calls / unroll))
        return max(self.call("run", self.program, function, times)) * calls / (times * unroll)

    def close(self) -> None:
        self.session.close()


def remove_program() -> None:
    """Deletes the compiled program of this process."""
    Path(OUT / f"program-{os.getpid()}.so").unlink(missing_ok=True)


class Ours:
    """One way of calling our all-reduce from the VM; several share a session."""

    def __init__(
        self, workers: Workers, send_ipc: bool, recv_ipc: bool, strategy: AllReduceStrategy
    ) -> None:
        self.name = "tvm_ipc " + ("ipc" if send_ipc else "staged")
        if recv_ipc:
            self.name += " to ipc"
        if strategy is not AllReduceStrategy.AUTO:
            self.name += f" {strategy.name.lower()}"
        self._workers = workers
        self._memory = (send_ipc, recv_ipc)
        self._strategy = strategy

    def prepare(self, dtype: str, count: int, limit: float) -> str:
        del limit  # the session's deadline
        right = self._workers.call("prepare", dtype, count, *self._memory, int(self._strategy))
        return "ok" if all(right) else "bad"

    def run(self, iterations: int, rewriting: bool, limit: float) -> float:
        del limit
        unroll = max(k for k in program.UNROLLS if k == 1 or k * 2 <= iterations)
        kind = "rewritten" if rewriting else "allreduce"
        return self._workers.time(f"{kind}_{self._strategy.name.lower()}_{unroll}", iterations)

    def close(self) -> None:
        """Nothing: the session is closed by whoever made it."""
