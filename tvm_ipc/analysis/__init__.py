# SPDX-License-Identifier: Apache-2.0
"""Analyses of lowered Relax functions, and the rewriter, which all passes share.

The independent verifier in `tvm_ipc.verify` uses only `ffi_arrays` and `polynomials`.

    walk_and_rewrite_bindings             walks and replaces the bindings of functions
    binding_builders                      creates bindings: allocations, copies, calls
    program_order                         the bindings of a function in order, branches as regions
    uses                                  where variables are bound and used, before operators are
                                          lowered
    alias_facts                           memory objects, and the facts about those of a function
    find_aliases                          finds the memory objects that each value may be, and their
                                          uses
    memory_write_events                   finds when memory is written, also by called functions
    live_ranges                           when a tensor is live
    collective_calls                      reads and creates calls of collectives
    matching_collectives_across_branches  collectives that ranks may call together from different
                                          branches
    rewrite_cyclic_match_casts            casts that TVM's passes cannot handle
    primfunc_effects                      what the body of a PrimFunc does with its parameters
    retype_primfunc_scopes                PrimFuncs with other memory scopes
    elementwise_view_writer_ops           operators that are elementwise, views, or write their
                                          arguments
    polynomials                           arithmetic on symbolic sizes
    ffi_arrays                            fast conversion of FFI arrays; the verifier shares it
"""
