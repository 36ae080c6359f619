# SPDX-License-Identifier: Apache-2.0
"""Import TVM without PyTorch, and without its compiler or with it.

TVM's FFI imports PyTorch if it is installed, and `import tvm` loads a compiler of 250 MB. Workers
need neither, nor does a controller that compiles nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.tvm_private_names import REGISTERED_TYPE_KEYS, TYPE_INDEX_LOOKUP, has_compiler


def runtime_only() -> None:
    """Load TVM in this process without its compiler, and without PyTorch.

    This is for programs that only run compiled modules, such as those with `tvm_ipc.models.load`,
    which compiles in a process of its own. They take half the memory, and less if PyTorch is
    installed. Call this first, before anything imports TVM. Sessions, weights and models of tvm_ipc
    are available then; `tvm.relax` and everything that needs it is not. PyTorch may be imported
    later, and its tensors are accepted as usual. A `torch.dtype` is not, because TVM looks for it
    during its own import: pass "float32" instead. Repeated calls do nothing.

    Raises
    ------
    IPCError
        TVM has been imported already, with its compiler.

    Examples
    --------
    >>> import tvm_ipc
    >>> tvm_ipc.runtime_only()
    >>> with tvm_ipc.Session(num_workers=2) as session:
    ...     session.get(session.put([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    if "tvm" in sys.modules:
        if has_compiler():
            raise IPCError(
                "runtime_only: TVM has been imported already, with its compiler; call it before "
                "anything imports tvm"
            )
        return
    with without_torch(), config.runtime_alone(), fast_import():
        import tvm  # noqa: F401


@contextlib.contextmanager
def fast_import() -> Iterator[None]:
    """Save 0.1 to 0.3 seconds of an `import tvm` inside the `with` block.

    TVM looks up types that are not registered: those of its compiler in runtime-only mode, and
    those of Disco with the compiler. Each such lookup is an error inside the FFI, which reads all
    debug information for the backtrace of the first one.
    """
    if "tvm" in sys.modules:
        yield
        return
    import tvm_ffi

    registered = tvm_ffi.get_global_func(REGISTERED_TYPE_KEYS)
    original_lookup = TYPE_INDEX_LOOKUP.get()
    type_keys: set[str] = set()

    def look_up(type_key: str) -> int | None:
        if type_key not in type_keys:
            type_keys.update(registered())
        return original_lookup(type_key) if type_key in type_keys else None

    TYPE_INDEX_LOOKUP.set(look_up)
    try:
        yield
    finally:
        TYPE_INDEX_LOOKUP.set(original_lookup)


def import_with_compiler() -> None:
    """Import TVM with its compiler, and without PyTorch.

    This is for processes that `subprocess_call` starts. They import PyTorch later, if they need it.
    """
    with without_torch(), fast_import():
        import tvm  # noqa: F401


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Hide PyTorch from imports inside the `with` block, unless it is imported already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]
