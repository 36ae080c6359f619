# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual and norm as one function, against its parts as the pipeline compiles them.

    python benchmarks/epilogue.py [--workers 2] [--rounds 9] [--json results.json]

A chain of such sums, each of the norm before it, compiled with `fuse_epilogue` and without: nothing
else is computed, and inputs lie where peers read them in both. Both run in the same session in
turns. The table has the medians of the time of one sum, and of the ratio of the two in a turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

import tvm_ipc

#: Sums in a command, so that what a command costs does not count.
CHAIN = 8
ROWS = (128, 512, 2048)
HIDDEN = (1024, 4096)
DTYPES = ("float32", "bfloat16")
Norm = Callable[[Any, Any], relax.Call]


def rms_norm(x: Any, weight: Any) -> relax.Call:
    """RMSNorm over the last axis."""
    return relax.op.nn.rms_norm(x, weight, [-1], 1e-5)


def layer_norm(x: Any, weight: Any) -> relax.Call:
    """LayerNorm over the last axis."""
    return relax.op.nn.layer_norm(x, weight, weight, [-1], 1e-5)


NORMS: dict[str, Norm] = {"rms_norm": rms_norm, "layer_norm": layer_norm}


def chain(rows: int, hidden: int, dtype: str, norm: Norm) -> tvm.IRModule:
    """Sums over workers, each added to the residual and normalised for the next one."""
    builder = relax.BlockBuilder()
    shape = relax.TensorType((rows, hidden), dtype)
    residual, weight = relax.Var("x", shape), relax.Var("w", relax.TensorType((hidden,), dtype))
    with builder.function("main", [residual, weight]):
        with builder.dataflow():
            y: Any = builder.emit(norm(residual, weight))
            x: Any = residual
            for _ in range(CHAIN):
                x = builder.emit(relax.op.add(x, relax.op.ccl.allreduce(y, "sum", False)))
                y = builder.emit(norm(x, weight))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def measure(session: Any, case: tuple[int, int, str, str], workers: int, rounds: int) -> Any:
    """Return the medians: seconds of one sum fused, in parts, and their ratio."""
    rows, hidden, dtype, norm = case
    module = chain(rows, hidden, dtype, NORMS[norm])
    target = tvm_ipc.cpu_target()
    programs = []
    for fuse_epilogue in (True, False):
        pipeline = tvm_ipc.get_pipeline(target, workers, fuse_epilogue=fuse_epilogue)
        program = tvm.compile(module, target, relax_pipeline=pipeline)
        programs.append(session.load_vm_module(program)["main"])
    random = np.random.default_rng(0)
    x, w = session.empty((rows, hidden), dtype), session.empty((hidden,), dtype)
    for tensor, shape in ((x, (rows, hidden)), (w, (hidden,))):
        values = random.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))
        for rank in range(workers):
            tensor.debug_copy_from(rank, values)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for program, found in zip(programs, times, strict=True):
            session.sync()
            start = time.perf_counter()
            program(x, w)
            session.sync()
            if turn:  # the first one allocates
                found.append((time.perf_counter() - start) / (CHAIN + 1))
    fused, parts = times
    ratio = statistics.median(b / a for a, b in zip(fused, parts, strict=True))
    return statistics.median(fused), statistics.median(parts), ratio


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = []
    with tvm_ipc.Session(options.workers, threads=True) as session:
        for norm in NORMS:
            # TVM has no LayerNorm of bfloat16.
            for dtype in DTYPES[: 1 if norm == "layer_norm" else None]:
                for rows in ROWS:
                    for hidden in HIDDEN:
                        case = (rows, hidden, dtype, norm)
                        fused, parts, ratio = measure(
                            session, case, options.workers, options.rounds
                        )
                        what = f"{norm:10} {dtype:8} {rows:5} x {hidden:<5}"
                        taken = f"fused {fused * 1e6:8.0f} us  parts {parts * 1e6:8.0f} us"
                        print(f"{what} {taken}  ratio {ratio:5.2f}", flush=True)
                        found.append((*case, fused, parts, ratio))
    ratios = [one[-1] for one in found]
    print(f"ratio: least {min(ratios):.2f}, median {statistics.median(ratios):.2f}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
