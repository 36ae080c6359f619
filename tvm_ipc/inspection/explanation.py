# SPDX-License-Identifier: Apache-2.0
"""Sends a module through the pipeline and gathers what it decided, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.inspection import live
from tvm_ipc.inspection.sizes import UNKNOWN, variables
from tvm_ipc.pipeline import get_pipeline
from tvm_ipc.transform.report import FunctionPlan, Report, collect_report

_PLAN = "StaticPlanBlockMemory"


@dataclass(frozen=True)
class Question:
    """What to compile, and how."""

    source: str  #: what the reader knows the module by
    target: str
    world_size: int
    strategy: str
    sizes: Mapping[str, int]  #: of symbolic variables

    @property
    def for_gpus(self) -> bool:
        """Whether the module is compiled for GPUs."""
        return str(tvm.target.Target(self.target).kind.name) == "cuda"


@dataclass(frozen=True)
class Memory:
    """Bytes of one function by memory scope. What it returns counts in `results` alone."""

    ours: dict[str, int]
    upstream: dict[str, int]  #: as TVM's passes plan it, and its runtime would allocate it
    least: dict[str, int]  #: what is live at once: no plan can take less
    results: dict[str, int] = field(default_factory=dict)

    @property
    def scopes(self) -> list[str]:
        """Return every scope, the largest first."""
        names = {*self.ours, *self.upstream, *self.least}
        return sorted(names, key=lambda s: (-self.upstream.get(s, 0), s))


@dataclass(frozen=True)
class Explanation:
    """What the pipeline did to a module."""

    question: Question
    sizes: dict[str, dict[str, int]]  #: of symbolic variables, by function
    report: Report
    memory: dict[str, Memory]  #: by function

    def total(self) -> Memory:
        """Return the sums over all functions."""
        return Memory(
            *(
                _sum(getattr(m, kind) for m in self.memory.values())
                for kind in ("ours", "upstream", "least", "results")
            )
        )


def explain(
    mod: tvm.IRModule,
    question: Question,
    *,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Explanation:
    """Run the pipeline; further options are those of `get_pipeline`.

    `progress` hears which pass is running.
    """
    watch = _Watch()
    instruments = [watch, PassNames(progress)]
    with collect_report() as report, tvm.transform.PassContext(instruments=instruments):
        pipeline = get_pipeline(question.target, question.world_size, question.strategy, **options)
        pipeline(mod)
    memory: dict[str, Memory] = {}
    sizes: dict[str, dict[str, int]] = {}
    if watch.before is not None and watch.after is not None:
        progress("TVM's own memory plan")
        memory = compare(watch.before, watch.after, question.sizes)
        for plan in report.plans:
            known = live.sizes_of(watch.before[plan.function], question.sizes)
            sizes[plan.function] = {**dict.fromkeys(_variables(plan), UNKNOWN), **known}
    return Explanation(question, sizes, report, memory)


def _variables(plan: FunctionPlan) -> set[str]:
    texts = [storage.size for storage in plan.storages] + [tensor.size for tensor in plan.tensors]
    return {name for text in texts for name in variables(text)}


def compare(
    before: tvm.IRModule, after: tvm.IRModule, given: Mapping[str, int]
) -> dict[str, Memory]:
    """Compare a plan with TVM's for the same module, and with what no plan can do without."""
    theirs = relax.transform.StaticPlanBlockMemory()(before)
    least = live.allocations(before, given)
    ours = live.allocations(after, given)
    upstream = live.allocations(theirs, given, typed_ipc=True)
    return {
        name: Memory(
            ours[name].total(), upstream[name].total(), least[name].total(), ours[name].results
        )
        for name in least
        if name in ours and least[name].total()
    }


def _sum(parts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for scope, count in part.items():
            total[scope] = total.get(scope, 0) + count
    return total


@tvm.ir.instrument.pass_instrument
class PassNames:
    """Tells the name of each pass before it runs."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def run_before_pass(self, _mod: tvm.IRModule, info: Any) -> None:
        """Hear of a pass."""
        self.tell(str(info.name))


@tvm.ir.instrument.pass_instrument
class _Watch:
    """Keeps the module as it is before the memory plan, and after."""

    def __init__(self) -> None:
        self.before: tvm.IRModule | None = None
        self.after: tvm.IRModule | None = None

    def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if str(info.name) == _PLAN and self.before is None:
            self.before = mod

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if str(info.name) == _PLAN and self.after is None:
            self.after = mod
