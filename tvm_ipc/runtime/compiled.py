# SPDX-License-Identifier: Apache-2.0
"""Compiled modules on their way to the workers: files that each of them loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError


def library_of(module: Any, place: Callable[[], Path]) -> Path:
    """Return the library of a compiled module; what is no file yet is written at `place()`."""
    if not hasattr(module, "export_library"):
        return _library(module).resolve()
    path = place()
    try:
        module.export_library(str(path))
    except TypeError as error:  # says nothing to a user: see below
        raise IPCError(_unlinked(error)) from None
    except (OSError, RuntimeError) as error:
        raise IPCError(_unlinked(error)) from error
    return _library(path).resolve()


def _unlinked(error: Exception) -> str:
    """Say why TVM could not link; it raises a TypeError where it found no compiler at all."""
    text = "the executable could not be linked into a library; TVM needs a C++ compiler for that"
    if not isinstance(error, TypeError):
        why = next((x for x in str(error).splitlines() if x and x != "Compilation error:"), "")
        return f"{text}: {why}; `tvm-ipc doctor` tries the one that it would take"
    return f"{text}: install g++ or clang, or name one in the environment variable CXX"


def _library(path: object) -> Path:
    """Return the path of a compiled module, if there is one."""
    wanted = "the path of a compiled library, or what tvm.compile returned"
    if hasattr(path, "functions_items"):
        raise TypeError(
            f"load_vm_module: path is {wanted}, not an IRModule, which is not compiled yet; "
            "give it tvm.compile(module, target='llvm')"
        )
    found = arguments.path("load_vm_module: path", path, wanted)
    if not found.is_file():
        raise FileNotFoundError(
            f"load_vm_module: path: there is no compiled module at {str(path)!r}"
        )
    with found.open("rb") as file:
        if found.suffix != ".so" or file.read(4) != b"\x7fELF":
            raise arguments.wrong_value("load_vm_module: path", wanted + ", a file *.so", str(path))
    return found
