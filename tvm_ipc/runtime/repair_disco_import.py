# SPDX-License-Identifier: Apache-2.0
"""Patch Disco, which does not work in the released apache-tvm wheel.

TVM imports `tvm.runtime.disco` before it loads the library that the module needs.

- With the compiler, the import fails half-way and TVM ignores the error: `tvm.runtime.disco` is
  None, and the functions that Disco calls by name in its workers are not registered.
- In runtime-only mode the import succeeds, but Disco's classes are not bound to their native types:
  a DRef that a native function returns is a bare object without methods.
- In both modes, the table of native functions `tvm.runtime.disco._ffi_api` stays empty.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tvm_ipc.runtime import shared_libraries
from tvm_ipc.tvm_private_names import (
    DISCO_CLASSES,
    DISCO_FUNCTIONS,
    DISCO_PACKAGE,
    DISCO_SUBMODULES,
    disco_api,
    has_native_type,
)

_log: Final = logging.getLogger(__name__)
_lock = threading.RLock()
_defects: list[str] = []


@dataclass(frozen=True)
class DiscoPatch:
    """The defects of Disco in this process.

    Attributes
    ----------
    found : descriptions of the defects that were found since the process started.
    patched : those of them that have been fixed.
    """

    found: tuple[str, ...]
    patched: tuple[str, ...]


def patch_disco() -> DiscoPatch:
    """Patch Disco in this process; repeated calls change nothing.

    Raises
    ------
    LibraryError
        TVM's library with Disco's native part cannot be loaded.
    """
    import tvm  # noqa: F401  outside the lock, as in shared_libraries.load

    steps: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("libtvm_runtime_extra was not loaded", shared_libraries.load_extra),
        ("tvm.runtime.disco was not imported", _import_disco),
        ("tvm.runtime.disco._ffi_api was empty", _fill_ffi_api),
        ("Disco's classes were not bound to their native types", _bind_classes),
    )
    with _lock:
        for defect, patch in steps:
            if patch() and defect not in _defects:
                _defects.append(defect)
                _log.debug("patched: %s", defect)
        patched = tuple(_defects)
        missing = tuple(f"{name} is not registered" for name in _missing_functions())
        return DiscoPatch(found=patched + missing, patched=patched)


def _import_disco() -> bool:
    import tvm.runtime

    if getattr(tvm.runtime, "disco", None) is not None:
        return False
    package = importlib.import_module("tvm.runtime.disco")
    for submodule in DISCO_SUBMODULES:
        # Submodules of the failed import are in sys.modules, but not yet attributes.
        submodule.set(importlib.import_module(f"{submodule.module}.{submodule.name}"))
    DISCO_PACKAGE.set(package)
    return True


def _fill_ffi_api() -> bool:
    import tvm_ffi

    api = disco_api()
    if hasattr(api, "SessionThreaded"):
        return False
    tvm_ffi.init_ffi_api("runtime.disco", api.__name__)
    return True


def _bind_classes() -> bool:
    import tvm_ffi
    from tvm.runtime import disco

    unbound = [
        cls for cls in (getattr(disco, name) for name in DISCO_CLASSES) if not has_native_type(cls)
    ]
    for cls in unbound:
        tvm_ffi.register_object(f"runtime.disco.{cls.__name__}")(cls)
    return bool(unbound)


def _missing_functions() -> list[str]:
    import tvm_ffi

    return [
        name
        for name in DISCO_FUNCTIONS
        if tvm_ffi.get_global_func(name, allow_missing=True) is None
    ]
