# SPDX-License-Identifier: Apache-2.0
"""Compiles, runs, compares, and prints what happens while it happens."""

from __future__ import annotations

import json
import math
import os
from importlib.metadata import version
from typing import Any, Final

import ml_dtypes
import numpy as np
import tvm_ffi

from tvm_ipc.demo.lowering import Compiled, compile_module
from tvm_ipc.demo.mlp import Array, build_module, make_data, numpy_dtype, numpy_result
from tvm_ipc.demo.options import Options
from tvm_ipc.demo.report import Report, count, duration, size
from tvm_ipc.demo.run import Run, run
from tvm_ipc.errors import IPCError

#: What rounding explains of a float32 sum of thousands of terms, relative to the largest one.
_SUM_ERROR: Final = 1e-5


def lead(options: Options, report: Report) -> int:
    """Run the demo and return its exit code: 0 if every result is right."""
    n = options.workers
    load = os.getloadavg()[0]
    _check_memory(options)
    report.step("load", f"apache-tvm {version('apache-tvm')}, tvm-ipc {version('tvm-ipc')}")
    report.line(
        "model",
        f"{count(options.layers, 'layer')} of {options.hidden} -> {options.inner} -> "
        f"{options.hidden}, batch {options.batch}, {options.dtype}, tensor-parallel",
    )
    single = compile_module(build_module(options, 1), options.strategy)
    compiled = compile_module(build_module(options, n), options.strategy) if n > 1 else single
    programs = f"for one worker and for one of {n}" if n > 1 else "for one worker"
    report.step("compile", f"{programs}: llvm, {compiled.processor}")
    _explain_passes(report, options, compiled)
    x, weights = make_data(options)
    expected = numpy_result(x, weights)
    total = size(sum(weight.nbytes for weight in weights))
    report.step("NumPy", f"{total} of weights, the result in float64")

    def run_on(workers: int, executable: Any) -> Run:
        return run(
            executable,
            x,
            weights,
            workers=workers,
            threads=options.threads,
            steps=options.steps,
        )

    one = many = run_on(1, single.executable)
    report.step("1 worker", f"started, all weights, {count(one.steps, 'step')}, ended")
    if n > 1:
        many = run_on(n, compiled.executable)
        where = "threads" if options.threads else "processes"
        report.step(
            count(n, "worker"),
            f"{where} started, 1/{n} of the weights each, {count(many.steps, 'step')}, ended",
        )
    report.gap()
    right = _compare(report, options, one, many, expected)
    _explain_time(report, options, compiled, one, many)
    if load > len(os.sched_getaffinity(0)):
        report.line(
            "", f"other programs kept the cores busy (load {load:.1f}): quiet, it is faster"
        )
    _explain_memory(report, options, compiled, many)
    report.line("total", f"{report.seconds:.1f} s")
    report.gap()
    _suggest(report, options)
    return 0 if right else 1


def allowed_difference(options: Options, largest: float) -> float:
    """Return how far two right results may be apart, whose largest value is given."""
    # A layer rounds a few times to the model's type; errors of layers add like random steps.
    limits: Any = ml_dtypes.finfo
    epsilon = float(limits(numpy_dtype(options.dtype)).eps)
    return largest * (2 * epsilon * math.sqrt(options.layers) + _SUM_ERROR)


def _check_memory(options: Options) -> None:
    """Refuse what cannot fit, before it is tried."""
    # The weights as they are, in parts, in the workers and on the way; one layer in float64.
    width = numpy_dtype(options.dtype).itemsize
    rows = 4 * options.batch * (options.hidden + options.inner)
    need = options.weights * 4 * width + (options.weights // options.layers + rows) * 8
    have = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())["physical_memory"]
    if need > have:
        raise IPCError(
            f"the model would need about {size(need)} of memory and the machine has {size(have)}; "
            "take less --layers, --hidden or --batch"
        )


def _explain_passes(report: Report, options: Options, compiled: Compiled) -> None:
    if options.workers == 1:
        report.line("", "no all-reduces: there is nobody to share the work with")
        return
    report.line(
        "",
        f"IPCAllReduceRewrite: {count(compiled.allreduces, 'all-reduce')} in the module, "
        f"{compiled.rewritten} rewritten ({options.strategy.name.lower()})",
    )
    ipc, other = compiled.ipc_storages, compiled.other_storages
    report.line(
        "",
        f"StaticPlanBlockMemory: {count(len(ipc), 'storage')} in ipc_memory ({size(sum(ipc))}), "
        f"{len(other)} elsewhere ({size(sum(other))})",
    )


def _compare(report: Report, options: Options, one: Run, many: Run, expected: Array) -> bool:
    """Print how far the results are from each other, and return whether that is right."""
    first = many.results[0]
    same = all(result.tobytes() == first.tobytes() for result in many.results)
    to_one, to_numpy = _distance(first, one.results[0]), _distance(first, expected)
    largest = float(np.abs(expected).max())
    allowed = allowed_difference(options, largest)
    # A difference that is not a number is not close.
    close = to_one <= allowed and to_numpy <= allowed
    differences = f"{to_numpy:.1e} to NumPy"
    if options.workers > 1:
        differences = f"{to_one:.1e} to one worker, {differences}"
    report.line("result", f"max difference {differences}: {'right' if close else 'WRONG'}")
    report.line("", f"values up to {largest:.2f}; rounding explains up to {allowed:.1e}")
    if options.workers > 1:
        bits = "the same bits" if same else "DIFFERENT BITS"
        report.line("", f"{bits} on all {options.workers} workers")
    return close and same


def _distance(a: Array, b: Array) -> float:
    return float(np.abs(a.astype("float64") - b.astype("float64")).max())


def _explain_time(
    report: Report, options: Options, compiled: Compiled, one: Run, many: Run
) -> None:
    n, cores = options.workers, len(os.sched_getaffinity(0))
    if many.allreduce is None:
        report.line("time", f"{duration(one.step)} a step (median of {many.steps})")
        return
    report.line(
        "time",
        f"{duration(many.step)} a step (median of {many.steps}), {duration(one.step)} with one "
        f"worker: {one.step / many.step:.1f}x",
    )
    report.line("", f"a worker uses one core; {n} workers share {count(cores, 'core')}")
    row = options.batch * options.hidden * numpy_dtype(options.dtype).itemsize
    calls = compiled.allreduces
    report.line(
        "",
        f"an all-reduce of {size(row)} takes {duration(many.allreduce)} in a row of them; "
        f"{calls} would be {calls * many.allreduce / many.step:.1%} of a step",
    )


def _explain_memory(report: Report, options: Options, compiled: Compiled, many: Run) -> None:
    if not compiled.ipc_storages:
        return
    arena = many.arena
    planned = sum(compiled.ipc_storages)
    report.line(
        "memory",
        f"a worker used {size(arena['peak_in_use'])} of ipc_memory, {size(planned)} planned, in a "
        "memfd that all map",
    )
    report.line("", f"({size(arena['committed'])} of it so far, at most {size(arena['limit'])})")


def _suggest(report: Report, options: Options) -> None:
    """Name what the user has not tried yet."""
    ideas = [
        ("--workers 4", options.workers == 2),
        ("--workers 2", options.workers == 1),
        ("--dtype bfloat16", options.dtype == "float32"),
        ("--batch 256", options.batch == 16),
        ("--threads", not options.threads),
    ]
    label = "try next"
    for text in [text for text, fits in ideas if fits][:3]:
        report.line(label, f"tvm-ipc demo {text}")
        label = ""
    report.line(label, "tvm-ipc doctor")
