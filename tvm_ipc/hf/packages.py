# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra `hf`, which are imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any, Final

from tvm_ipc.errors import ModelError

_INSTALL: Final = "install the extra hf: pip install 'tvm-ipc[hf]'"


def needed(purpose: str, *names: str) -> list[Any]:
    """Return modules of the extra; raise `ModelError` where one is missing or broken.

    Parameters
    ----------
    purpose : what they are for, in the message: "to compile a model".
    names : PyTorch and transformers if none is given.
    """
    found = []
    for name in names or ("torch", "transformers"):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            what = "is not installed" if missing else f"cannot be imported ({error})"
            raise ModelError(f"{purpose} {name} is needed, which {what}; {_INSTALL}") from error
    return found
