# SPDX-License-Identifier: Apache-2.0
"""Run both checks of the verifier: of accesses to memory, and of the order of communication."""

from __future__ import annotations

import tvm

from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.verify.abstract_memory_interpreter import Interpreter
from tvm_ipc.verify.communication_order_check import DivergenceCheck
from tvm_ipc.verify.hazard_types_and_messages import Hazard, UselessOverlap
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.per_rank_and_uniform_values import RankModel
from tvm_ipc.verify.relax_function_effect_summary import Summary


def find_hazards(
    mod: tvm.IRModule, assume_no_exit_barrier: bool, ranks: RankModel | None
) -> tuple[list[Hazard], list[UselessOverlap]]:
    """Return the hazards of all functions of a module, and its useless overlaps."""
    module = Module(
        mod,
        _summarize,
        assume_no_exit_barrier=assume_no_exit_barrier,
        max_workers=MAX_WORKERS if ranks is None else ranks.size,
    )
    module.summarize_all()
    divergences = DivergenceCheck(module, ranks).hazards()
    return [*module.hazards.values(), *divergences], list(module.useless_overlaps.values())


def _summarize(module: Module, name: str) -> Summary:
    return Interpreter(module, name, module.function(name), module.statements(name)).run()
