# SPDX-License-Identifier: Apache-2.0
"""How `LowerPlacements` makes of a program for all ranks what one rank runs.

placed        a tensor of the program, and what a rank has of it
redistribute  from one placement to another one: a collective for each axis of the mesh
rules         what operators do to axes, and what of it follows for placements
operators     the rules of Relax operators
reshape       axes that stay divided when a tensor is reshaped
values        what the variables of the program are for one rank
calls         what a call becomes
dist          TVM's own annotations, as places
function      the walk through a function
"""
