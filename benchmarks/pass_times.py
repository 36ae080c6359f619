# SPDX-License-Identifier: Apache-2.0
"""The processor time of pipelines, pass by pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import tvm
import zoo
from tvm import relax

import tvm_ipc

#: TVM's own check, which our pipeline runs first; TVM's does not.
WELL_FORMED = "relax.analysis.well_formed"
#: What our pipeline does more than TVM's, by what it is called in TVM.
OURS = frozenset(
    {
        WELL_FORMED,
        "tvm_ipc.pipeline",
        "EraseMemoryScopes",
        "PlanMemoryScopes",
        "IPCAllReduceRewrite",
        "RequireWorkers",
        "LowerExternCalls",
        "StaticPlanBlockMemory",
        "VerifyCrossRankSafety",
        "LowerGPUIPCAllocStorage",
    }
)
TARGET = "llvm"

#: Seconds of each pass, those of the passes that it runs left out.
Passes = dict[str, float]


def ours(passes: Passes) -> float:
    """Return the seconds of our passes; where OffloadBLAS runs, it is not counted."""
    return sum(seconds for name, seconds in passes.items() if name in OURS)


def upstream(build: Callable[[], tvm.IRModule]) -> float:
    """Return the seconds of TVM's pipeline."""
    target = tvm.target.Target(TARGET)
    mod = build()
    gc.collect()
    start = time.process_time()
    relax.get_default_pipeline(target)(mod)
    return time.process_time() - start


def pipeline(build: Callable[[], tvm.IRModule], **options: Any) -> tuple[float, Passes]:
    """Return the seconds of our pipeline, and of each of its passes."""
    mod = build()
    gc.collect()
    clock = _clock()
    with tvm.transform.PassContext(instruments=[clock]), _checked() as check:
        start = time.process_time()
        tvm_ipc.get_pipeline(TARGET, zoo.WORLD, **options)(mod)
        whole = time.process_time() - start
    clock.passes["tvm_ipc.pipeline"] -= sum(check)
    return whole, {**clock.passes, WELL_FORMED: sum(check)}


def medians(rounds: list[Passes]) -> Passes:
    """Return the median of every pass."""
    return {name: median(passes.get(name, 0.0) for passes in rounds) for name in rounds[0]}


def _clock() -> Any:
    """Return an instrument that measures each pass without the passes that it runs."""
    passes: Passes = {}
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
def _checked() -> Iterator[list[float]]:
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
