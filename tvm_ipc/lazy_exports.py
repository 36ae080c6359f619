# SPDX-License-Identifier: Apache-2.0
"""Import the public names of a package when they are first used.

This keeps `import tvm_ipc` cheap: the modules behind most of its names import TVM.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def export_on_first_use(
    package: str, modules: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose names are imported on first use.

    Parameters
    ----------
    package : the `__name__` of the package, which lists its public names in `__all__`.
    modules : the module that defines each name, relative to the package.
    submodules : the names that are modules of the package.

    Returns
    -------
    getattr, dir : the two functions, for the package to assign to `__getattr__` and `__dir__`.

    Examples
    --------
    >>> from tvm_ipc.lazy_exports import export_on_first_use
    >>> get, names = export_on_first_use("tvm_ipc", {"Calibration": "calibration"}, ["errors"])
    >>> get("Calibration")
    <class 'tvm_ipc.calibration.Calibration'>
    >>> get("errors").__name__
    'tvm_ipc.errors'
    """

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(sys.modules[package]).setdefault(name, value)

    def names() -> list[str]:
        namespace = vars(sys.modules[package])
        return sorted({*namespace, *namespace["__all__"]})

    return get, names
