# SPDX-License-Identifier: Apache-2.0
"""Tells the native library where the BLAS is, when a program first multiplies with it."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import tvm_ffi

from tvm_ipc import blas
from tvm_ipc.errors import LibraryError

_log: Final = logging.getLogger(__name__)

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
    path = blas.find()
    _log.debug("matrix products: %s", path)
    return str(path)
