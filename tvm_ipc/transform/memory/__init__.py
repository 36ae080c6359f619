# SPDX-License-Identifier: Apache-2.0
"""The parts of the memory plan, each of which only answers questions.

`sizes` says what allocations need, `live_ranges` when they are live, `packing` where they fit,
`peers` how long other ranks may read them, and `plan` decides. `StaticPlanBlockMemory` applies it.
What values may lie in which allocations is told by `transform/ir`.
"""
