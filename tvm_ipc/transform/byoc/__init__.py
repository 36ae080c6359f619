# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the passes for external compilers.

nested_relax_functions             find, close and compare function literals
outlined_function_symbol_policies  choose the symbols of outlined functions, and which of them are
                                   shared
check_compiler_results             the result of an external compiler, and its checks
extern_declaration                 extern declarations, which replace compiled functions
match_call_symbolic_shapes         match the symbolic shapes of a signature with those of a call
"""
