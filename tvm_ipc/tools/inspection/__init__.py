# SPDX-License-Identifier: Apache-2.0
"""Collect what the pipeline does to a module, for `tvm-ipc explain` and the demo.

explain_decisions_and_memory
                    runs the pipeline, and compares its memory plan with TVM's
collective_and_parameter_totals  counts collectives and parameters, and estimates times
peak_live_bytes                  computes a lower bound of the memory, independently of the planner
evaluate_symbolic_size_text      evaluates sizes with symbolic variables
"""
