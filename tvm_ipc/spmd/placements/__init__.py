# SPDX-License-Identifier: Apache-2.0
"""The analysis and rewriting behind `LowerPlacements`: global programs become per-rank programs.

placed_tensor               a tensor of the global program with its placements and its local shard
redistribute                changes of placement, by one collective for each axis of the mesh
reorder_axis_around_collectives
                  changes of placement where the shards of an axis are not consecutive
global_vars_to_rank_values  the values of the program's variables on one rank
lower_call                  lowering of calls
lower_function              lowering of functions
dist_annotations            conversion of TVM's own sharding annotations to `R.comm.place`

The placements that operators support are defined in `tvm_ipc.spmd.rules`.
"""
