# SPDX-License-Identifier: Apache-2.0
"""Make `tvm_ipc.comm` available in TVMScript as `R.comm`, without importing it before it is used.

TVM imports the modules of TVMScript for Relax when a program needs them, so an import hook adds
the attribute then.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tvm_ipc.tvm_private_names import SCRIPT_MODULES, set_script_namespace


class _LazyComm(ModuleType):
    """Stand in for `tvm_ipc.comm`, which replaces this object when it is imported."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tvm_ipc.comm"), name)


class _ScriptFinder(importlib.abc.MetaPathFinder):
    """Find the modules of TVMScript as usual, and add `comm` to them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SCRIPT_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _add_comm(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_comm(module: Any) -> None:
    if not hasattr(module, "comm"):
        comm = sys.modules.get("tvm_ipc.comm") or _LazyComm("tvm_ipc.comm")
        set_script_namespace(module, comm)


def install() -> None:
    """Add `comm` to the modules of TVMScript, now or when they are imported."""
    if not any(isinstance(finder, _ScriptFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ScriptFinder())
    for name in SCRIPT_MODULES:
        if module := sys.modules.get(name):
            _add_comm(module)
