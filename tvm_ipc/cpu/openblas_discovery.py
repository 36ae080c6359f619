# SPDX-License-Identifier: Apache-2.0
"""Discovery of the installed OpenBLAS, for the native library and for reports.

The native library calls `tvm_ipc.blas.find` when a program first needs BLAS. Importing this module
does not load BLAS.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from tvm_ipc.errors import LibraryError

_log: Final = logging.getLogger(__name__)

# The exception passes through native code and keeps its type.
tvm_ffi.register_error("LibraryError", LibraryError)

#: The wheel that contains OpenBLAS, with 64-bit integers and the symbol names of SciPy's wheels.
DISTRIBUTION: Final = "scipy-openblas64"
_PACKAGE: Final = "scipy_openblas64"
_FILE: Final = "libscipy_openblas64_.so"


def installed() -> bool:
    """Return whether compiled programs that call BLAS can run here."""
    return _path() is not None


def find() -> Path:
    """Return the path of the library.

    Raises
    ------
    LibraryError
        If OpenBLAS is not installed.
    """
    path = _path()
    if path is None:
        raise LibraryError(
            f"this program multiplies matrices with OpenBLAS, which is not installed; run pip "
            f"install {DISTRIBUTION}, or compile the program with get_pipeline(..., blas=False)"
        )
    return path


def version() -> str | None:
    """Return the version of the installed wheel."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def information() -> dict[str, Any]:
    """Load BLAS and return its version, its kernels and its path.

    Raises
    ------
    LibraryError
        If OpenBLAS is not installed.
    """
    info = json.loads(tvm_ffi.get_global_func("tvm_ipc.blas.info")())
    return {"library": info["library"], "kernels": info["kernels"], "path": str(find())}


@tvm_ffi.register_global_func("tvm_ipc.blas.find")  # type: ignore[untyped-decorator]
def _find() -> str:
    path = find()
    _log.debug("BLAS: %s", path)
    return str(path)


def _path() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        path = Path(directory, "lib", _FILE)
        if path.is_file():
            return path
    return None
