# SPDX-License-Identifier: Apache-2.0
"""Analyses of lowered Relax functions, and the rewriter, which all passes share.

The independent verifier in `tvm_ipc.verify` uses only `ffi_arrays` and `polynomials`.

    walk_and_rewrite_bindings             walks and replaces the bindings of functions
    binding_builders                      creates bindings: allocations, copies, calls
    program_order                         the bindings of a function in order, branches as regions
    uses                                  where variables are bound and used
    resolve_variables                     finds the values of variables, and the variables of values
    alias_facts                           memory objects, and the facts about those of a function
    find_aliases                          finds the memory objects that each value may be, and their
                                          uses
    views_and_writes_of_calls             what calls view and write: the table that all passes share
    memory_write_events                   finds when memory is written, also by called functions
    live_ranges                           when a tensor is live
    stream_regions                        the parts of a function that run on several streams
    collective_calls                      reads and creates calls of collectives
    matching_collectives_across_branches  collectives that ranks may call together from different
                                          branches
    branch_collective_groups              the same for lowered programs: collectives that change
                                          together
    rewrite_cyclic_match_casts            casts that TVM's passes cannot handle
    primfunc_effects                      what the body of a PrimFunc does with its parameters
    retype_primfunc_scopes                PrimFuncs with other memory scopes
    elementwise_ops                       names of elementwise operators
    shape_algebra                         sizes of tensors in bytes, which may be symbolic
    polynomials                           arithmetic on symbolic sizes; the verifier shares it
    ffi_arrays                            fast conversion of FFI arrays; the verifier shares it
"""
