# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the passes for external compilers.

function_literals          find, close and compare function literals
outlined_function_symbols  choose the symbols of outlined functions, and which of them are shared
compiler_results           the result of an external compiler, and its checks
extern_declaration         extern declarations, which replace compiled functions
symbolic_shape_matching    match the symbolic shapes of a signature with those of a call
"""
