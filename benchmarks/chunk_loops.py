# SPDX-License-Identifier: Apache-2.0
"""The compile time, size and run time of programs in chunks, unrolled and as a loop.

    python benchmarks/chunk_loops.py [--runs N] [--json results.json]

An all-gather and a matmul are pipelined in S chunks between two workers. The first table has the
compile time and the size of both forms. The second one has their run times for 4 and 8 chunks of
several sizes, measured in turn in one session, and the ratio. The threshold `MOST_UNROLLED` of
`tvm_ipc.transform.overlap.chunk_loops` comes from these tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from report import layout, machine
from tvm import relax
from tvm.relax import op

import tvm_ipc
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.transform.overlap import chunk_loops

CHUNKS = (4, 8, 16, 64, 1024)
#: Rows of a rank in a chunk, columns of x, and columns of the weight.
SHAPES = ((16, 128, 128), (64, 256, 256), (64, 512, 512), (128, 512, 512))
#: The most chunks that the compiler unrolls in this benchmark: compiling more takes minutes.
MOST_UNROLLED = 64


@dataclass(frozen=True)
class Compiled:
    """Seconds to compile a program, and the lines of its executable."""

    chunks: int
    form: str
    seconds: float
    lines: int


@dataclass(frozen=True)
class Run:
    """Seconds of a run of both forms."""

    chunks: int
    shape: tuple[int, int, int]
    unrolled: float
    loop: float


@contextmanager
def unrolling(most: int) -> Iterator[None]:
    """Unroll so many chunks at most."""
    before, chunk_loops.MOST_UNROLLED = chunk_loops.MOST_UNROLLED, most  # type: ignore[misc]
    try:
        yield
    finally:
        chunk_loops.MOST_UNROLLED = before  # type: ignore[misc]


def program(chunks: int, rows: int, inner: int, columns: int, form: str) -> Any:
    """Compile a matmul of gathered rows in chunks."""
    mesh = Mesh({"d": 2})
    x = relax.Var("x", relax.TensorType((chunks, 2, rows, inner), "float32"))
    w = relax.Var("w", relax.TensorType((inner, columns), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            mine = builder.emit(place(x, mesh, {"d": Shard(1)}))
            whole = builder.emit(place(mine, mesh, {"d": Replica()}))
            y = builder.emit(op.matmul(whole, w))
            out = builder.emit_output(place(y, mesh, {"d": Replica()}, stream=0))
        builder.emit_func_output(out)
    with unrolling(chunks if form == "unrolled" else 0):
        pipeline = tvm_ipc.get_pipeline("llvm", 2)
        return tvm.compile(builder.get(), "llvm", relax_pipeline=pipeline)


def compile_times() -> Iterator[Compiled]:
    program(4, *SHAPES[0], "loop")  # the first one loads TVM's compiler
    for chunks in CHUNKS:
        for form in ("unrolled", "loop"):
            if form == "unrolled" and chunks > MOST_UNROLLED:
                continue
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                lines = len(program(chunks, *SHAPES[0], form).as_text().splitlines())
                seconds.append(time.perf_counter() - begin)
            yield Compiled(chunks, form, min(seconds), lines)


def run_times(runs: int) -> Iterator[Run]:
    for chunks in CHUNKS[:2]:
        for shape in SHAPES:
            rows, inner, columns = shape
            with tvm_ipc.Session(num_workers=2) as session:
                programs = [program(chunks, *shape, form) for form in ("unrolled", "loop")]
                mains = [session.load_vm_module(compiled)["main"] for compiled in programs]
                x = session.empty((chunks, 1, rows, inner), "float32")
                w = session.put(np.ones((inner, columns), "float32"))
                seconds: list[list[float]] = [[], []]
                for number in range(runs + 1):
                    for k in (0, 1) if number % 2 else (1, 0):
                        begin = time.perf_counter()
                        for _ in range(10):
                            mains[k](x, w)
                        session.sync()
                        if number:
                            seconds[k].append((time.perf_counter() - begin) / 10)
                yield Run(chunks, shape, *map(statistics.median, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="how often 10 calls are timed")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    compiled = list(compile_times())
    table = [["chunks", "form", "compile time", "lines"]]
    table += [[str(c.chunks), c.form, f"{c.seconds:.3f} s", str(c.lines)] for c in compiled]
    print(layout(table))
    ran = list(run_times(options.runs))
    table = [["chunks", "rows, inner, columns", "unrolled", "loop", "loop / unrolled"]]
    for run in ran:
        times = [f"{seconds * 1e3:.3f} ms" for seconds in (run.unrolled, run.loop)]
        ratio = f"{run.loop / run.unrolled:.3f}"
        table.append([str(run.chunks), ", ".join(map(str, run.shape)), *times, ratio])
    print(layout(table))
    if options.json is not None:
        results = {"compiled": [*map(asdict, compiled)], "runs": [*map(asdict, ran)]}
        options.json.write_text(json.dumps({"machine": machine(), **results}, indent=1))


if __name__ == "__main__":
    main()
