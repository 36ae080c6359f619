# SPDX-License-Identifier: Apache-2.0
"""Compile the model, and count the decisions of the passes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax
from tvm.support import cc

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.comm.collective_relax_op import is_collective
from tvm_ipc.cpu.host_cpu_target import cpu_target
from tvm_ipc.errors import IPCError
from tvm_ipc.examples.tensor_parallel_decoder import decoder_model
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.schedule_matmuls import schedule_matmuls
from tvm_ipc.pipeline import get_pipeline
from tvm_ipc.tools import gpu_assignment
from tvm_ipc.tools.demo.options import Build
from tvm_ipc.tools.inspection.explain_decisions_and_memory import (
    Memory,
    PassNames,
    Question,
    explain,
)

_DEFAULT_BUILD: Final = Build()


@dataclass(frozen=True)
class Decisions:
    """The collectives of the model, and the decisions of the pipeline about them.

    Attributes
    ----------
    gathers, scatters : number of all-gathers and reduce-scatters of rows in `prefill`.
    overlapped : how many of these overlap with matmuls.
    allreduces : number of all-reduces in both functions.
    rewritten : how many of these read their input in `ipc_memory`.
    with_norm : how many of these also add the residual and normalize the sum.
    without_barrier : number of collectives without an exit barrier.
    memory : bytes of the plan, and of TVM's plan.
    blas : whether matmuls are offloaded to OpenBLAS.
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
    build: Build = _DEFAULT_BUILD,
    progress: Callable[[str], None] = lambda _: None,
) -> Any:
    """Compile the program of one of `workers` workers for this machine's CPU or GPUs.

    `progress` is called with the name of each pass.
    """
    if cc.get_cc() is None:
        raise IPCError(
            "TVM links compiled modules with a C++ compiler, but none was found; "
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
        schedule=schedule_matmuls if build.device == "cpu" else None,
    )
    with tvm.transform.PassContext(instruments=[PassNames(progress)]):
        return relax.build(mod, target, relax_pipeline=pipeline)


def target_name(device: str) -> str:
    """Return the name of the target that `compile_model` compiles for."""
    if device == "cuda":
        return f"cuda, {gpu_assignment.target()['arch']}"
    name = cpu_target().attrs.get("mcpu", "this CPU")
    return f"llvm, {name}"


def _target(device: str) -> tvm.target.Target:
    host = cpu_target()
    return host if device == "cpu" else tvm.target.Target(_kind(device), host)


def _kind(device: str) -> dict[str, str]:
    return {"kind": "llvm"} if device == "cpu" else gpu_assignment.target()


def _model(config: Config, workers: int, build: Build) -> tvm.IRModule:
    return decoder_model.build(
        config, workers, sequence_parallel=build.sequence_parallel, device=build.device
    )


def decisions(
    config: Config,
    workers: int,
    build: Build = _DEFAULT_BUILD,
    progress: Callable[[str], None] = lambda _: None,
) -> Decisions:
    """Run the pipeline on the model, and count its decisions."""
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
    kinds = _count_kinds(mod[decoder_model.PREFILL])
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


def _count_kinds(function: relax.Function) -> Counter[str]:
    """Return the number of collectives of each kind."""
    return Counter(str(call.attrs.kind) for call in calls(function) if is_collective(call))
