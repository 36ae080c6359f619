# SPDX-License-Identifier: Apache-2.0
"""The functions that `runtime.subprocess_call` calls in a child process, to compile a model.

Importing this module imports no TVM, so the functions can first report what they do, and import
TVM without PyTorch, which a model that is cached after its import does not need.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from tvm_ipc.runtime.import_tvm_without_compiler import import_with_compiler


def compile_model(request: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Compile a model into the private folder `request["work"]`."""
    with _gc_disabled():
        progress("importing TVM")
        import_with_compiler()
        from tvm_ipc.models.hf import compile_and_map_names_in_child

        compile_and_map_names_in_child.compile_model(request, progress)


def names(request: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the names that the weights of a model have in its files."""
    with _gc_disabled():
        import_with_compiler()
        from tvm_ipc.models.hf import compile_and_map_names_in_child

        return compile_and_map_names_in_child.names(request, progress)


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable the garbage collector: it would take a fifth of the time, and the child ends soon."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
