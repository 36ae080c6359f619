# SPDX-License-Identifier: Apache-2.0
"""The parts of the memory plan, each of which only answers questions.

`program` puts the bindings of a function in order, `aliases` says which allocations a value may
lie in, `sizes` what they need, `lifetimes` when they are live, `packing` where they fit, `peers`
how long other ranks may read them, and `plan` decides. `StaticPlanBlockMemory` applies the plan.
"""
