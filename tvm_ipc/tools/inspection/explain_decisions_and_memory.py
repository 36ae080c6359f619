# SPDX-License-Identifier: Apache-2.0
"""Run the pipeline on a module, and collect its decisions and its memory plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm.place_op import NAME as PLACE
from tvm_ipc.pipeline import get_pipeline
from tvm_ipc.tools.inspection import peak_live_bytes
from tvm_ipc.tools.inspection.collective_and_parameter_totals import Figures, figures
from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import UNKNOWN, variables
from tvm_ipc.transform.report import FunctionPlan, Report, collect_report

_PLAN = "StaticPlanBlockMemory"
_PLACEMENTS = "tvm_ipc.placements"
_PLACE = tvm.ir.Op.get(PLACE)


class PipelineOptionError(ValueError):
    """An option of `get_pipeline` has a wrong value; the message names the option."""


@dataclass(frozen=True)
class Question:
    """The settings that a module is explained with."""

    source: str  #: the name of the module in the report
    target: str
    world_size: int
    strategy: str
    sizes: Mapping[str, int]  #: values of symbolic variables

    @property
    def for_gpus(self) -> bool:
        """Return whether the target is CUDA."""
        return str(tvm.target.Target(self.target).kind.name) == "cuda"


@dataclass(frozen=True)
class Memory:
    """Bytes of one function by memory scope; tensors that it returns only count in `results`."""

    ours: dict[str, int]
    upstream: dict[str, int]  #: TVM's plan, as its runtime allocates it
    least: dict[str, int]  #: peak of live bytes, a lower bound for any plan
    results: dict[str, int] = field(default_factory=dict)

    @property
    def scopes(self) -> list[str]:
        """Return all scopes, the largest first."""
        names = {*self.ours, *self.upstream, *self.least}
        return sorted(names, key=lambda s: (-self.upstream.get(s, 0), s))


@dataclass(frozen=True)
class Explanation:
    """The decisions of the pipeline about a module, and their memory."""

    question: Question
    sizes: dict[str, dict[str, int]]  #: values of symbolic variables, by function
    report: Report
    memory: dict[str, Memory]  #: by function
    figures: Figures = field(default_factory=Figures)

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
    unsharded: tvm.IRModule | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Explanation:
    """Run the pipeline with the options of `get_pipeline`, and return its explanation.

    `unsharded` is the module with all data on one worker, if it is known; a module with placements
    is its own. `progress` is called with the name of each pass. A wrong option raises
    `PipelineOptionError`.
    """
    snapshots = _PlanSnapshots()
    instruments = [snapshots, PassNames(progress)]
    with collect_report() as report, tvm.transform.PassContext(instruments=instruments):
        try:
            pipeline = get_pipeline(
                question.target, question.world_size, question.strategy, **options
            )
        except (TypeError, ValueError) as error:
            raise PipelineOptionError(str(error)) from None
        pipeline(mod)
    memory: dict[str, Memory] = {}
    sizes: dict[str, dict[str, int]] = {}
    if snapshots.before is not None and snapshots.after is not None:
        progress("TVM's own memory plan")
        memory = compare(snapshots.before, snapshots.after, question.sizes)
        for plan in report.plans:
            bounds = peak_live_bytes.sizes_of(snapshots.before[plan.function], question.sizes)
            sizes[plan.function] = {**dict.fromkeys(_variables(plan), UNKNOWN), **bounds}
    overlap = options.get("overlap")
    counted = figures(
        snapshots.of_one_worker or mod,
        mod if _has_placements(mod) else unsharded,
        question.sizes,
        question.world_size,
        overlap if isinstance(overlap, Calibration) else None,
    )
    return Explanation(question, sizes, report, memory, counted)


def _has_placements(mod: tvm.IRModule) -> bool:
    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    return any(call.op.same_as(_PLACE) for f in functions for call in calls(f))


def _variables(plan: FunctionPlan) -> set[str]:
    texts = [storage.size for storage in plan.storages] + [tensor.size for tensor in plan.tensors]
    return {name for text in texts for name in variables(text)}


def compare(
    before: tvm.IRModule, after: tvm.IRModule, sizes: Mapping[str, int]
) -> dict[str, Memory]:
    """Compare a memory plan with TVM's plan and with the lower bound."""
    upstream_plan = relax.transform.StaticPlanBlockMemory()(before)
    least = peak_live_bytes.allocations(before, sizes)
    ours = peak_live_bytes.allocations(after, sizes)
    upstream = peak_live_bytes.allocations(upstream_plan, sizes, typed_ipc=True)
    return {
        name: Memory(
            ours[name].total(), upstream[name].total(), least[name].total(), ours[name].results
        )
        for name in least
        if name in ours and least[name].total()
    }


def _sum(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for by_scope in counts:
        for scope, count in by_scope.items():
            total[scope] = total.get(scope, 0) + count
    return total


@tvm.ir.instrument.pass_instrument
class PassNames:
    """Report the name of each pass before it runs."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress

    def run_before_pass(self, _mod: tvm.IRModule, info: Any) -> None:
        """Report the name of a pass."""
        self.progress(str(info.name))


@tvm.ir.instrument.pass_instrument
class _PlanSnapshots:
    """Keep the module from before and after the memory plan, and once placements are lowered."""

    def __init__(self) -> None:
        self.before: tvm.IRModule | None = None
        self.after: tvm.IRModule | None = None
        self.of_one_worker: tvm.IRModule | None = None

    def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if str(info.name) == _PLAN and self.before is None:
            self.before = mod

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if str(info.name) == _PLACEMENTS and self.of_one_worker is None:
            self.of_one_worker = mod
        if str(info.name) == _PLAN and self.after is None:
            self.after = mod
