# SPDX-License-Identifier: Apache-2.0
"""Passes that make compiled programs fast on CPUs: kernel schedules, and matmuls in OpenBLAS."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ipc.cpu.blas.byoc_backend import blas_patterns, compile_blas
    from tvm_ipc.cpu.offload_blas import OffloadBLAS
    from tvm_ipc.cpu.schedule_for_cpu import ScheduleForCPU
    from tvm_ipc.cpu.target import cpu_target

__all__ = ["OffloadBLAS", "ScheduleForCPU", "blas_patterns", "compile_blas", "cpu_target"]

_MODULES = {
    "blas_patterns": "blas.byoc_backend",
    "compile_blas": "blas.byoc_backend",
    "cpu_target": "target",
    "OffloadBLAS": "offload_blas",
    "ScheduleForCPU": "schedule_for_cpu",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"tvm_ipc.cpu.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
