# SPDX-License-Identifier: Apache-2.0
"""Libraries, the repair of Disco, sessions and configuration.

Nothing here imports Relax or a pass, so a TVM in runtime-only mode can serve.
"""

from __future__ import annotations


def ready() -> None:
    """Make Disco and the native library usable in this process; repeated calls do nothing.

    Disco is mended first: a native library that cannot be loaded leaves the mended Disco behind.
    """
    from tvm_ipc.runtime import blas, library, repair  # noqa: F401

    repair.repair()
    library.load()
