# SPDX-License-Identifier: Apache-2.0
"""The analyses behind `StaticPlanBlockMemory`; none of them changes IR.

`packing` assigns offsets, `redundant_exit_barriers` computes how long peers may read an input,
`exit_barrier_budget` decides which exit barriers to omit, `tensors_on_streams` keeps tensors apart
that several streams of a GPU use at a time, and `plan_function_storages` combines them. `analysis`
provides sizes, live ranges, and the allocations that each value may be stored in.
"""
