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
        import_tvm_without_compiler,
        keep_exception_type_and_text,
        log,
        repair_disco_import,
        send_library_to_nodes,
        shared_libraries,
        standard_fd_reservation,
        startup_hooks,
    )

    for name in startup_hooks.modules:
        importlib.import_module(name)

    standard_fd_reservation.fill()
    try:
        log.start()
    finally:
        keep_exception_type_and_text.install()  # before Disco registers functions of its own
        with import_tvm_without_compiler.fast_import():
            repair_disco_import.patch_disco()
    for extend in startup_hooks.on_ready:
        extend()
    shared_libraries.load()
    from tvm_ipc.runtime import patch_disco_error_handling  # needs the native library

    patch_disco_error_handling.patch()
