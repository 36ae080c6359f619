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
    with without_torch(), config.runtime_alone(), quickly():
        import tvm


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Let TVM, which is imported meanwhile, load its runtime alone in half the time.

    It asks for the types of its compiler, which are not there. Each answer is an error inside the
    FFI, and for the backtrace of the first one that reads all debug information: 0.13 seconds.
    """
    if "tvm" in sys.modules:
        yield
        return
    import tvm_ffi
    from tvm_ffi import core

    registered = tvm_ffi.get_global_func("ffi.GetRegisteredTypeKeys")
    ask = core._object_type_key_to_index
    known: set[str] = set()

    def answer(type_key: str) -> int | None:
        if type_key not in known:
            known.update(registered())
        return ask(type_key) if type_key in known else None

    core._object_type_key_to_index = answer
    try:
        yield
    finally:
        core._object_type_key_to_index = ask


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
