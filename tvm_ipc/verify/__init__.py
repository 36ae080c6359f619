# SPDX-License-Identifier: Apache-2.0
"""The independent verifier behind `verify_cross_rank_safety`; it shares no analysis with planners.

`find_hazards` runs both checks on a module. They are two domains of one abstract interpretation,
whose walk over statements they share. These modules serve both:

    module_functions_and_summary_cache  functions, statements and summaries of a module
    relax_as_plain_statements           a function as plain Python objects
    statement_walker                    interprets statements, over the values of a domain
    range_loops                         functions that are loops
    known_calls                         effects of calls of packed functions, by their names
    primfunc_written_parameters         which parameters a PrimFunc writes
    hazard_types_and_messages           what a check reports
    symbolic_inequalities               symbolic sizes: proofs of inequalities, and counterexamples
    evaluate_at_sample_points           values of expressions at sample sizes

The memory check looks for data that peers, requests or later writes spoil:

    abstract_memory_interpreter        interprets a function over memory states
    access_checker                     applies reads, writes, requests and exposures to a state
    allocations_and_views_with_bounds  creates storages, tensors and views, and checks their bounds
    stream_order                       order of accesses on several streams of a GPU
    memory_state                       the state at one point of a program
    relax_function_effect_summary      effects of a function on its callers
    storage_and_buffer_types           storages, buffers and values

The order check looks for ranks that wait for each other indefinitely:

    communication_order_check         checks branches, and simulates all ranks
    comm_trace_builder                traces what a function does together with other ranks
    comm_trace_types                  the actions and branches of a trace
    packed_calls_to_trace_actions     the action of one call
    symbolic_sizes_of_call_arguments  sizes and numbers that calls pass
    compare_collective_arguments      arguments in which ranks must agree
    known_values_in_tensors           what is known of the contents of tensors
    per_rank_and_uniform_values       what is known of a number on each rank
    deadlock_simulator                simulates the actions of all ranks
"""

from __future__ import annotations

import tvm

from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.verify.abstract_memory_interpreter import Interpreter
from tvm_ipc.verify.communication_order_check import find_order_hazards
from tvm_ipc.verify.hazard_types_and_messages import Hazard, UselessOverlap
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.per_rank_and_uniform_values import RankModel
from tvm_ipc.verify.relax_function_effect_summary import Summary

__all__ = ["find_hazards"]


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
    hazards = [*module.hazards.values(), *find_order_hazards(module, ranks)]
    return hazards, list(module.useless_overlaps.values())


def _summarize(module: Module, name: str) -> Summary:
    return Interpreter(module, name, module.function(name)).run(module.statements(name))
