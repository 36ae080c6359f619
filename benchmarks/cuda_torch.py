# SPDX-License-Identifier: Apache-2.0
"""PyTorch's one-shot and two-shot all-reduce over symmetric memory, for `allreduce_cuda.py`.

Its ranks are processes that sleep between commands: lines of JSON go in, and come out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_SECONDS, CALL_SECONDS = 120.0, 60.0
WAYS = {"one-shot": "one_shot_all_reduce", "two-shot": "two_shot_all_reduce_"}


class PeerError(Exception):
    """What PyTorch said, or that it said nothing."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def version() -> str:
    return importlib.metadata.version("torch") if is_installed("torch") else ""


class Torch:
    """Its ranks, on as many devices as there are."""

    ways = tuple(WAYS)

    def __init__(self, ranks: int, devices: int) -> None:
        if not is_installed("torch"):
            raise PeerError("torch is not installed")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(ranks), str(rank % devices), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        self._answers(START_SECONDS)

    def allreduce(self, way: str, count: int, inner: int, rounds: int) -> list[list[float]]:
        """Seconds of a call, of each rank by round."""
        command = json.dumps([WAYS[way], count, inner, rounds]) + "\n"
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(command)
                process.stdin.flush()
            except OSError as error:
                raise PeerError("its ranks have ended") from error
        return self._answers(CALL_SECONDS)

    def _answers(self, limit: float) -> list[Any]:
        """A line of each rank; if one does not come all of them end."""
        end = time.monotonic() + limit
        found: dict[int, list[Any]] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._ranks):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self._ranks):
                ready = waiting.select(max(0.0, end - time.monotonic()))
                if not ready:
                    self.close()
                    raise PeerError(f"no answer in {limit:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    answer = json.loads(line) if line.startswith(("[", "{")) else {}
                    if "error" in answer or not line:
                        self.close()
                        raise PeerError(answer.get("error", "a rank ended"))
                    if isinstance(answer, list):
                        found[key.data] = answer
                        waiting.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self._ranks))]

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def serve(rank: int, ranks: int, device: int, store: str) -> None:
    """One rank: says that it is there, then does what it is told."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory

    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    print("[]", flush=True)
    for line in sys.stdin:
        way, count, inner, rounds = json.loads(line)
        step = max(8, 16 * ranks)  # these kernels take multiples of 16 bytes for each rank
        padded = (count + step - 1) // step * step
        where = torch.device("cuda", device)
        buffer = _symmetric_memory.empty(padded, dtype=torch.bfloat16, device=where)
        _symmetric_memory.rendezvous(buffer, group.group_name)
        function = getattr(torch.ops.symm_mem, way)
        buffer.fill_(rank + 1)
        torch.cuda.synchronize()
        dist.barrier()
        once = function(buffer, "sum", group.group_name)
        torch.cuda.synchronize()
        if not bool((once == ranks * (ranks + 1) // 2).all()):
            raise ValueError(f"{way} of {count}: wrong values")
        print(json.dumps(replays(torch, function, buffer, group, inner, rounds)), flush=True)


def replays(torch: Any, function: Any, buffer: Any, group: Any, inner: int, rounds: int) -> Any:
    """As `timed` in cuda_worker.py."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            function(buffer, "sum", group.group_name)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / inner)
    return times


if __name__ == "__main__":
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    except Exception as error:  # the script that started it says so
        text = " ".join(str(error).split())[:300]
        print(json.dumps({"error": f"{type(error).__name__}: {text}"}), flush=True)
