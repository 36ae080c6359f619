# SPDX-License-Identifier: Apache-2.0
"""Collect what the pipeline does to a module, for `tvm-ipc explain` and the demo.

run_pipeline_for_explanation
                    runs the pipeline, and compares its memory plan with TVM's
collective_and_parameter_totals    counts collectives and parameters, and estimates times
memory_lower_bound  computes a lower bound of the memory, independently of the planner
symbolic_sizes      evaluates sizes with symbolic variables
"""
