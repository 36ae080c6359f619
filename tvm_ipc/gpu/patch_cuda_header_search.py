# SPDX-License-Identifier: Apache-2.0
"""Patches that let TVM compile for CUDA with the wheels of the extra `cuda`, without a toolkit.

TVM's compiler callback needs the folder of a toolkit, if only for its headers when NVRTC compiles.
It expects the headers of the C++ library where a toolkit has them; wheels have them elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from tvm_ipc.pip_install_commands import install_extra
from tvm_ipc.runtime import startup_hooks
from tvm_ipc.tvm_private_names import CUDA_INCLUDE_SEARCH, CUDA_SEARCH


def patch() -> None:
    """Patch TVM's search for headers so that it falls back on those of the wheels."""
    search = CUDA_SEARCH.get()
    if getattr(search, "__module__", None) == __name__:
        return
    CUDA_SEARCH.set(_or_wheels(search))
    CUDA_INCLUDE_SEARCH.set(_or_plain(CUDA_INCLUDE_SEARCH.get()))


def _or_wheels(find: Any) -> Any:
    @functools.wraps(find, assigned=("__name__", "__doc__"))
    def find_cuda_path() -> str:
        try:
            folder = str(find())
        except (OSError, RuntimeError) as error:
            # TVM searches nvcc with the program `which`; if that is missing, it raises an OSError.
            folder = _on_path() if isinstance(error, OSError) else ""
            if not folder:
                if wheels := _wheels():
                    return wheels
                reason = "Cannot find CUDA path" if isinstance(error, OSError) else str(error)
                raise RuntimeError(
                    f"{reason}: TVM needs a CUDA toolkit (nvcc on PATH, or CUDA_PATH) or wheels to "
                    f"compile for CUDA; install the wheels with {install_extra('cuda')}"
                ) from None
        # An nvcc on PATH may be installed without its toolkit.
        has_headers = _has_headers(Path(folder)) or CUDA_INCLUDE_SEARCH.get()(folder)
        return folder if has_headers else _wheels() or folder

    return find_cuda_path


def _on_path() -> str:
    """Return the folder of the toolkit whose nvcc is on PATH or in the usual place, "" if none."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return str(Path(nvcc).resolve().parents[1]) if nvcc else ""


def _or_plain(find: Any) -> Any:
    @functools.wraps(find, assigned=("__name__", "__doc__"))
    def find_cuda_target_include(cuda_path: str) -> str | None:
        folder: str | None = find(cuda_path)
        plain = Path(cuda_path, "include")
        return str(plain) if folder is None and (plain / "cccl").is_dir() else folder

    return find_cuda_target_include


def _wheels() -> str | None:
    """Return the common folder of NVIDIA's wheels for CUDA 13, None if it has no headers."""
    spec = importlib.util.find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        if _has_headers(folder := Path(directory, "cu13")):
            return str(folder)
    return None


def _has_headers(toolkit: Path) -> bool:
    return (toolkit / "include" / "cuda_runtime.h").is_file()


startup_hooks.on_ready.append(patch)
