# SPDX-License-Identifier: Apache-2.0
"""Loads the shared libraries that this package needs, its own and TVM's.

TVM loads `libtvm_runtime_extra` (Disco's sessions) and `libtvm_runtime_cuda` only where it runs
with its compiler and with its backends switched on, and the CUDA one only where the system has
a CUDA toolkit. What it left out is loaded here, in its own way and recorded in its own table.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tvm_ffi

from tvm_ipc.contract import LIBRARIES
from tvm_ipc.errors import DeadlineError, LibraryError, MismatchError, PeerError
from tvm_ipc.runtime.config import Config

DISTRIBUTION: Final = "tvm-ipc"
_FILE: Final = "libtvm_ipc.so"
#: What the wheel of the CUDA runtime brings, below the package `nvidia`.
_CUDART: Final = "cu13/lib/libcudart.so.13"
_PINNED: Final = re.compile(r"(apache-tvm(?:-ffi)?)\s*==\s*([^\s;,]+)")

_log: Final = logging.getLogger(__name__)
_lock = threading.RLock()
_native: Path | None = None
_cuda: str | None = None
_cuda_left_out = False


@dataclass(frozen=True)
class Version:
    """A package that the native library was built against."""

    package: str
    tested: str | None
    installed: str | None

    @property
    def matches(self) -> bool:
        """Whether the installed version is the tested one."""
        return self.installed is not None and self.installed == self.tested


def versions() -> tuple[Version, ...]:
    """Compare the installed apache-tvm and apache-tvm-ffi with the pair this package pins."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    pinned = {m[1]: m[2] for r in requirements if (m := _PINNED.match(r))}
    return tuple(
        Version(package, pinned.get(package), _installed(package))
        for package in ("apache-tvm", "apache-tvm-ffi")
    )


def explain_versions() -> str:
    """Say in one sentence how the installed pair differs from the tested one; empty if not."""
    pair = [v for v in versions() if v.tested is not None]
    if all(v.matches for v in pair):
        return ""
    have = ", ".join(f"{v.package} {v.installed or 'missing'}" for v in pair)
    want = " ".join(f"{v.package}=={v.tested}" for v in pair)
    return (
        f"tvm_ipc was built and tested with another pair than the installed {have}, beside which "
        f"its library is not loaded, for with others it may fail or crash: pip install {want}"
    )


def load() -> Path:
    """Load everything, once per process, and return the path of the native library.

    Raises
    ------
    LibraryError
        A library is missing or cannot be loaded; the message says where it was looked for. Or TVM
        is not the one that this library was built for.
    """
    # Outside the lock: another thread may hold the import lock of tvm and wait for ours.
    import tvm  # noqa: F401

    global _native
    with _lock:
        if _native is None:
            if explanation := explain_versions():
                raise LibraryError(explanation)
            load_extra()
            if not _cuda_left_out:
                load_cuda()
            native = _load_native()
            _configure()
            for error in (DeadlineError, MismatchError, PeerError):
                # Python code in a worker gets, and passes on, what the native library raised.
                tvm_ffi.register_error(error.__name__, error)
            _native = native
            _log.debug("native library: %s; CUDA library of TVM: %s", native, _cuda or "left out")
        return _native


def load_extra() -> bool:
    """Load TVM's `libtvm_runtime_extra`; return whether TVM had left it out."""
    loaded = _loaded_libraries()
    with _lock:
        if "tvm_runtime_extra" in loaded:
            return False
        try:
            loaded["tvm_runtime_extra"] = _load_tvm_library("tvm_runtime_extra")
        except (OSError, RuntimeError) as error:
            raise LibraryError(
                "Disco needs TVM's libtvm_runtime_extra.so, which cannot be loaded: "
                f"{error}. {explain_versions() or _reinstall('apache-tvm')}"
            ) from error
        return True


def leave_cuda_out() -> None:
    """Let this process touch nothing of CUDA until `load_cuda` is called for itself."""
    global _cuda_left_out
    _cuda_left_out = True


def require_cuda() -> None:
    """Load TVM's `libtvm_runtime_cuda`.

    Raises
    ------
    LibraryError
        It cannot be loaded; the message says what to install.
    """
    came_of_it = load_cuda()
    if "tvm_runtime_cuda" not in _loaded_libraries():
        raise LibraryError(f"TVM's library for GPUs, libtvm_runtime_cuda.so, is {came_of_it}")
    _log.debug("CUDA library of TVM: %s", came_of_it)


def load_cuda() -> str:
    """Load TVM's `libtvm_runtime_cuda` where that is possible; return what came of it.

    The library needs a CUDA runtime. Where the system has no toolkit, the one of the wheel
    `nvidia-cuda-runtime` serves, if it is loaded first.
    """
    global _cuda
    loaded = _loaded_libraries()
    with _lock:
        if _cuda is None:
            _cuda = "loaded by TVM" if "tvm_runtime_cuda" in loaded else _load_cuda(loaded)
        return _cuda


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cudart() -> str | None:
    """Return the CUDA runtime that this process has loaded, or else that of its wheel."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if "libcudart.so" in path:
            return path
    wheel = _in_wheel(_CUDART)
    return str(wheel) if wheel else None


def _load_cuda(loaded: dict[str, Any]) -> str:
    if not (_tvm_library_directory() / "libtvm_runtime_cuda.so").exists():
        return "not part of this apache-tvm"
    if not has_nvidia_driver():
        return "not loaded: no NVIDIA driver (libcuda.so.1)"
    try:
        loaded["tvm_runtime_cuda"] = _load_tvm_library("tvm_runtime_cuda")
    except OSError as error:
        problem = error
    else:
        return "loaded by tvm_ipc"
    cudart = _in_wheel(_CUDART)
    if cudart is None:
        return f"not loaded: {problem}; pip install '{DISTRIBUTION}[cuda]'"
    try:
        # Global, so that the library finds it by its name instead of searching the system.
        ctypes.CDLL(str(cudart), ctypes.RTLD_GLOBAL)
        loaded["tvm_runtime_cuda"] = _load_tvm_library("tvm_runtime_cuda")
    except OSError as error:
        return f"not loaded: {error}"
    return f"loaded by tvm_ipc with {cudart}"


def _in_wheel(file: str) -> Path | None:
    """Return where a wheel has put a file below the package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        if (path := Path(directory, file)).is_file():
            return path
    return None


def _load_native() -> Path:
    places = _places()
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = " and ".join(str(place) for place in places)
        raise LibraryError(
            f"the native library of tvm_ipc is missing: looked for {looked}. Install it with "
            "`pip install .` in a checkout, or with "
            f"`pip install --force-reinstall --no-deps {DISTRIBUTION}`."
        )
    try:
        _loaded_libraries()["tvm_ipc"] = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(
            f"the native library of tvm_ipc cannot be loaded: {error}. "
            f"{explain_versions() or _reinstall(DISTRIBUTION)}"
        ) from error
    return path


def _configure() -> None:
    """Hand the environment's settings to the native library: it reads none itself."""
    settings = Config.from_environment()
    configure = tvm_ffi.get_global_func("tvm_ipc.configure")
    configure(settings.timeout, settings.arena_limit or 0, settings.instruction_set)
    use_library = tvm_ffi.get_global_func("tvm_ipc.use_library")
    for backend, file in LIBRARIES.items():
        use_library(backend, str(_in_wheel(file) or ""))


def _places() -> list[Path]:
    """Where the native library can be, best first."""
    places = [Path(__file__).parents[1] / "lib" / _FILE]
    try:
        # A checkout that comes first on sys.path has Python files but no library; the installed
        # wheel's is the one its user means.
        distribution = importlib.metadata.distribution(DISTRIBUTION)
        places.append(Path(str(distribution.locate_file(f"tvm_ipc/lib/{_FILE}"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    return list(dict.fromkeys(places))


def _load_tvm_library(name: str) -> ctypes.CDLL:
    from tvm_ffi.libinfo import load_lib_ctypes

    library: ctypes.CDLL = load_lib_ctypes(
        package="tvm",
        target_name=name,
        mode="RTLD_LOCAL",
        extra_lib_paths=[_tvm_library_directory()],
    )
    return library


def _tvm_library_directory() -> Path:
    return Path(_loaded_libraries()["tvm_runtime"]._name).resolve().parent


def _loaded_libraries() -> dict[str, Any]:
    """Return TVM's own table of loaded libraries by name, which extensions share."""
    import tvm.base

    table: dict[str, Any] = tvm.base._LOADED_LIBS
    return table


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reinstall(package: str) -> str:
    return f"Try `pip install --force-reinstall --no-deps {package}`."
