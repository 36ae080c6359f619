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
        exception_types_over_ffi,
        import_tvm_without_compiler,
        log,
        repair_disco_import,
        shared_libraries,
        standard_fd_reservation,
        startup_registrations,
    )

    for name in startup_registrations.modules:
        importlib.import_module(name)

    standard_fd_reservation.fill()
    try:
        log.start()
    finally:
        exception_types_over_ffi.install()  # before Disco registers functions of its own
        with import_tvm_without_compiler.fast_import():
            repair_disco_import.patch_disco()
    for extend in startup_registrations.on_ready:
        extend()
    shared_libraries.load()
    from tvm_ipc.runtime import patch_disco_error_handling  # needs the native library

    patch_disco_error_handling.patch()
