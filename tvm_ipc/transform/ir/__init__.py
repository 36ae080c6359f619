# SPDX-License-Identifier: Apache-2.0
"""What passes stand on; of all this the checker in `safety` knows the arithmetic alone.

rewrite     walks through the bindings of functions, and other bindings in their place
build       bindings that passes make: allocations, copies, calls for what they do
retype      PrimFuncs with other memory scopes
views       operators that make no memory
collectives calls of packed functions with which ranks meet
prim_funcs  what the body of a PrimFunc does with its parameters
program     the bindings of a function in order, its if branches as regions of them
roots       memory as a set of roots
aliases     which of them a value may be, who else holds them, and where they are used
writes      when memory is written, also by what a function calls
live_ranges when a tensor is live
polynomials the arithmetic of symbolic sizes
"""
