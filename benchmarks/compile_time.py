# SPDX-License-Identifier: Apache-2.0
"""How much of the time of compiling a decoder our passes take, and how that grows with layers.

    python benchmarks/compile_time.py [--layers 20 80 320] [--json results.json]

The time of `get_pipeline`, pass by pass, measured by an instrument of our own (what one pass runs
inside another counts for the inner one), next to TVM's default pipeline for the same module, which
has neither IPC memory nor our plan. Code generation comes after both and is left out, so the share
is one of Relax's pipeline; of a whole build it is much smaller.

The exit code is 1 where our passes take more than a tenth of the pipeline at 80 layers, or grow
faster than the layers do.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tvm
import zoo
from report import layout, machine
from tvm import relax

import tvm_ipc
from tvm_ipc.demo.config import Config

#: TVM's own check, which our pipeline runs first; TVM's does not.
WELL_FORMED = "relax.analysis.well_formed"
#: What our pipeline does more than TVM's, by what it is called in TVM. `OffloadBLAS` is not among
#: it: what it takes, others save.
OURS = frozenset(
    {
        WELL_FORMED,
        "tvm_ipc.pipeline",
        "PlanMemoryScopes",
        "IPCAllReduceRewrite",
        "StaticPlanBlockMemory",
        "VerifyCrossRankSafety",
        "LowerGPUIPCAllocStorage",
    }
)
SHARE = 0.10
#: Layers that our passes may take per layer at most, against the fewest layers.
GROWTH = 1.3


@dataclass(frozen=True)
class Times:
    """Seconds of one compilation."""

    layers: int
    whole: float
    passes: dict[str, float]  #: time of their own
    upstream: float

    @property
    def ours(self) -> float:
        return sum(seconds for name, seconds in self.passes.items() if name in OURS)

    @property
    def share(self) -> float:
        return self.ours / self.whole


def instrument() -> Any:
    """Measure each pass without the passes that it runs."""
    passes: dict[str, float] = {}
    running: list[float] = []  # of each pass that is running: when its own time last went on

    @tvm.ir.instrument.pass_instrument
    class Clock:
        def __init__(self) -> None:
            self.passes = passes
            self.names: list[str] = []

        def run_before_pass(self, _mod: tvm.IRModule, info: Any) -> None:
            now = time.process_time()
            if running:
                passes[self.names[-1]] += now - running[-1]
            name = str(info.name)
            self.names.append(name)
            passes.setdefault(name, 0.0)
            running.append(time.process_time())

        def run_after_pass(self, _mod: tvm.IRModule, _info: Any) -> None:
            now = time.process_time()
            passes[self.names.pop()] += now - running.pop()
            if running:
                running[-1] = time.process_time()

    return Clock()


@contextmanager
def checked() -> Iterator[list[float]]:
    """Measure TVM's check of the module, which is no pass."""
    seconds: list[float] = []
    check = relax.analysis.well_formed

    def timed(mod: tvm.IRModule) -> None:
        start = time.process_time()
        check(mod)
        seconds.append(time.process_time() - start)

    relax.analysis.well_formed = timed
    try:
        yield seconds
    finally:
        relax.analysis.well_formed = check


def measure(layers: int, rounds: int) -> Times:
    """Compile a decoder of so many layers with both pipelines."""
    config = Config(layers, 2048, 32, 8, 8192, 32000, context=2048, dtype="float16")
    target = tvm.target.Target("llvm")
    found: list[tuple[float, dict[str, float]]] = []
    upstream = []
    for _ in range(rounds):
        mod = zoo.decoder(config)
        gc.collect()
        start = time.process_time()
        relax.get_default_pipeline(target)(mod)
        upstream.append(time.process_time() - start)
        mod = zoo.decoder(config)
        gc.collect()
        clock = instrument()
        with tvm.transform.PassContext(instruments=[clock]), checked() as check:
            start = time.process_time()
            tvm_ipc.get_pipeline(target, zoo.WORLD)(mod)
            whole = time.process_time() - start
        clock.passes["tvm_ipc.pipeline"] -= sum(check)
        found.append((whole, {**clock.passes, WELL_FORMED: sum(check)}))
    whole, passes = min(found, key=lambda entry: entry[0])
    return Times(layers, whole, passes, median(upstream))


def pass_table(found: list[Times], at: Times) -> str:
    """Every pass that takes a thousandth at least, in the order of its time at `at`."""
    counts = [str(times.layers) for times in found]
    rows = [["pass", *(f"ms at {n}" for n in counts), *(f"us/layer at {n}" for n in counts), ""]]
    rows[0].insert(-1, f"share at {at.layers}")
    for name, seconds in sorted(at.passes.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * at.whole or name in OURS:
            every = [times.passes.get(name, 0.0) for times in found]
            rows.append(
                [
                    name,
                    *(f"{each * 1e3:.1f}" for each in every),
                    *(
                        f"{each * 1e6 / times.layers:.0f}"
                        for each, times in zip(every, found, strict=True)
                    ),
                    f"{seconds / at.whole:.1%}",
                    "ours" if name in OURS else "",
                ]
            )
    return layout(rows)


def growth_table(found: list[Times]) -> str:
    rows = [["layers", "pipeline ms", "ours ms", "share", "ours, ms a layer", "TVM's pipeline ms"]]
    rows[0].append("whole pipeline against TVM's")
    for times in found:
        rows.append(
            [
                str(times.layers),
                f"{times.whole * 1e3:.0f}",
                f"{times.ours * 1e3:.1f}",
                f"{times.share:.1%}",
                f"{times.ours * 1e3 / times.layers:.3f}",
                f"{times.upstream * 1e3:.0f}",
                f"{times.whole / times.upstream - 1:+.1%}",
            ]
        )
    return layout(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 80, 320])
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    options = parser.parse_args()
    measure(1, 1)  # what is loaded and registered at first use
    found = [measure(layers, options.rounds) for layers in sorted(set(options.layers))]
    at = next((times for times in found if times.layers >= 80), found[-1])
    print(f"\na decoder of {at.layers} layers, prefill and decode, pass by pass\n")
    print(pass_table(found, at))
    print(f"\n{growth_table(found)}")
    growth = (found[-1].ours / found[-1].layers) / (found[0].ours / found[0].layers)
    goals = {
        f"at most {SHARE:.0%} of the pipeline at {at.layers} layers": at.share <= SHARE,
        f"linear: a layer of {found[-1].layers} takes {growth:.2f} of a layer of "
        f"{found[0].layers}, at most {GROWTH}": growth <= GROWTH,
    }
    print()
    for goal, holds in goals.items():
        print(f"{'met' if holds else 'MISSED'}: {goal}")
    if options.json is not None:
        document = {
            "machine": machine(),
            "times": [{**vars(times), "ours": times.ours, "share": times.share} for times in found],
            "goals": goals,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
