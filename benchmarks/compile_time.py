# SPDX-License-Identifier: Apache-2.0
"""How much of the time of compiling a decoder our passes take, and how that grows with layers.

    python benchmarks/compile_time.py [--layers 20 80 320] [--json results.json]

The processor time of `get_pipeline`, pass by pass, measured by an instrument (what one pass runs
inside another counts for the inner one), next to TVM's default pipeline for the same module, which
has neither IPC memory nor our plan. Code generation comes after both and is left out: a few tenths
of a second, as the kernels of all layers are the same.

`OffloadBLAS` is shown and not counted as ours: what it takes, TVM's passes save on kernels that are
not made. So the pipeline is also run without it.

The exit code is 1 where a goal is missed.
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
from math import log
from pathlib import Path
from typing import Any

import tvm
import zoo
from report import layout, machine
from tvm import relax

import tvm_ipc
from tvm_ipc.demo.config import Config

#: TVM's own check, which our pipeline runs first; TVM's does not.
WELL_FORMED = "relax.analysis.well_formed"
#: What our pipeline does more than TVM's, by what it is called in TVM.
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
#: Most time that our passes may add to TVM's pipeline. What they take themselves is shown as their
#: share; part of it is saved later, where a plan of one storage leaves less to do.
MORE = 0.10
#: Linear is a power of 1; memory that no longer fits a cache adds to it, for TVM's passes too.
POWER = 1.25


@dataclass(frozen=True)
class Times:
    """Seconds of one compilation."""

    layers: int
    whole: float
    passes: dict[str, float]  #: time of their own
    upstream: float
    without_blas: float

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

    def timed(mod: tvm.IRModule, check_ty: bool = True) -> None:
        start = time.process_time()
        check(mod, check_ty)
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
    upstream, plain = [], []
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
        mod = zoo.decoder(config)
        gc.collect()
        start = time.process_time()
        tvm_ipc.get_pipeline(target, zoo.WORLD, blas=False)(mod)
        plain.append(time.process_time() - start)
        found.append((whole, {**clock.passes, WELL_FORMED: sum(check)}))
    whole, passes = min(found, key=lambda entry: entry[0])
    return Times(layers, whole, passes, min(upstream), min(plain))


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
    rows = [["layers", "TVM's pipeline ms", "ours ms", "against TVM's", "without BLAS ms"]]
    rows[0] += ["against TVM's", "our passes ms", "share", "ms a layer"]
    for times in found:
        rows.append(
            [
                str(times.layers),
                f"{times.upstream * 1e3:.0f}",
                f"{times.whole * 1e3:.0f}",
                f"{times.whole / times.upstream - 1:+.1%}",
                f"{times.without_blas * 1e3:.0f}",
                f"{times.without_blas / times.upstream - 1:+.1%}",
                f"{times.ours * 1e3:.1f}",
                f"{times.share:.1%}",
                f"{times.ours * 1e3 / times.layers:.3f}",
            ]
        )
    return layout(rows)


def powers(found: list[Times]) -> dict[str, float]:
    """The power of the number of layers that the time of each of our passes grows with.

    Of those that take a tenth of ours: the least are noise.
    """
    first, last = found[0], found[-1]
    layers = log(last.layers / first.layers)
    return {
        name: log(last.passes[name] / first.passes[name]) / layers
        for name in sorted(OURS)
        if first.passes.get(name, 0) > 0 and last.passes.get(name, 0) > last.ours / 10
    }


def goals(found: list[Times], at: Times) -> dict[str, bool]:
    made = {}
    for what, seconds in (("", at.whole), (" without the BLAS", at.without_blas)):
        more = seconds / at.upstream - 1
        text = f"the pipeline{what} takes {more:+.1%} of TVM's at {at.layers} layers"
        made[f"{text}, at most {MORE:+.0%}"] = more <= MORE
    if len(found) > 1:
        for name, power in powers(found).items():
            text = f"{name} grows with layers to the power of {power:.2f}, at most {POWER}"
            made[text] = power <= POWER
    return made


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
    print()
    held = goals(found, at)
    for goal, holds in held.items():
        print(f"{'met' if holds else 'MISSED'}: {goal}")
    if options.json is not None:
        document = {
            "machine": machine(),
            "times": [{**vars(times), "ours": times.ours, "share": times.share} for times in found],
            "goals": held,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
