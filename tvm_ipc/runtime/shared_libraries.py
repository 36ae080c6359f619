# SPDX-License-Identifier: Apache-2.0
"""Load the shared libraries of tvm_ipc and those of TVM that it needs.

TVM loads `libtvm_runtime_extra` (Disco's sessions) and `libtvm_runtime_cuda` only if it runs with
its compiler and its backends are enabled, and the CUDA library only if the system has a CUDA
toolkit. The libraries that TVM did not load are loaded here, by TVM's loader and into TVM's table.
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

from tvm_ipc.errors import DeadlineError, LibraryError, MismatchError, PeerError
from tvm_ipc.packed_functions import LIBRARIES
from tvm_ipc.pip_install_commands import DISTRIBUTION, INSTALL, REINSTALL, install_extra
from tvm_ipc.runtime.config import Config
from tvm_ipc.tvm_private_names import loaded_libraries

_REINSTALL_TVM: Final = "Try `pip install --force-reinstall --no-deps apache-tvm`."
_LIBRARY_NAME: Final = "libtvm_ipc.so"
#: The path of the CUDA runtime in its wheel, below the package `nvidia`.
_CUDART: Final = "cu13/lib/libcudart.so.13"
_PINNED: Final = re.compile(r"(apache-tvm(?:-ffi)?)\s*==\s*([^\s;,]+)")

_log: Final = logging.getLogger(__name__)
_lock = threading.RLock()
_native: Path | None = None
_cuda: str | None = None
_cuda_left_out = False


@dataclass(frozen=True)
class Version:
    """The versions of a package that the native library was built against."""

    package: str
    tested: str | None
    installed: str | None

    @property
    def matches(self) -> bool:
        """True if the installed version is the tested version."""
        return self.installed is not None and self.installed == self.tested


def versions() -> tuple[Version, ...]:
    """Return the installed and the pinned versions of apache-tvm and apache-tvm-ffi."""
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
    """Return a sentence on how the installed pair differs from the tested pair, or ""."""
    pair = [v for v in versions() if v.tested is not None]
    if all(v.matches for v in pair):
        return ""
    installed = ", ".join(f"{v.package} {v.installed or 'missing'}" for v in pair)
    tested = " ".join(f"{v.package}=={v.tested}" for v in pair)
    return (
        f"tvm_ipc was built and tested with another pair than the installed {installed}, beside "
        f"which its library is not loaded, for with others it may fail or crash: pip install "
        f"{tested}"
    )


def load() -> Path:
    """Load all libraries, once per process, and return the path of the native library.

    Raises
    ------
    LibraryError
        A library is missing or cannot be loaded, or TVM is not the version that the library was
        built for. The message names the paths that were searched.
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
                # Python code in a worker gets these classes for errors of the native library.
                tvm_ffi.register_error(error.__name__, error)
            # Raised in a function that native code calls, it would become a RuntimeError.
            tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
            _native = native
            _log.debug("native library: %s; CUDA library of TVM: %s", native, _cuda or "left out")
        return _native


def load_extra() -> bool:
    """Load TVM's `libtvm_runtime_extra`; return whether TVM had not loaded it."""
    loaded = loaded_libraries()
    with _lock:
        if "tvm_runtime_extra" in loaded:
            return False
        try:
            loaded["tvm_runtime_extra"] = _load_tvm_library("tvm_runtime_extra")
        except (OSError, RuntimeError) as error:
            raise LibraryError(
                "Disco needs TVM's libtvm_runtime_extra.so, which cannot be loaded: "
                f"{error}. {explain_versions() or _REINSTALL_TVM}"
            ) from error
        return True


def leave_cuda_out() -> None:
    """Keep this process from initializing CUDA until `load_cuda` is called explicitly."""
    global _cuda_left_out
    _cuda_left_out = True


def require_cuda() -> None:
    """Load TVM's `libtvm_runtime_cuda`.

    Raises
    ------
    LibraryError
        The library cannot be loaded; the message names the package to install.
    """
    outcome = load_cuda()
    if "tvm_runtime_cuda" not in loaded_libraries():
        raise LibraryError(f"TVM's library for GPUs, libtvm_runtime_cuda.so, is {outcome}")
    _log.debug("CUDA library of TVM: %s", outcome)


def load_cuda() -> str:
    """Load TVM's `libtvm_runtime_cuda` if possible; return a phrase for the outcome.

    The library needs a CUDA runtime. If the system has no toolkit, the runtime of the wheel
    `nvidia-cuda-runtime` is loaded first.
    """
    global _cuda
    loaded = loaded_libraries()
    with _lock:
        if _cuda is None:
            _cuda = "loaded by TVM" if "tvm_runtime_cuda" in loaded else _load_cuda(loaded)
        return _cuda


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cudart() -> str | None:
    """Return the path of the CUDA runtime that this process has loaded, or of its wheel's."""
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
        return f"not loaded: {problem}; {install_extra('cuda')}"
    try:
        # Global, so that the library finds it by its name instead of searching the system.
        ctypes.CDLL(str(cudart), ctypes.RTLD_GLOBAL)
        loaded["tvm_runtime_cuda"] = _load_tvm_library("tvm_runtime_cuda")
    except OSError as error:
        return f"not loaded: {error}"
    return f"loaded by tvm_ipc with {cudart}"


def _in_wheel(file: str) -> Path | None:
    """Return the path of a wheel's file below the package `nvidia`; None if it is missing."""
    spec = importlib.util.find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        if (path := Path(directory, file)).is_file():
            return path
    return None


def _load_native() -> Path:
    candidates = _library_paths()
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        searched = " and ".join(map(str, candidates))
        raise LibraryError(
            f"the native library of tvm_ipc is missing: looked for {searched}. Run {INSTALL}."
        )
    try:
        loaded_libraries()["tvm_ipc"] = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(
            f"the native library of tvm_ipc cannot be loaded: {error}. "
            f"{explain_versions() or f'Try {REINSTALL}.'}"
        ) from error
    return path


def _configure() -> None:
    """Pass the environment's settings to the native library, which does not read them itself."""
    settings = Config.from_environment()
    configure = tvm_ffi.get_global_func("tvm_ipc.configure")
    configure(settings.timeout, settings.arena_limit or 0, settings.instruction_set)
    use_library = tvm_ffi.get_global_func("tvm_ipc.use_library")
    for backend, file in LIBRARIES.items():
        use_library(backend, str(_in_wheel(file) or ""))


def _library_paths() -> list[Path]:
    """Return the paths at which the native library may be, in order of preference."""
    paths = [Path(__file__).parents[1] / "lib" / _LIBRARY_NAME]
    try:
        # A checkout that comes first on sys.path may have no library; the installed wheel's is
        # used then.
        distribution = importlib.metadata.distribution(DISTRIBUTION)
        paths.append(Path(str(distribution.locate_file(f"tvm_ipc/lib/{_LIBRARY_NAME}"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    return list(dict.fromkeys(paths))


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
    return Path(loaded_libraries()["tvm_runtime"]._name).resolve().parent


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
