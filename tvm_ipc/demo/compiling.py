# SPDX-License-Identifier: Apache-2.0
"""From the model to an executable, and what the passes did on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax
from tvm.support import cc

from tvm_ipc.comm import CollectiveAttrs
from tvm_ipc.demo import gpu, model
from tvm_ipc.demo.config import Build, Config
from tvm_ipc.demo.schedule import schedule_kernels
from tvm_ipc.errors import IPCError
from tvm_ipc.inspection.explanation import Memory, PassNames, Question, explain
from tvm_ipc.pipeline import get_pipeline

_AS_A_RULE: Final = Build()


@dataclass(frozen=True)
class Decisions:
    """What is in both functions of the model, and what the pipeline decided about it.

    Attributes
    ----------
    gathers, scatters : all-gathers and reduce-scatters of rows, in parts of a prompt.
    overlapped : those of them that matrix products go on beside.
    allreduces : in the model.
    rewritten : those of them that read their input in IPC memory.
    with_norm : those of them that add the residual and normalise the sum too.
    without_barrier : those of them that leave out the barrier at their end.
    memory : bytes planned, and what TVM's own plan would take.
    blas : whether matrix products are OpenBLAS's.
    """

    gathers: int
    scatters: int
    overlapped: int
    allreduces: int
    rewritten: int
    with_norm: int
    without_barrier: int
    memory: Memory
    blas: bool


def compile_model(
    config: Config,
    workers: int,
    build: Build = _AS_A_RULE,
    progress: Callable[[str], None] = lambda _: None,
) -> Any:
    """Return an executable of one of `workers` workers, for this machine's processor or GPUs.

    `progress` hears which pass is running.
    """
    if cc.get_cc() is None:
        raise IPCError(
            "TVM links what it compiled with a C++ compiler, and there is none: "
            "install g++ or clang, or name one in the environment variable CXX"
        )
    target = _target(build.device)
    mod = _model(config, workers, build)
    pipeline = get_pipeline(
        target,
        workers,
        build.strategy,
        blas=build.blas,
        overlap=build.overlap,
        schedule=schedule_kernels if build.device == "cpu" else None,
    )
    with tvm.transform.PassContext(instruments=[PassNames(progress)]):
        return relax.build(mod, target, relax_pipeline=pipeline)


def compiles_for(device: str) -> str:
    """Return the name of what `compile_model` compiles for."""
    if device == "cuda":
        return f"cuda, {gpu.architecture()}"
    name = tvm.target.Target.from_device("cpu").attrs.get("mcpu", "this processor")
    return f"llvm, {name}"


def _target(device: str) -> tvm.target.Target:
    host = tvm.target.Target.from_device("cpu")
    return host if device == "cpu" else tvm.target.Target(_kind(device), host)


def _kind(device: str) -> dict[str, str]:
    return {"kind": "llvm"} if device == "cpu" else {"kind": "cuda", "arch": gpu.architecture()}


def _model(config: Config, workers: int, build: Build) -> tvm.IRModule:
    return model.build(
        config, workers, sequence_parallel=build.sequence_parallel, device=build.device
    )


def decisions(
    config: Config,
    workers: int,
    build: Build = _AS_A_RULE,
    progress: Callable[[str], None] = lambda _: None,
) -> Decisions:
    """Return what the pipeline does with the model."""
    target = json.dumps(_kind(build.device))
    question = Question("the demo's decoder", target, workers, build.strategy.name.lower(), {})
    mod = _model(config, workers, build)
    explanation = explain(mod, question, progress=progress, blas=build.blas, overlap=build.overlap)
    events = [event for plan in explanation.report.plans for event in plan.events]
    verdicts = [
        decision.verdict
        for decision in explanation.report.decisions
        if decision.pass_name == "IPCAllReduceRewrite"
    ]
    kinds = _kinds(mod[model.PREFILL])
    with_norm = sum(
        decision.pass_name == "FuseAllReduceEpilogue" and decision.verdict == "fused"
        for decision in explanation.report.decisions
    )
    return Decisions(
        gathers=kinds["allgather"],
        scatters=kinds["reduce_scatter"],
        overlapped=sum(
            decision.pass_name == "OverlapCommunication" and decision.verdict.endswith("chunks")
            for decision in explanation.report.decisions
        ),
        allreduces=len(verdicts) + with_norm,
        rewritten=verdicts.count("rewritten") + with_norm,
        with_norm=with_norm,
        without_barrier=sum(event.barrier == "left out" for event in events),
        memory=explanation.total(),
        blas=any(
            decision.subject == "BLAS" and decision.verdict == "used"
            for decision in explanation.report.decisions
        ),
    )


def _kinds(function: relax.Function) -> Counter[str]:
    """Count the collectives of each kind."""
    kinds: Counter[str] = Counter()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.attrs, CollectiveAttrs):
            kinds[str(expr.attrs.kind)] += 1

    relax.analysis.post_order_visit(function, visit)
    return kinds
