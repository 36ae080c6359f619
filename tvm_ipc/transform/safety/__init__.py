# SPDX-License-Identifier: Apache-2.0
"""What `verify_cross_rank_safety` is made of; it shares nothing with the planner but names.

polynomials sums of products
numbers     sizes and offsets in bytes, static or symbolic
examples    what they are where the shape variables have certain values
extents     what can be proved of them, and what can be refuted
steps       a function as plain Python objects
memory      storages, the buffers that lie in them, and the state of a program at one point
intact      the buffers of a storage whose contents are intact
calls       what a call does to memory, by the name of its callee
prim_funcs  which parameters a PrimFunc writes
effects     reads and writes, and the hazards that they are
evaluate    what expressions give, and what calls do
interpret   a function run over such states, and a summary of what it does to its caller
shows       what is shown to peers until it is hidden
hazards     what is found

known       what each rank has of a number or of a tensor, or that ranks have the same
contents    that for the tensors of a program
sequences   what ranks do with each other, step after step
rank_calls  which such step a call is
trace       those of a function and of those that it calls
rendezvous  ranks that do them, until all have ended or wait for each other
order       the conditions under which they do
"""
