# SPDX-License-Identifier: Apache-2.0
"""Turn a compiled module into a library file that workers load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError


def library_of(module: Any, new_path: Callable[[], Path]) -> Path:
    """Return the library of a compiled module; an executable is exported to `new_path()`."""
    if not hasattr(module, "export_library"):
        return _check_library(module).resolve()
    path = new_path()
    try:
        module.export_library(str(path))
    except TypeError as error:  # meaningless for users: TVM found no compiler
        raise IPCError(_explain_link_error(error)) from None
    except (OSError, RuntimeError) as error:
        raise IPCError(_explain_link_error(error)) from error
    return _check_library(path).resolve()


def _explain_link_error(error: Exception) -> str:
    """Return why TVM could not link; it raises a TypeError if it found no compiler at all."""
    text = "the executable could not be linked into a library; TVM needs a C++ compiler for that"
    if not isinstance(error, TypeError):
        reason = next((x for x in str(error).splitlines() if x and x != "Compilation error:"), "")
        return f"{text}: {reason}; `tvm-ipc doctor` tries the one that it would take"
    return f"{text}: install g++ or clang, or name one in the environment variable CXX"


def _check_library(path: object) -> Path:
    """Return the path of a compiled library; raise if the file is none."""
    expected = "the path of a compiled library, or what tvm.compile returned"
    if hasattr(path, "functions_items"):
        raise TypeError(
            f"load_vm_module: path is {expected}, not an IRModule, which is not compiled yet; "
            "give it tvm.compile(module, target='llvm')"
        )
    library = arguments.path("load_vm_module: path", path, expected)
    if not library.is_file():
        raise FileNotFoundError(
            f"load_vm_module: path: there is no compiled module at {str(path)!r}"
        )
    with library.open("rb") as file:
        if library.suffix != ".so" or file.read(4) != b"\x7fELF":
            raise arguments.wrong_value(
                "load_vm_module: path", expected + ", a file *.so", str(path)
            )
    return library
