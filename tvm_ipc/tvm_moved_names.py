# SPDX-License-Identifier: Apache-2.0
"""Public names of TVM's compiler that are elsewhere in other releases of TVM.

Checked with apache-tvm 0.27.0.post1; the comments have the places in 0.26.0. Other files import the
names from here, and `tests/test_tvm_private_names.py` fails if one does not. To port the package to
another release, read this file and `tvm_private_names.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.ir import (
    GenericConst,  # relax.Constant
    StringImm,  # tirx.StringImm
    TensorLoad,  # tirx.BufferLoad
    TensorRegion,  # tirx.BufferRegion
)
from tvm.sym import (  # arith
    Analyzer,
    ConstIntBound,
    IntervalSet,
    detect_linear_equation,
    int_set,
)
from tvm.tirx import (  # calls of tirx.bitwise_and and others
    BitwiseAnd,
    BitwiseNot,
    BitwiseOr,
    BitwiseXor,
    LShift,
    RShift,
)

from tvm_ipc.tvm_private_names import has_compiler

# These modules of TVM cannot be imported in a process that loads only TVM's runtime.
if TYPE_CHECKING or has_compiler():
    from tvm.relax import VDevice  # ir.VDevice
    from tvm.s_tir import MatchBufferRegion, SBlock, SBlockRealize  # tirx

__all__ = [
    "Analyzer",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    "ConstIntBound",
    "GenericConst",
    "IntervalSet",
    "LShift",
    "MatchBufferRegion",
    "RShift",
    "SBlock",
    "SBlockRealize",
    "StringImm",
    "TensorLoad",
    "TensorRegion",
    "VDevice",
    "detect_linear_equation",
    "int_set",
]
