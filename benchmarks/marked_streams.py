# SPDX-License-Identifier: Apache-2.0
"""Does a mark for streams ever make a program slower when the cost model is asked?

    python benchmarks/marked_streams.py                    # some minutes
    python benchmarks/marked_streams.py --rounds 5 --only AG_matmul

Two workers, float32. Each program computes a matmul and a collective. It runs without a mark,
without a mark in 2, 4 and 8 chunks of `OverlapCommunication`, with a mark that is always honoured,
and with a mark about which the cost model is asked. The calibration is measured once, without a
link and without any of these programs.

All programs of a case take turns in rounds; each round starts with another one. Times are those of
the slower worker. The figures are medians over the rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op

import tvm_ipc
import tvm_ipc.cpu.openblas_discovery
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.tools.bench.calibrate_cost_model import calibrate
from tvm_ipc.tools.bench.timing_session import TimingSession
from tvm_ipc.transform import collect_report

RANKS = 2
#: Bytes a second, and seconds; the last one is no link.
LINKS = ((1e8, 2e-5), (3e8, 2e-5), (1e9, 2e-5), (0.0, 0.0))
OVERLAP = (2, 4, 8)
#: Goals: the time of that without a mark, and the speed of the best of `OVERLAP`.
NEVER_SLOWER, OF_BEST = 1.03, 0.9
MESH, ALL = Mesh({"d": RANKS}), {"d": Replica()}


def program(shapes: list[tuple[int, ...]], body: Callable[..., Any]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{k}", relax.TensorType(s, "float32")) for k, s in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, *params), "out")
        builder.emit_func_output(out)
    return builder.get()


def gather_matmul(stream: int | None, rows: int, inner: int, columns: int) -> tvm.IRModule:
    def body(emit: Any, x: Any, w: Any) -> Any:
        whole = emit(place(emit(place(x, MESH, {"d": Shard(1)})), MESH, ALL))
        return place(emit(op.matmul(whole, w)), MESH, ALL, stream=stream)

    return program([(4, RANKS, rows // 4, inner), (inner, columns)], body)


def ring_matmul(stream: int | None, rows: int, inner: int, columns: int) -> tvm.IRModule:
    def body(emit: Any, x: Any, w: Any) -> Any:
        whole = emit(place(emit(place(x, MESH, {"d": Shard(0)})), MESH, ALL))
        return place(emit(op.matmul(whole, w)), MESH, ALL, stream=stream)

    return program([(RANKS * rows, inner), (inner, columns)], body)


def matmul_reduced(to: Any) -> Callable[..., tvm.IRModule]:
    def make(stream: int | None, rows: int, inner: int, columns: int) -> tvm.IRModule:
        def body(emit: Any, x: Any, w: Any) -> Any:
            left, right = (
                emit(place(x, MESH, {"d": Shard(2)})),
                emit(place(w, MESH, {"d": Shard(0)})),
            )
            return place(emit(op.matmul(left, right)), MESH, to, stream=stream)

        return program([(4, RANKS * rows // 4, RANKS * inner), (RANKS * inner, columns)], body)

    return make


def matmul_gathered(stream: int | None, rows: int, inner: int, columns: int) -> tvm.IRModule:
    def body(emit: Any, x: Any, w: Any) -> Any:
        mine = emit(op.matmul(emit(place(x, MESH, {"d": Shard(1)})), w))
        return place(mine, MESH, ALL, stream=stream)

    return program([(4, RANKS * rows // 4, inner), (inner, columns)], body)


#: The programs, and the axis that is marked.
PROGRAMS: dict[str, tuple[Callable[..., tvm.IRModule], int]] = {
    "AG_matmul": (gather_matmul, 0),
    "AG_matmul_P2p": (ring_matmul, 0),
    "matmul_AR": (matmul_reduced(ALL), 0),
    "matmul_RS": (matmul_reduced({"d": Shard(1)}), 0),
    "AG_after": (matmul_gathered, 0),
}
#: Rows of a worker, inner extent, columns.
SHAPES = ((512, 512, 512), (512, 256, 1024), (128, 512, 128))


class Case:
    """The programs of one shape and one link."""

    def __init__(
        self, timing: TimingSession, name: str, shape: tuple[int, int, int], *, blas: bool
    ) -> None:
        self._timing, self._shape, self._blas = timing, shape, blas
        self._make, self._axis = PROGRAMS[name]
        self._fixed = {"plain": self._load(None), "marked": self._load(self._axis)}
        for chunks in OVERLAP:
            self._fixed[f"overlap={chunks}"] = self._load(None, overlap=chunks)
        params = self._lowered["main"].params
        self._arguments = [timing.tensor([int(n) for n in p.ty.shape.values]) for p in params]

    def _load(self, stream: int | None, **options: Any) -> Any:
        module = self._make(stream, *self._shape)
        with collect_report() as report:
            pipeline = tvm_ipc.get_pipeline(tvm_ipc.cpu_target(), RANKS, blas=self._blas, **options)
            executable = tvm.compile(module, tvm_ipc.cpu_target(), relax_pipeline=pipeline)
        self.decisions = report.decisions
        self._lowered = tvm_ipc.spmd.LowerPlacements(streams=None)(module)
        return self._timing.session.load_vm_module(executable)["main"]

    def run(self, calibration: Calibration, rounds: int) -> tuple[dict[str, float], str]:
        """Return the ratios of times to that without a mark, and the decision of the cost model."""
        asked = self._load(self._axis, overlap=calibration)
        (mark,) = [one for one in self.decisions if one.subject.startswith("stream=")]
        self._timing.session.emulate_link(
            bandwidth=calibration.bandwidth, latency=calibration.latency
        )
        functions = {**self._fixed, "asked": asked}
        times = self._timing.interleaved(
            {name: (function, self._arguments) for name, function in functions.items()}, rounds
        )
        self._timing.session.emulate_link()
        ratios = {
            name: median(t / plain for t, plain in zip(seconds, times["plain"], strict=True))
            for name, seconds in times.items()
        }
        fastest = min((f"overlap={n}" for n in OVERLAP), key=lambda name: median(times[name]))
        ratios["speed of best"] = median(
            b / a for a, b in zip(times["asked"], times[fastest], strict=True)
        )
        ratios["seconds"] = median(times["plain"])
        return ratios, f"{mark.verdict}: {mark.reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PROGRAMS), default=tuple(PROGRAMS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many shapes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calibration", type=Path, help="one that was measured without a link")
    parser.add_argument("--save-calibration", type=Path, help="write the measured one to this file")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    scheduled = "before other programs"
    try:
        # Not at real-time priority: a thread of requests would never interrupt that of the program.
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    except OSError as error:
        scheduled = f"like every program ({error.strerror})"
    print(f"scheduled {scheduled}; load {os.getloadavg()[0]:.1f}")
    if options.calibration is not None:
        base = Calibration.load(options.calibration, workers=RANKS)
    else:
        base = calibrate(RANKS, 0.0, 0.0)
        if options.save_calibration is not None:
            base.save(options.save_calibration)
    blas = base.blas_matmul is not None and tvm_ipc.cpu.openblas_discovery.installed()
    print(f"{base.machine}; BLAS {'yes' if blas else 'no'}; noise {base.noise:.1%}", flush=True)
    columns = ("plain ms", "marked", *(f"overlap={n}" for n in OVERLAP), "asked", "of best")
    print(f"{'program':15}{'rows x inner x columns':24}{'link':10}", end="")
    print("".join(f"{column:>11}" for column in columns))
    found = []
    for name in options.only:
        for shape in SHAPES[: options.shapes]:
            with TimingSession(RANKS) as timing:
                case = Case(timing, name, shape, blas=blas)
                for bandwidth, latency in LINKS:
                    measured = dataclasses.replace(base, bandwidth=bandwidth, latency=latency)
                    ratios, decision = case.run(measured, options.rounds)
                    found.append({"program": name, "shape": shape, "link": bandwidth, **ratios})
                    link = f"{bandwidth / 1e9:g} GB/s" if bandwidth else "no link"
                    numbers = [ratios["seconds"] * 1e3, ratios["marked"]]
                    numbers += [ratios[f"overlap={n}"] for n in OVERLAP]
                    numbers += [ratios["asked"], ratios["speed of best"]]
                    missed = ratios["asked"] > NEVER_SLOWER or ratios["speed of best"] < OF_BEST
                    print(f"{name:15}{' x '.join(map(str, shape)):24}{link:10}", end="")
                    print("".join(f"{number:11.3f}" for number in numbers) + "  !" * missed)
                    print(f"    {decision}", flush=True)
    slower = sum(one["asked"] > NEVER_SLOWER for one in found)
    behind = sum(one["speed of best"] < OF_BEST for one in found)
    print(f"{len(found)} cases; more than {NEVER_SLOWER} of plain: {slower}; ", end="")
    print(f"less than {OF_BEST} of the speed of the best overlap: {behind}")
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
