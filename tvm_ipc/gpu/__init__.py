# SPDX-License-Identifier: Apache-2.0
"""Support for NVIDIA GPUs: device discovery, CUDA graphs, and the headers of the CUDA wheels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ipc.gpu.rewrite_cuda_graph import RewriteCUDAGraph

__all__ = ["RewriteCUDAGraph"]

_MODULES = {"RewriteCUDAGraph": "rewrite_cuda_graph"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"tvm_ipc.gpu.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
