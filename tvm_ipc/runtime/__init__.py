# SPDX-License-Identifier: Apache-2.0
"""Load the libraries, patch Disco, and run sessions.

Nothing here imports Relax or a pass, so it runs with a TVM in runtime-only mode.
"""

from __future__ import annotations

import importlib


def ready() -> None:
    """Make Disco and the native library usable in this process; repeated calls do nothing.

    Disco is patched in any case, even if an environment variable is wrong or the native library
    cannot be loaded.
    """
    from tvm_ipc.runtime import (  # noqa: F401
        distribute_module,
        ffi_exceptions,
        log,
        patch_disco,
        ready_hooks,
        shared_libraries,
        standard_fd_reservation,
        tvm_import,
    )

    for name in ready_hooks.modules:
        importlib.import_module(name)

    standard_fd_reservation.fill()
    try:
        log.start()
    finally:
        ffi_exceptions.install()  # before Disco registers functions of its own
        with tvm_import.fast_import():
            patch_disco.patch_disco()
    for extend in ready_hooks.on_ready:
        extend()
    shared_libraries.load()
    from tvm_ipc.runtime import patch_disco_sessions  # needs the native library

    patch_disco_sessions.patch()
