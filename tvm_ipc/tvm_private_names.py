# SPDX-License-Identifier: Apache-2.0
"""Everything of TVM that this package uses although no document of TVM promises it.

Checked with apache-tvm 0.27.0.post1 and apache-tvm-ffi 0.1.14.post1 (`CHECKED_WITH`). To port the
package to another release, read this file and `tvm_moved_names.py`, which has the public names that
are elsewhere in other releases. `tests/test_tvm_private_names.py` fails if another file uses a
private name of TVM, looks up a global function of TVM that is not listed here, or replaces anything
of TVM that is not listed here.

Importing this module imports no TVM, so every part of the package may import it. In programs that
only run compiled modules, nothing here loads TVM's compiler.

A C++ compiler checks that the native library implements the classes of Disco's headers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from tvm_ipc.packed_functions import BACKENDS

#: The releases with which everything here was checked; `pyproject.toml` requires the same.
CHECKED_WITH: Final = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}

# ---- what is replaced in TVM ----------------------------------------------------------------


@dataclass(frozen=True)
class Replaceable:
    """An attribute of TVM that this package replaces.

    Attributes
    ----------
    module : the module that has the attribute, or whose class has it.
    name : the name of the attribute; "Class.name" for one of a class.
    why : the reason, and the file of ours with the replacement.
    """

    module: str
    name: str
    why: str

    def get(self) -> Any:
        """Return the current value, which is TVM's or a replacement."""
        owner, name = self._owner_and_name()
        return getattr(owner, name)

    def set(self, value: Any) -> None:
        """Replace the value."""
        setattr(*self._owner_and_name(), value)

    def _owner_and_name(self) -> tuple[Any, str]:
        module = importlib.import_module(self.module)
        owner, _, name = self.name.rpartition(".")
        return (getattr(module, owner) if owner else module), name


_HALF_IMPORTED: Final = (
    "TVM imports Disco before the library with its native part, and ignores the error "
    "(runtime/repair_disco_import.py)"
)
DISCO_PACKAGE: Final = Replaceable("tvm.runtime", "disco", _HALF_IMPORTED)
DISCO_SUBMODULES: Final = tuple(
    Replaceable("tvm.runtime.disco", name, _HALF_IMPORTED)
    for name in ("_ffi_api", "process_pool", "session")
)

_ENDED_WORKERS: Final = (
    "once a worker has ended, Disco waits indefinitely or ends the program; it catches no "
    "exceptions of workers (runtime/patch_disco_error_handling.py)"
)
#: Constructors of Disco's sessions.
DISCO_CONSTRUCTORS: Final = {
    name: Replaceable("tvm.runtime.disco._ffi_api", name, _ENDED_WORKERS)
    for name in ("SessionThreaded", "SessionProcess", "SocketSession")
}
#: Functions of Disco that write to the pipes of workers, or wait for workers.
DISCO_CALLS: Final = {
    name: Replaceable("tvm.runtime.disco._ffi_api", name, _ENDED_WORKERS)
    for name in (
        "SessionGetGlobalFunc",
        "SessionCallPacked",
        "SessionCopyToWorker0",
        "SessionCopyFromWorker0",
        "SessionSyncWorker",
        "DRefDebugGetFromRemote",
        "DRefDebugCopyFrom",
        "SessionShutdown",
    )
}
DISCO_INIT_CCL: Final = Replaceable(
    "tvm.runtime.disco",
    "Session.init_ccl",
    'backends of this package, and "auto" (runtime/patch_disco_error_handling.py)',
)
REGISTER_GLOBAL_FUNC: Final = Replaceable(
    "tvm_ffi.core",
    "_register_global_func",
    "the FFI passes on eight types of exceptions (runtime/keep_exception_type_and_text.py)",
)
TYPE_INDEX_LOOKUP: Final = Replaceable(
    "tvm_ffi.core",
    "_object_type_key_to_index",
    "the first lookup of a missing type takes 0.13 s (runtime/import_tvm_without_compiler.py)",
)
_HEADERS_OF_WHEELS: Final = (
    "TVM finds CUDA's headers only where a toolkit has them (gpu/patch_cuda_header_search.py)"
)
CUDA_SEARCH: Final = Replaceable("tvm.support.nvcc", "find_cuda_path", _HEADERS_OF_WHEELS)
CUDA_INCLUDE_SEARCH: Final = Replaceable(
    "tvm.support.nvcc", "_find_cuda_target_include", _HEADERS_OF_WHEELS
)

WORKER_MAIN_LOOP: Final = "runtime.disco.WorkerProcess"
CREATE_PROCESS_POOL: Final = "runtime.disco.create_process_pool"
#: The global functions of TVM that are registered again (runtime/patch_disco_error_handling.py).
REPLACED_FUNCTIONS: Final = {
    CREATE_PROCESS_POOL,  # the pipes of TVM's workers break when a worker ends
    WORKER_MAIN_LOOP,  # children of a worker inherit its pipes
    # Builds of TVM with NCCL have a backend of this name.
    *(f"runtime.disco.{backend}.init_ccl" for backend in BACKENDS),
}


def replace_global_func(name: str, function: Callable[..., Any]) -> None:
    """Register a global function of TVM again.

    Raises
    ------
    KeyError
        The function is not in `REPLACED_FUNCTIONS`.
    """
    if name not in REPLACED_FUNCTIONS:
        raise KeyError(f"{name} is not listed in {__name__}.REPLACED_FUNCTIONS")
    import tvm_ffi

    tvm_ffi.register_global_func(name, function, override=True)


# ---- global functions of TVM that this package calls ------------------------------------------

IMPORT_PYTHON_MODULE: Final = "runtime.disco._import_python_module"
LOAD_VM_MODULE: Final = "runtime.disco.load_vm_module"
EMPTY: Final = "runtime.disco.empty"
MAKE_TUPLE: Final = "vm.builtin.make_tuple"
TUPLE_GETITEM: Final = "vm.builtin.tuple_getitem"
REGISTERED_TYPE_KEYS: Final = "ffi.GetRegisteredTypeKeys"
LLVM_CPU_FEATURES: Final = "target.llvm_get_cpu_features"
HOST_CPU_FEATURES: Final = "tvm.codegen.llvm.GetHostCPUFeatures"
#: Functions that the native library calls.
CALLED_BY_NATIVE_LIBRARY: Final = (EMPTY,)
#: Python functions that Disco's controller or workers look up by name. They are missing if the
#: import of Disco failed.
DISCO_FUNCTIONS: Final = (
    CREATE_PROCESS_POOL,
    "runtime.disco.create_socket_session_local_workers",
    "runtime.disco._configure_structlog",
    IMPORT_PYTHON_MODULE,
)

# ---- TVM's libraries --------------------------------------------------------------------------


def loaded_libraries() -> dict[str, Any]:
    """Return TVM's table of loaded libraries by name, which extensions share.

    The comment at the table invites extensions to use it.
    """
    import tvm.base

    table: dict[str, Any] = tvm.base._LOADED_LIBS
    return table


def has_compiler() -> bool:
    """Return whether this process has loaded TVM's compiler, and not only its runtime."""
    return "tvm_compiler" in loaded_libraries()


# ---- Disco ------------------------------------------------------------------------------------

#: Classes that may lack their native type after `import tvm`.
DISCO_CLASSES: Final = ("DRef", "Session", "ThreadedSession", "ProcessSession", "SocketSession")
#: Private methods of `disco.Session` that `tvm_ipc.Session` overrides: public methods that it
#: inherits call the first two, and programs call the last, as TVM's own tests do.
OVERRIDDEN_METHODS: Final = ("_get_cached_method", "_sync_worker", "_sync_all")


def disco_api() -> Any:
    """Return the module with the native functions of Disco."""
    return importlib.import_module("tvm.runtime.disco._ffi_api")


def has_native_type(cls: type) -> bool:
    """Return whether a class is bound to a native type."""
    return "__tvm_ffi_type_info__" in vars(cls)


def clear_ipc_memory_pool(session: Any) -> None:
    """Do what Disco's own `init_ccl` does after it has started a backend."""
    session._clear_ipc_memory_pool()


def forget_functions(session: Any) -> None:
    """Forget the functions that a session of Disco has looked up in its workers."""
    getattr(session, "_cache", {}).clear()


def kill_children_of(pid: int) -> None:
    """Kill all descendants of a process; raise ImportError without the optional psutil."""
    importlib.import_module("tvm.runtime.disco.process_pool")._kill_child_processes(pid)


# ---- tvm_ffi ----------------------------------------------------------------------------------

#: The prefix of the symbols of functions in compiled modules.
SYMBOL_PREFIX: Final = "__tvm_ffi_"


def set_ffi_error(exception: Exception, kind: str, text: str) -> None:
    """Let the FFI pass an exception on under the name of a type that it does not know."""
    from tvm_ffi.core import Error

    exception.__tvm_ffi_error__ = Error(kind, text, "")  # type: ignore[attr-defined]


def has_ffi_error(exception: BaseException) -> bool:
    """Return whether an exception came through the FFI, which passes it on unchanged."""
    return hasattr(exception, "__tvm_ffi_error__")


def array_size_and_item() -> tuple[Callable[[Any], int], Callable[[Any, int], Any]]:
    """Return two functions on FFI arrays, which are faster than `tvm_ffi.Array`'s methods."""
    api: Any = importlib.import_module("tvm_ffi._ffi_api")
    return api.ArraySize, api.ArrayGetItem


def tensor_view(tensor: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a tensor of another shape and type on the same memory; DLPack has fewer types."""
    return tensor._create_view(shape, dtype, 0)


# ---- TVM's compiler ---------------------------------------------------------------------------


def update_type(expr: Any, ty: Any) -> None:
    """Set the type of a Relax expression; public functions only do so for new ones."""
    from tvm.relax.expr import _update_type

    _update_type(expr, ty)


def end_block(builder: Any) -> None:
    """End the open block of a block builder after an error, else it prints a warning."""
    builder._end_block()


def expr_of(tensor: Any) -> Any:
    """Return the Relax expression of an `nn.Tensor`, for operators that `nn.op` lacks."""
    return tensor._expr


#: Methods by which TVM's importer of exported PyTorch programs converts operators.
_TORCH_CONVERTERS: Final = {
    "batch_norm": "_batch_norm_legit_no_training",
    "cumsum": "_cumsum",
    "index": "_index_tensor",
    "index_put": "_index_put",
    "layer_norm": "_layer_norm_impl",
    "pow": "_pow",
    "slice": "_slice",
    "var": "_var",
}


def torch_converter(importer: Any, operator: str) -> Callable[..., Any]:
    """Return TVM's own converter of an operator, which one in `custom_convert_map` replaces."""
    converter: Callable[..., Any] = getattr(importer, _TORCH_CONVERTERS[operator])
    return converter


# ---- TVMScript --------------------------------------------------------------------------------

#: Programs import the first module as `R`; the parser looks names up in the second. Each gets an
#: attribute `comm` (script_namespace.py).
SCRIPT_MODULES: Final = ("tvm.relax.script", "tvm.relax.script.parser")


def set_script_namespace(module: Any, comm: ModuleType) -> None:
    """Let programs write `R.comm`; TVMScript has no way to register a namespace."""
    module.comm = comm
