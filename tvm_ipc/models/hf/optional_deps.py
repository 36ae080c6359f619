# SPDX-License-Identifier: Apache-2.0
"""Import the packages of the optional extra `hf`, or raise an error that names the extra.

This is a module of its own because the command line uses it too, and it imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from tvm_ipc.errors import ModelError
from tvm_ipc.pip_install_commands import install_extra

_INSTALL: Final = f"install the extra hf: {install_extra('hf')}"


def require(purpose: str, *names: str) -> list[Any]:
    """Import modules of the extra and return them.

    Parameters
    ----------
    purpose : begins the error message, such as "to compile a model".
    names : the modules to import; PyTorch and transformers by default.

    Raises
    ------
    ModelError
        A module is not installed, or its import fails.
    """
    modules = []
    for name in names or ("torch", "transformers"):
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            problem = "is not installed" if missing else f"cannot be imported ({error})"
            raise ModelError(f"{purpose} {name} is needed, which {problem}; {_INSTALL}") from error
    return modules
