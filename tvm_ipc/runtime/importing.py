# SPDX-License-Identifier: Apache-2.0
"""TVM without what a process has no use for: its compiler, and PyTorch.

TVM's FFI imports PyTorch where it is installed, and `import tvm` loads a compiler of 250 MB.
Workers need neither, nor does a controller that compiles nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config


def runtime_only() -> None:
    """Load TVM in this process without its compiler, and without PyTorch.

    For programs that run what is compiled, such as those with `tvm_ipc.hf.load`, which compiles in
    a process of its own: they take half the memory, and less where PyTorch is installed. It comes
    first, before anything imports TVM. Of this package there are then sessions, weights and models;
    `tvm.relax`, and what stands on it, is missing. PyTorch may be imported later, and its tensors
    are taken as anywhere; a `torch.dtype` is not, for which TVM looks as it is imported: give
    "float32". Repeated calls do nothing.

    Raises
    ------
    IPCError
        TVM has been imported already, with its compiler.
    """
    if "tvm" in sys.modules:
        import tvm.base

        if "tvm_compiler" in tvm.base._LOADED_LIBS:
            raise IPCError(
                "runtime_only: TVM has been imported already, with its compiler; call it before "
                "anything imports tvm"
            )
        return
    with without_torch(), config.runtime_alone():
        import tvm


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Let what is imported meanwhile find no PyTorch, unless it is imported already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]
