# SPDX-License-Identifier: Apache-2.0
"""What the passes for external compilers share.

literals             function literals: finding, closing and comparing them
global_symbol_cache  what they are called, and which of them may be one
compiled             what a compiler gives back, checked against what it was given
extern               what is declared of a function that something else has compiled
call_shapes          the symbolic shapes of a signature at one of its calls
"""
