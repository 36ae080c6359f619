# SPDX-License-Identifier: Apache-2.0
"""Are matrix products as fast as a BLAS can make them, and never slower than TVM's own?

    python benchmarks/blas.py                 # all shapes, one and two threads
    python benchmarks/blas.py --threads 1 --sizes 64 256 1024
    python benchmarks/blas.py --threshold     # where a call of the BLAS begins to be worth it
    python benchmarks/blas.py --llama         # the linear layers of a Llama, against PyTorch's
    python benchmarks/blas.py --llama --threads 1 --dtypes float32 --rows 128 512

Contestants, in one process and in turns, so that what else the machine does meets all of them:

- ours: functions compiled with `tvm_ipc.get_pipeline`, called in the Relax VM by TVM's
  `time_evaluator`, as a compiled program is, output allocation included;
- NumPy's OpenBLAS with as many threads, called from Python, into an array that is there, on the
  same values; 16-bit floats, which it does not have, as float32; bias and ReLU in place;
- TVM: the same functions with TVM's own pipeline for this processor, called like ours.

`--llama` compares with PyTorch instead, which multiplies into a tensor that is there, too. Weights
are stored as those of its linear layers, whole and for each of 2 and 4 tensor-parallel workers.
Each is one of several that no cache holds together. Times of one thread are processor time.

Every round gives one ratio, and the table shows medians. TVM's kernel is measured where a call
takes less than `--patience` seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (64, 128, 256, 512, 1024, 2048)
DTYPES = ("float32", "bfloat16")
KINDS = ("matmul", "linear")
#: Columns and rows of the weights of a Llama: heads, keys, MLP, vocabulary, of 1, 2 and 4 workers.
LLAMA = (
    *((1024, 1024), (1024, 512), (1024, 3584), (3584, 1024), (1024, 16000)),
    *((512, 1024), (1024, 256), (1024, 1792), (1792, 1024), (1024, 8000)),
    *((256, 1024), (1024, 128), (1024, 896), (896, 1024), (1024, 4000)),
)
LLAMA_ROWS = (16, 32, 64, 128, 512, 2048)
#: With as many multiplications, calls are too slow to be repeated; logits of so many rows are rare.
LLAMA_MOST = 2048 * 1024 * 3584
#: Weights of one shape, which are multiplied one after another: no cache holds them, as in a model.
COLD_BYTES = 64 << 20
SLICE = 0.004  # seconds of one contestant in one round
SLOW = 1.0  # seconds of a call that is made once

#: Makes so many calls, and returns seconds per call.
Timer = Callable[[int], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--threshold", action="store_true")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=list(LLAMA_ROWS))
    parser.add_argument("--json", help="also write the measurements to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measured = threshold_rows if options.threshold else llama_rows if options.llama else rows
        for row in measured(options):
            print(json.dumps(row), flush=True)
        return
    results = []
    table = SMALL if options.threshold else AGAINST_TORCH if options.llama else FULL
    for threads in options.threads[:1] if options.threshold else options.threads:
        results += run_child(threads, table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    if options.llama:
        summarise_llama(results)
    elif not options.threshold:
        summarise(results)


def run_child(threads: int, table: Table) -> list[dict[str, Any]]:
    """Measure with a number of threads, which the libraries read when they are loaded."""
    names = ("TVM_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    command = [sys.executable, *sys.argv, "--child"]
    print(f"\n{threads} thread{'s' * (threads > 1)}" if table is not SMALL else "")
    print(table.head)
    found = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            row = {**json.loads(line), "threads": threads}
            found.append(row)
            print(table.line(row), flush=True)
    if child.returncode:
        sys.exit(child.returncode)
    return found


# ---- measuring, in the child ----------------------------------------------------------------


def rows(options: Any) -> Iterator[dict[str, Any]]:
    for dtype in options.dtypes:
        shapes = [(m, n, n) for n in options.sizes for m in (n, 1)]
        cases = [(kind, shape) for kind in KINDS for shape in shapes]
        ours, theirs = compiled(cases, dtype, None), compiled(cases, dtype, "tvm")
        last: dict[tuple[str, bool], float] = {}  # seconds of TVM at the last size
        for kind, shape in cases:
            row = {"kind": kind, "m": shape[0], "k": shape[1], "n": shape[2], "dtype": dtype}
            numpy_call, arguments = data(kind, shape, dtype)
            name = label(kind, shape)
            timers = {"ours": in_vm(ours, name, arguments), "numpy": in_python(numpy_call)}
            # From one size to the next, calls get eight (four) times as slow, and leave a cache.
            family = (kind, shape[0] == 1)
            if last.get(family, 0.0) * (6 if family[1] else 12) < options.patience:
                timers["tvm"] = in_vm(theirs, name, arguments)
            times = measure(timers, options.rounds)
            row |= {who: statistics.median(found) for who, found in times.items()}
            for who in times.keys() - {"ours"}:
                row["vs_" + who] = ratio(times[who], times["ours"])
            last[family] = row.get("tvm", math.inf)
            yield row


def threshold_rows(options: Any) -> Iterator[dict[str, Any]]:
    dims = (1, 2, 4, 8, 16, 32)
    shapes = [(m, k, n) for m in dims for k in dims for n in dims if m * k * n <= 4096]
    for dtype in options.dtypes:
        cases = [("matmul", shape) for shape in shapes]
        ours, theirs = compiled(cases, dtype, 0), compiled(cases, dtype, "tvm")
        for kind, shape in cases:
            _, arguments = data(kind, shape, dtype)
            name = label(kind, shape)
            timers = {
                who: in_vm(vm, name, arguments) for who, vm in (("ours", ours), ("tvm", theirs))
            }
            times = measure(timers, options.rounds)
            m, k, n = shape
            found = ratio(times["tvm"], times["ours"])
            yield {"m": m, "k": k, "n": n, "dtype": dtype, "ratio": found}


def llama_rows(options: Any) -> Iterator[dict[str, Any]]:
    import torch
    import tvm

    threads = int(os.environ["TVM_NUM_THREADS"])
    torch.set_num_threads(threads)
    # Processor time of one thread, of which other programs on the machine take nothing.
    clock = time.process_time if threads == 1 else time.perf_counter
    for dtype in options.dtypes:
        ours = compiled_linear_layers(LLAMA, dtype)
        for k, n in LLAMA:
            most = max(1, COLD_BYTES // (4 * k * n))
            weights = [torch.randn(n, k).to(getattr(torch, dtype)) for _ in range(most)]
            own_weights = [tvm.runtime.from_dlpack(w) for w in weights]
            function = ours[f"linear_{k}_{n}"]
            for m in options.rows:
                if m * k * n > LLAMA_MOST:
                    continue
                copies = min(most, max(1, LLAMA_MOST // (m * k * n)))
                x = torch.randn(m, k).to(weights[0].dtype)
                out = torch.empty(m, n, dtype=x.dtype)

                def linear(x: Any = x, out: Any = out, ws: Any = weights[:copies]) -> object:
                    return [torch.mm(x, w.T, out=out) for w in ws]

                own_x = tvm.runtime.from_dlpack(x)

                def in_machine(
                    call: Any = function, x: Any = own_x, ws: Any = own_weights[:copies]
                ) -> None:
                    for w in ws:
                        call(x, w)

                with torch.inference_mode():
                    timers = {"ours": in_python(in_machine, clock)}
                    timers["torch"] = in_python(linear, clock)
                    times = measure(timers, options.rounds)
                row = {"m": m, "k": k, "n": n, "dtype": dtype}
                row |= {who: statistics.median(found) / copies for who, found in times.items()}
                yield row | {"vs_torch": ratio(times["torch"], times["ours"])}


def label(kind: str, shape: tuple[int, int, int]) -> str:
    return "_".join(map(str, (kind, *shape)))


def compiled(cases: list[tuple[str, Any]], dtype: str, how: int | str | None) -> Any:
    """Return a virtual machine with a function for each case.

    `how` is "tvm" for TVM's own pipeline, or the least work that the BLAS gets.
    """
    import tvm
    from tvm import relax

    import tvm_ipc
    from tvm_ipc.cpu import OffloadBLAS

    builder = relax.BlockBuilder()
    for kind, (m, k, n) in cases:
        x = relax.Var("x", relax.TensorType((m, k), dtype))
        w_shape = (n, k) if kind == "linear" else (k, n)
        parameters = [x, relax.Var("w", relax.TensorType(w_shape, dtype))]
        if kind == "linear":
            parameters.append(relax.Var("bias", relax.TensorType((n,), dtype)))
        with builder.function(label(kind, (m, k, n)), parameters):
            with builder.dataflow():
                if kind == "linear":
                    _, w, bias = parameters
                    y = builder.emit(relax.op.matmul(x, relax.op.permute_dims(w)))
                    y = builder.emit(relax.op.nn.relu(relax.op.add(y, bias)))
                else:
                    y = builder.emit(relax.op.matmul(*parameters))
                result = builder.emit_output(y)
            builder.emit_func_output(result)
    mod = builder.get()
    target = this_processor()
    if how == "tvm":
        executable = tvm.compile(mod, target)
    else:
        if how is not None:
            mod = OffloadBLAS(int(how))(mod)
        executable = tvm.compile(mod, target, relax_pipeline=tvm_ipc.get_pipeline(target, 1))
    return relax.VirtualMachine(executable, tvm.cpu())


def compiled_linear_layers(shapes: tuple[tuple[int, int], ...], dtype: str) -> Any:
    """Return a virtual machine with a function of any number of rows for each shape of weights."""
    import tvm
    from tvm import relax

    import tvm_ipc

    builder = relax.BlockBuilder()
    for k, n in shapes:
        rows = tvm.tirx.Var("rows", "int64")
        x = relax.Var("x", relax.TensorType((rows, k), dtype))
        w = relax.Var("w", relax.TensorType((n, k), dtype))
        with builder.function(f"linear_{k}_{n}", [x, w]):
            with builder.dataflow():
                y = builder.emit(relax.op.matmul(x, relax.op.permute_dims(w)))
                result = builder.emit_output(y)
            builder.emit_func_output(result)
    target = this_processor()
    pipeline = tvm_ipc.get_pipeline(target, 1)
    executable = tvm.compile(builder.get(), target, relax_pipeline=pipeline)
    return relax.VirtualMachine(executable, tvm.cpu())


def this_processor() -> Any:
    import tvm

    cpu = tvm.get_global_func("target.llvm_get_system_cpu")()
    return tvm.target.Target({"kind": "llvm", "mcpu": str(cpu)})


def data(
    kind: str, shape: tuple[int, int, int], dtype: str
) -> tuple[Callable[[], object], list[Any]]:
    """Return NumPy's call, and the arguments of ours."""
    import ml_dtypes
    import numpy as np
    import tvm

    m, k, n = shape
    random = np.random.default_rng(0)
    native = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    wanted: list[tuple[int, ...]] = [(m, k), (n, k) if kind == "linear" else (k, n)]
    wanted += [(n,)] if kind == "linear" else []
    arrays = [random.standard_normal(s, "float32").astype(native) for s in wanted]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    x, w, *bias = [array.astype("float32") for array in arrays]
    out = np.empty((m, n), "float32")

    def multiply() -> object:
        return np.matmul(x, w, out=out)

    def linear() -> object:
        np.matmul(x, w.T, out=out)
        np.add(out, bias[0], out=out)
        return np.maximum(out, 0, out=out)

    return (linear if kind == "linear" else multiply), arguments


def in_vm(machine: Any, name: str, arguments: list[Any]) -> Timer:
    """Return what measures calls of a compiled function."""
    import tvm

    def run(number: int) -> float:
        evaluate = machine.time_evaluator(name, tvm.cpu(), number=number, repeat=1)
        return float(evaluate(*arguments).mean)

    return run


def in_python(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Return what measures calls of a Python function."""

    def run(number: int) -> float:
        start = clock()
        for _ in range(number):
            call()
        return (clock() - start) / number

    return run


#: Threads of a BLAS and of TVM look for more work for some milliseconds after a contestant's turn,
#: and would do so on the cores of the next one.
PAUSE = 0.1


def measure(timers: dict[str, Timer], rounds: int) -> dict[str, list[float]]:
    """Return seconds per call of each contestant, one of each round."""
    first = {who: timer(1) for who, timer in timers.items()}
    # What takes so long goes through all weathers at once; it is not repeated.
    slow = {who: took > SLOW for who, took in first.items()}
    again = {who: timer(1) for who, timer in timers.items() if not slow[who]}
    numbers = {who: max(1, int(SLICE / took)) for who, took in again.items()}
    found: dict[str, list[float]] = {who: [] for who in timers}
    for _ in range(rounds):
        for who, timer in timers.items():
            time.sleep(PAUSE)
            found[who].append(first[who] if slow[who] else timer(numbers[who]))
    return found


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Return how many times ours is as fast, round by round."""
    return statistics.median(x / y for x, y in zip(theirs, ours, strict=True))


# ---- showing, in the parent -----------------------------------------------------------------


def full_line(row: dict[str, Any]) -> str:
    shape = f"{row['m']}x{row['k']}x{row['n']}"
    speed = 2e-9 * row["m"] * row["k"] * row["n"] / row["ours"]
    tvm = f"{row['vs_tvm']:7.1f}x" if "vs_tvm" in row else "   (slow)"
    return (
        f"{row['kind']:10} {shape:>16} {row['dtype']:>9} {row['ours'] * 1e6:8.2f}us {speed:8.1f} "
        f"{row['vs_numpy']:7.2f}x {tvm}"
    )


def small_line(row: dict[str, Any]) -> str:
    m, k, n = row["m"], row["k"], row["n"]
    return f"{m:4} {k:4} {n:4} {row['dtype']:>9} {m * k * n:6} {row['ratio']:10.2f}"


def torch_line(row: dict[str, Any]) -> str:
    work = 2e-9 * row["m"] * row["k"] * row["n"]
    return (
        f"{row['k']:6} {row['n']:6} {row['m']:6} {row['dtype']:>9} {work / row['ours']:10.1f} "
        f"{work / row['torch']:10.1f} {row['vs_torch']:7.2f}x"
    )


@dataclass(frozen=True)
class Table:
    head: str
    line: Callable[[dict[str, Any]], str]


FULL = Table(
    f"{'':10} {'shape':>16} {'type':>9} {'ours':>10} {'GFLOP/s':>8} {'NumPy':>8} {'TVM':>8}",
    full_line,
)
SMALL = Table(f"{'m':>4} {'k':>4} {'n':>4} {'type':>9} {'work':>6} {'TVM / ours':>10}", small_line)
AGAINST_TORCH = Table(
    f"{'k':>6} {'n':>6} {'rows':>6} {'type':>9} {'GFLOP/s':>10} {'PyTorch':>10} {'ratio':>8}",
    torch_line,
)


def summarise_llama(results: list[dict[str, Any]]) -> None:
    print()
    keys = sorted({(row["threads"], row["dtype"], row["m"]) for row in results})
    for threads, dtype, m in keys:
        ratios = [
            row["vs_torch"]
            for row in results
            if (row["threads"], row["dtype"], row["m"]) == (threads, dtype, m)
        ]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(
            f"{threads} threads, {dtype}, {m:4} rows: {mean:.2f}x PyTorch (geometric mean of "
            f"{len(ratios)} shapes), at least {min(ratios):.2f}x"
        )


def summarise(results: list[dict[str, Any]]) -> None:
    print()
    ok = True
    for threads in sorted({row["threads"] for row in results}):
        group = [row for row in results if row["threads"] == threads]
        mean = math.exp(statistics.fmean(math.log(row["vs_numpy"]) for row in group))
        worst = min((row for row in group if "vs_tvm" in row), key=lambda row: row["vs_tvm"])
        large = [row["vs_tvm"] for row in group if row["m"] == 1024 and "vs_tvm" in row]
        print(f"{threads} threads: {mean:.2f}x NumPy's BLAS (geometric mean of {len(group)} cases)")
        print(f"    least against TVM: {full_line(worst)}")
        if large:
            print(f"    against TVM at 1024: {min(large):.0f}x to {max(large):.0f}x")
        if threads == 1:
            ok = mean >= 0.95 and min(large, default=20) >= 20
        ok = ok and worst["vs_tvm"] >= 1
    print("wanted: 0.95x NumPy with one thread, 20x TVM at 1024, never slower than TVM:", end=" ")
    print("held" if ok else "NOT held")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
