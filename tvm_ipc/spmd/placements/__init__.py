# SPDX-License-Identifier: Apache-2.0
"""The analysis and rewriting behind `LowerPlacements`: global programs become per-rank programs.

placed_tensor                        a tensor of the global program with its placements and its
                                     local shard
redistribute                         changes of placement, by one collective for each axis of the
                                     mesh
reorder_indices_within_sharded_axis  changes of placement where the shards of an axis are not
                                     consecutive
relax_vars_to_rank_values            the values of the program's variables on one rank
lower_call                           lowering of calls
lower_function                       lowering of functions
skip_on_other_ranks                  branches around what only some ranks need
place_calls                          reads and creates the calls of `R.comm.place`
convert_dist_annotations             conversion of TVM's own sharding annotations to `R.comm.place`

The placements that operators support are defined in `tvm_ipc.spmd.rules`.
"""
