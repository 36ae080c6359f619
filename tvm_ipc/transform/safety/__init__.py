# SPDX-License-Identifier: Apache-2.0
"""What `verify_cross_rank_safety` is made of; it shares nothing with the planner but names.

extents     byte offsets, static or symbolic, and what can be proved of them
steps       a function as plain Python objects
memory      storages, the buffers that lie in them, and the state of a program at one point
calls       what a call does to memory, by the name of its callee
prim_funcs  which parameters a PrimFunc writes
effects     reads and writes, and the hazards that they are
evaluate    what expressions give, and what calls do
interpret   a function run over such states, and a summary of what it does to its caller
hazards     what is found
"""
