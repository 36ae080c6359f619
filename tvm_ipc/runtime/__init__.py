# SPDX-License-Identifier: Apache-2.0
"""Libraries, the repair of Disco, sessions and configuration.

Nothing here imports Relax or a pass, so a TVM in runtime-only mode can serve.
"""

from __future__ import annotations


def ready() -> None:
    """Make Disco and the native library usable in this process; repeated calls do nothing.

    Disco is mended in any case: a wrong variable, or a native library that cannot be loaded,
    leaves the mended Disco behind.
    """
    from tvm_ipc.runtime import (  # noqa: F401
        blas,
        cuda_headers,
        gpus,
        importing,
        library,
        log,
        python_errors,
        repair,
        shipping,
    )

    try:
        log.start()
    finally:
        python_errors.install()  # before Disco registers functions of its own
        with importing.quickly():
            repair.repair()
    cuda_headers.mend()
    library.load()
    from tvm_ipc.runtime import disco_sessions  # wants the native library

    disco_sessions.mend()
