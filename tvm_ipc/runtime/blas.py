# SPDX-License-Identifier: Apache-2.0
"""Tells the native library where the BLAS is, when a program first multiplies with it."""

from __future__ import annotations

import json
from typing import Any

import tvm_ffi

from tvm_ipc import blas
from tvm_ipc.errors import LibraryError

# Raised here, it goes through native code to whoever called the program.
tvm_ffi.register_error("LibraryError", LibraryError)


def information() -> dict[str, Any]:
    """Load the BLAS and say what it is.

    Raises
    ------
    LibraryError
        It is not installed.
    """
    found = json.loads(tvm_ffi.get_global_func("tvm_ipc.blas.info")())
    return {"library": found["library"], "kernels": found["kernels"], "path": str(blas.find())}


@tvm_ffi.register_global_func("tvm_ipc.blas.find")  # type: ignore[untyped-decorator]
def _find() -> str:
    return str(blas.find())
