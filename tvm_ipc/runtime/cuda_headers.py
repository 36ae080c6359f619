# SPDX-License-Identifier: Apache-2.0
"""Lets TVM compile for CUDA where there is no toolkit, with the wheels of the extra `cuda`.

TVM's compiler callback asks for the folder of a toolkit, for headers alone where NVRTC compiles,
and looks for those of the C++ library where a toolkit has them, which is not where wheels do.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path
from typing import Any


def mend() -> None:
    """Let TVM's look-up of headers find those of wheels too, after those that it finds itself."""
    from tvm.support import nvcc

    if getattr(nvcc.find_cuda_path, "__module__", None) == __name__:
        return
    nvcc.find_cuda_path = _or_wheels(nvcc)
    nvcc._find_cuda_target_include = _or_plain(nvcc._find_cuda_target_include)


def _or_wheels(nvcc: Any) -> Any:
    find = nvcc.find_cuda_path

    @functools.wraps(find, assigned=("__name__", "__doc__"))
    def find_cuda_path() -> str:
        try:
            found = str(find())
        except (OSError, RuntimeError) as error:
            # An OSError where there is no program `which`, with which TVM looks for nvcc.
            found = _on_path() if isinstance(error, OSError) else ""
            if not found:
                if wheels := _wheels():
                    return wheels
                why = "Cannot find CUDA path" if isinstance(error, OSError) else str(error)
                raise RuntimeError(
                    f"{why}: TVM compiles for CUDA with a CUDA toolkit (nvcc on PATH, or "
                    "CUDA_PATH), or with wheels: pip install 'tvm-ipc[cuda]'"
                ) from None
        # An nvcc that was found on PATH may stand there without its toolkit.
        has_headers = _has_headers(Path(found)) or nvcc._find_cuda_target_include(found)
        return found if has_headers else _wheels() or found

    return find_cuda_path


def _on_path() -> str:
    """The folder of the toolkit whose nvcc is on PATH, or in the usual place; empty without one."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return str(Path(nvcc).resolve().parents[1]) if nvcc else ""


def _or_plain(find: Any) -> Any:
    @functools.wraps(find, assigned=("__name__", "__doc__"))
    def find_cuda_target_include(cuda_path: str) -> str | None:
        found: str | None = find(cuda_path)
        plain = Path(cuda_path, "include")
        return str(plain) if found is None and (plain / "cccl").is_dir() else found

    return find_cuda_target_include


def _wheels() -> str | None:
    """The folder that wheels of NVIDIA for CUDA 13 share, if it has headers."""
    spec = importlib.util.find_spec("nvidia")
    for directory in (spec and spec.submodule_search_locations) or ():
        if _has_headers(folder := Path(directory, "cu13")):
            return str(folder)
    return None


def _has_headers(toolkit: Path) -> bool:
    return (toolkit / "include" / "cuda_runtime.h").is_file()
