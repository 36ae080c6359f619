# SPDX-License-Identifier: Apache-2.0
"""From the model to an executable, and what the passes did on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.support import cc

from tvm_ipc.contract import AllReduceStrategy
from tvm_ipc.demo import model
from tvm_ipc.demo.config import Config
from tvm_ipc.demo.schedule import schedule_kernels
from tvm_ipc.errors import IPCError
from tvm_ipc.inspection.explanation import Memory, PassNames, Question, explain
from tvm_ipc.pipeline import get_pipeline


@dataclass(frozen=True)
class Decisions:
    """What the pipeline decided about both functions of the model.

    Attributes
    ----------
    allreduces : in the model.
    rewritten : those of them that read their input in IPC memory.
    with_norm : those of them that add the residual and normalise the sum too.
    without_barrier : those of them that leave out the barrier at their end.
    memory : bytes planned, and what TVM's own plan would take.
    blas : whether matrix products are OpenBLAS's.
    """

    allreduces: int
    rewritten: int
    with_norm: int
    without_barrier: int
    memory: Memory
    blas: bool


def compile_model(
    config: Config,
    workers: int,
    strategy: AllReduceStrategy = AllReduceStrategy.AUTO,
    blas: bool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Any:
    """Return an executable of one of `workers` workers, for this machine's processor.

    Its matrix products are kernels of TVM as `schedule` has them, or OpenBLAS's: the latter
    where it is installed, if it is not said. `progress` hears which pass is running.
    """
    if cc.get_cc() is None:
        raise IPCError(
            "TVM links what it compiled with a C++ compiler, and there is none: "
            "install g++ or clang, or name one in the environment variable CXX"
        )
    target = tvm.target.Target.from_device("cpu")
    pipeline = get_pipeline(target, workers, strategy, blas=blas, schedule=schedule_kernels)
    with tvm.transform.PassContext(instruments=[PassNames(progress)]):
        return relax.build(model.build(config, workers), target, relax_pipeline=pipeline)


def processor() -> str:
    """Return the name of what `compile_model` compiles for."""
    return str(tvm.target.Target.from_device("cpu").attrs.get("mcpu", "this processor"))


def decisions(
    config: Config,
    workers: int,
    strategy: AllReduceStrategy = AllReduceStrategy.AUTO,
    blas: bool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Decisions:
    """Return what the pipeline does with the model."""
    question = Question("the demo's decoder", "llvm", workers, strategy.name.lower(), {})
    explanation = explain(model.build(config, workers), question, progress=progress, blas=blas)
    events = [event for plan in explanation.report.plans for event in plan.events]
    verdicts = [
        decision.verdict
        for decision in explanation.report.decisions
        if decision.pass_name == "IPCAllReduceRewrite"
    ]
    with_norm = sum(
        decision.pass_name == "FuseAllReduceEpilogue" and decision.verdict == "fused"
        for decision in explanation.report.decisions
    )
    return Decisions(
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
