# SPDX-License-Identifier: Apache-2.0
"""Where the BLAS is, if it is installed. Imports neither TVM nor the BLAS."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Final

from tvm_ipc.errors import LibraryError

#: The wheel that carries OpenBLAS: 64-bit integers, the functions' names as SciPy's wheels have.
DISTRIBUTION: Final = "scipy-openblas64"
_PACKAGE: Final = "scipy_openblas64"
_FILE: Final = "libscipy_openblas64_.so"


def installed() -> bool:
    """Whether compiled programs that call the BLAS can run here."""
    return _path() is not None


def find() -> Path:
    """Return the path of the library.

    Raises
    ------
    LibraryError
        It is not installed.
    """
    path = _path()
    if path is None:
        raise LibraryError(
            f"this program multiplies matrices with OpenBLAS, which is not installed: pip install "
            f"{DISTRIBUTION}. Compile with get_pipeline(..., blas=False) for programs without it"
        )
    return path


def version() -> str | None:
    """Return the version of the installed wheel."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _path() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        path = Path(directory, "lib", _FILE)
        if path.is_file():
            return path
    return None
