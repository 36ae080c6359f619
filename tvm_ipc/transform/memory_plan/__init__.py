# SPDX-License-Identifier: Apache-2.0
"""The analyses behind `StaticPlanBlockMemory`; none of them changes IR.

`sizes` computes what allocations need, `packing` assigns offsets, `exit_barriers` computes how long
peers may read an input, `exit_barrier_budget` decides which exit barriers to omit, and
`plan_function_storages` combines them. `analysis` provides the live ranges, and the allocations
that each value may be stored in.
"""
