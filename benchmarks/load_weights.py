# SPDX-License-Identifier: Apache-2.0
"""How fast the weights of a model come onto the workers, and how much memory that takes.

    python benchmarks/load_weights.py [--gigabytes 1] [--workers 1 2 4] [--dtype bfloat16]

The checkpoint is that of a Llama, in two safetensors files with an index, of random bytes, in a
folder that is removed at the end; its pages are in the system's cache. Beside it stands NumPy,
which reads the same files into memory, whole. Memory is the most that was resident in a process
while the weights were loaded, and what of it was there before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 known to NumPy
import numpy as np

import tvm_ipc
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.spmd import ShardSpec

HIDDEN, INNER, KEYS, VOCABULARY = 2048, 5632, 512, 32000
MEBIBYTE = 1 << 20


def shapes(bytes_wanted: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Names, shapes and the axis along which ranks divide them, of weights of 16 bits."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0
    count = 2 * VOCABULARY * HIDDEN
    layer = 0
    while count * 2 < bytes_wanted:
        one = [
            ("self_attn.q_proj", (HIDDEN, HIDDEN), 0),
            ("self_attn.k_proj", (KEYS, HIDDEN), 0),
            ("self_attn.v_proj", (KEYS, HIDDEN), 0),
            ("self_attn.o_proj", (HIDDEN, HIDDEN), 1),
            ("mlp.gate_proj", (INNER, HIDDEN), 0),
            ("mlp.up_proj", (INNER, HIDDEN), 0),
            ("mlp.down_proj", (HIDDEN, INNER), 1),
            ("input_layernorm", (HIDDEN,), None),
            ("post_attention_layernorm", (HIDDEN,), None),
        ]
        for name, shape, axis in one:
            yield f"model.layers.{layer}.{name}.weight", shape, axis
            count += int(np.prod(shape))
        layer += 1
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 0


def write(folder: Path, bytes_wanted: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Write a checkpoint in bfloat16; return what is in it."""
    draw = np.random.default_rng(0)
    found = {name: (shape, axis) for name, shape, axis in shapes(bytes_wanted)}
    names = list(found)
    index = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file, header, end = f"model-{number:05}-of-00002.safetensors", {}, 0
        for name in part:
            size = 2 * int(np.prod(found[name][0]))
            place = [end, end := end + size]
            header[name] = {"dtype": "BF16", "shape": found[name][0], "data_offsets": place}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in part:
                numbers = draw.integers(0, 1 << 14, found[name][0], np.uint16)  # all finite
                out.write(numbers.data)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return found


def memory(pid: int, what: str) -> float:
    """MiB that a process has, `VmRSS`, or had at most, `VmHWM`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(what)


def numpy_seconds(folder: Path) -> float:
    """Seconds in which NumPy reads all files."""
    start = time.perf_counter()
    whole = [np.fromfile(file, np.uint8) for file in sorted(folder.glob("*.safetensors"))]
    seconds = time.perf_counter() - start
    del whole
    return seconds


def measure(
    folder: Path, cuts: dict[str, ShardSpec], workers: int, threads: bool
) -> tuple[float, list[float], list[float]]:
    """Seconds, and of each process the MiB before, and at most."""
    with tvm_ipc.Session(workers, threads=threads) as session:
        # What is needed once is there before.
        small = dict(list(cuts.items())[-2:-1])
        tvm_ipc.load_weights(session, folder, small, ignore=["*"])
        pids = list(dict.fromkeys(session.pids))
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most from now on
        before = [memory(pid, "VmRSS") for pid in pids]
        start = time.perf_counter()
        weights = tvm_ipc.load_weights(session, folder, cuts)
        seconds = time.perf_counter() - start
        most = [memory(pid, "VmHWM") for pid in pids]
        del weights
    return seconds, before, most


def peaks(folder: str, workers: int) -> list[tuple[float, float]]:
    """The most MiB of each process while the weights of a language model are loaded.

    And how many more these are than before. The first process is the controller, in which worker 0
    is a thread.
    """
    with tvm_ipc.Session(workers) as session:
        before: dict[int, float] = dict.fromkeys(session.pids, 0.0)

        def heard(what: str) -> None:
            if what == "loading weights":
                for pid in before:
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most from now on
                    before[pid] = memory(pid, "VmRSS")

        model = tvm_ipc.models.load(folder, session, progress=heard)
        most = {pid: memory(pid, "VmHWM") for pid in before}
        del model
    return [(most[pid], most[pid] - before[pid]) for pid in before]


def in_a_process(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns, called in a process of its own, for the memory of that."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(function, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", default="bfloat16", help="that the program wants")
    parser.add_argument("--threads", action="store_true", help="workers are threads")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = write(folder, int(arguments.gigabytes * 1e9))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        cores = os.cpu_count()
        print(
            f"{size / 1e9:.2f} GB in {len(found)} weights, bfloat16 to {arguments.dtype}; ", end=""
        )
        print(f"{cores} cores; NumPy reads whole files")
        print("workers    GB/s   NumPy   MiB of each process: the part | before + while loading")
        for workers in arguments.workers:
            mesh = Mesh({"tp": workers})
            cuts = {
                name: ShardSpec(name, name, shape, arguments.dtype, mesh,
                          (Replica() if axis is None else Shard(axis),))
                for name, (shape, axis) in found.items()
            }  # fmt: skip
            given = (folder, cuts, workers, arguments.threads)
            rounds, by_numpy = [], []
            for _ in range(arguments.rounds):
                by_numpy.append(in_a_process(numpy_seconds, folder))
                rounds.append(in_a_process(measure, *given))
            speed = size / median(one[0] for one in rounds) / 1e9
            part = sum(one.bytes_per_rank or 0 for one in cuts.values()) / MEBIBYTE
            _, before, most = rounds[-1]
            shown = "  ".join(f"{b:.0f} + {m - b:.0f}" for b, m in zip(before, most, strict=True))
            numpys = size / median(by_numpy) / 1e9
            print(f"{workers:7} {speed:7.2f} {numpys:7.2f} {part:31.0f} | {shown}")
            if len(most) > 1:
                ratio = most[0] / max(most[1:])
                print(f"        the controller's most is {ratio:.2f} times that of a worker")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
