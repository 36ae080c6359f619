# SPDX-License-Identifier: Apache-2.0
"""How much of a collective hides behind its matmul, and does the cost model choose well?

    python benchmarks/overlap.py                   # some minutes
    python benchmarks/overlap.py --only sweep --rounds 5

Two workers, float32. First a calibration is measured, once, without any of the programs below. It
alone decides for each program whether it is overlapped, and in how many chunks.

    efficiency   links on which the communication takes 25%, 50% and 100% of the matmul's time.
                 Effective communication is the time of a program less that of its matmul alone; the
                 efficiency is 1 less its ratio to that of the program without overlap
    sweep        shapes and links, plain shared memory among them: what was chosen against no
                 overlap, and against the best of all numbers of chunks
    memory       bytes that a rank allocates where it gathers, and where it reads from peers

All programs of a case take turns in rounds; who begins changes. Times are those of the slower
worker, figures are medians over rounds, or of ratios within rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import tvm

import tvm_ipc
import tvm_ipc.cpu.openblas_discovery
from tvm_ipc.calibration import Calibration
from tvm_ipc.errors import IPCError
from tvm_ipc.tools.bench import overlap, overlap_programs
from tvm_ipc.tools.bench.calibrate_cost_model import calibrate
from tvm_ipc.tools.bench.timing_session import TimingSession, use_real_time_priority
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.overlap.cost_model import Workload

RANKS = 2
KINDS = ("allgather", "reduce_scatter")
SHARES = (0.25, 0.5, 1.0)
#: Rows of a worker, inner extent, columns, and whether the BLAS multiplies.
EFFICIENCY = ((2048, 1024, 1024, True), (512, 1024, 1024, True), (128, 256, 256, False))
ROWS = (48, 200, 640)
EXTENTS = ((320, 320), (384, 1536), (1536, 384), (768, 768))
#: Bytes a second, and seconds; the first one is no link.
LINKS = ((0.0, 0.0), (4e9, 5e-6), (1e9, 2e-5), (2.5e8, 5e-5))
MOST_CHUNKS = 64
#: What is asked for: of the time without overlap, of the best, and in which share of the cases.
NEVER_SLOWER, NEARLY_BEST, MOSTLY = 1.03, 1.10, 0.9
GOAL = 0.85


def moved(work: Workload) -> int:
    """Bytes that a rank receives."""
    width = work.inner if work.kind == "allgather" else work.columns
    return (work.ranks - 1) * (work.rows or 0) * (width or 0) * work.item_bytes


def with_link(base: Calibration, bandwidth: float, latency: float) -> Calibration:
    return dataclasses.replace(base, bandwidth=bandwidth, latency=latency)


def efficiency(base: Calibration, rounds: int) -> list[dict[str, Any]]:
    print("\nEfficiency: communication hidden, chosen by the cost model")
    print(f"{'':44}{'matmul':>9}{'without':>9}{'chosen':>9}{'':>10}{'hidden':>8}")
    found: list[dict[str, Any]] = []
    for rows, inner, columns, blas in EFFICIENCY:
        if blas and base.blas_matmul is None:
            continue
        for kind in KINDS:
            work = Workload(kind, RANKS, rows, inner, columns, 4, blas)
            with TimingSession(RANKS) as stage:
                alone = overlap.Programs(stage, work, []).compare(rounds)
                for share in SHARES:
                    link = (moved(work) / (share * median(alone.matmul)), 0.0)
                    choice = overlap.make_prediction(work, with_link(base, *link), []).choice
                    tried = [choice.chunks] if choice.overlaps else []
                    made = overlap.Programs(stage, work, tried)
                    stage.session.emulate_link(bandwidth=link[0])
                    times = made.compare(rounds)
                    stage.session.emulate_link()
                    hidden = times.efficiency(choice.chunks) if tried else 0.0
                    chosen = times.chunks[choice.chunks] if tried else times.plain
                    shape = f"{rows} x {inner} x {columns}{'' if blas else ', TVM'}"
                    every = (times.matmul, times.plain, chosen)
                    numbers = "".join(f"{median(one) * 1e3:9.2f}" for one in every)
                    print(
                        f"{kind:15}{shape:22}{share:6.0%} {numbers}  {choice.chunks:2} chunks"
                        f"{hidden or 0:8.0%}",
                        flush=True,
                    )
                    found.append(
                        {
                            "work": dataclasses.asdict(work),
                            "share": share,
                            "chunks": choice.chunks,
                            "efficiency": hidden,
                            "seconds": [median(one) for one in every],
                        }
                    )
    good = sum((one["efficiency"] or 0) >= GOAL for one in found)
    print(f"at least {GOAL:.0%} hidden: {good} of {len(found)}")
    return found


def sweep(base: Calibration, rounds: int) -> list[dict[str, Any]]:
    print("\nSweep: chosen against no overlap, and against the best number of chunks")
    print(f"{'':46}{'without':>9}{'chosen':>14}{'ratio':>8}{'best':>14}{'of best':>9}")
    found = []
    blas = base.blas_matmul is not None
    for kind in KINDS:
        for rows in ROWS:
            for inner, columns in EXTENTS:
                work = Workload(kind, RANKS, rows, inner, columns, 4, blas)
                tried = overlap.counts(work, MOST_CHUNKS)
                with TimingSession(RANKS) as stage:
                    made = overlap.Programs(stage, work, tried)
                    for link in LINKS:
                        stage.session.emulate_link(bandwidth=link[0], latency=link[1])
                        times = made.compare(rounds)
                        foretold = overlap.make_prediction(work, with_link(base, *link), tried)
                        found.append(one_of_sweep(work, link, times, foretold))
    worst = max(found, key=lambda one: one["ratio"])
    slower = sum(one["ratio"] > NEVER_SLOWER for one in found)
    best = sum(one["of_best"] <= NEARLY_BEST for one in found) / len(found)
    overlapped = [one["ratio"] for one in found if one["chosen"]]
    print(f"{len(found)} cases; overlap was chosen in {len(overlapped)}")
    if overlapped:
        print(f"their time of that without overlap: median {median(overlapped):.2f}")
    print(f"slower than {NEVER_SLOWER:.2f} of no overlap: {slower}; worst {worst['ratio']:.3f}")
    print(f"within {NEARLY_BEST - 1:.0%} of the best: {best:.0%} (goal {MOSTLY:.0%})")
    return found


def one_of_sweep(
    work: Workload,
    link: tuple[float, float],
    times: overlap.Comparison,
    foretold: overlap.Prediction,
) -> dict[str, Any]:
    choice = foretold.choice
    medians = {0: median(times.plain), **{n: median(t) for n, t in times.chunks.items()}}
    best = min(medians, key=lambda count: medians[count])
    ratio, of_best = times.ratio(choice.chunks), medians[choice.chunks] / medians[best]
    label = "no link" if not link[0] else f"{link[0] / 1e9:g} GB/s"
    mark = "  !" if ratio > NEVER_SLOWER or of_best > NEARLY_BEST else ""
    print(
        f"{work.kind:15}{work.rows:5} x {work.inner:4} x {work.columns:4}  {label:11}"
        f"{medians[0] * 1e3:9.3f}{medians[choice.chunks] * 1e3:9.3f} in{choice.chunks:2}"
        f"{ratio:8.3f}{medians[best] * 1e3:9.3f} in{best:2}{of_best:9.3f}{mark}",
        flush=True,
    )
    return {
        "work": dataclasses.asdict(work),
        "link": link,
        "chosen": choice.chunks,
        "best": best,
        "ratio": ratio,
        "of_best": of_best,
        "seconds": medians,
        "predicted": {0: foretold.plain, **foretold.chunks},
    }


def memory() -> list[dict[str, Any]]:
    """Bytes of the memory plan, by scope, of an all-gather and its matmul."""
    print("\nMemory of an all-gather and its matmul, planned for a rank, without its result")
    found = []
    blas = tvm_ipc.cpu.openblas_discovery.installed()
    for rows, inner, columns, _ in EFFICIENCY[:2]:
        work = Workload("allgather", RANKS, rows, inner, columns, 4, blas)
        for chunks in (0, 4):
            module = overlap_programs.variants(work, [chunks] if chunks else [])
            name = overlap_programs.overlapped(chunks) if chunks else overlap_programs.PLAIN
            with collect_report() as report:
                overlap_programs.build(tvm.IRModule({name: module[name]}), RANKS, blas)
            (plan,) = (one for one in report.plans if one.function == name)
            taken = sum(storage.bytes or 0 for storage in plan.storages)
            what = f"in {chunks} chunks" if chunks else "gathers first"
            print(f"{rows} x {inner} x {columns}  {what:14}{taken / 2**20:8.2f} MiB")
            found.append({"work": dataclasses.asdict(work), "chunks": chunks, "bytes": taken})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = ("efficiency", "sweep", "memory")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calibration", type=Path, help="one that was measured without a link")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    scheduled = "at real-time priority"
    try:
        use_real_time_priority()
    except IPCError as error:
        scheduled = f"like every program ({error})"
    print(f"scheduled {scheduled}; load {os.getloadavg()[0]:.1f}")
    if options.calibration is not None:
        base = Calibration.load(options.calibration, workers=RANKS)
    else:
        base = calibrate(RANKS, 0.0, 0.0)
    print(
        f"{base.machine}; a chunk {base.chunk * 1e6:.1f} us, the end {base.hide * 1e6:.1f} us, "
        f"waking {base.wake * 1e6:.0f} us, noise {base.noise:.1%}",
        flush=True,
    )
    found: dict[str, Any] = {"calibration": dataclasses.asdict(base)}
    if "efficiency" in options.only:
        found["efficiency"] = efficiency(base, options.rounds)
    if "sweep" in options.only:
        found["sweep"] = sweep(base, options.rounds)
    if "memory" in options.only:
        found["memory"] = memory()
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
