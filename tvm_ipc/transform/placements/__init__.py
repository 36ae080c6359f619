# SPDX-License-Identifier: Apache-2.0
"""How `LowerPlacements` makes of a program for all ranks what one rank runs.

placed        a tensor of the program, and what a rank has of it
redistribute  from one placement to another one: a collective for each axis of the mesh
rearrange     the same where parts of an axis are not consecutive
values        what the variables of the program are for one rank
calls         what a call becomes
dist          TVM's own annotations, as places
function      the walk through a function

What operators do to axes is in `tvm_ipc.transform.rules`.
"""
