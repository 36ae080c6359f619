# SPDX-License-Identifier: Apache-2.0
"""Passes for programs on CPUs: fused attention, matmuls in OpenBLAS, and kernel schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_ipc.lazy_exports import export_on_first_use

if TYPE_CHECKING:
    from tvm_ipc.cpu.blas.byoc_backend import blas_patterns, compile_blas
    from tvm_ipc.cpu.fix_sum_order import FixSumOrder
    from tvm_ipc.cpu.fuse_attention import FuseAttention
    from tvm_ipc.cpu.host_cpu_target import cpu_target
    from tvm_ipc.cpu.offload_blas import OffloadBLAS
    from tvm_ipc.cpu.schedule_for_cpu import ScheduleForCPU

__all__ = [
    "FixSumOrder",
    "FuseAttention",
    "OffloadBLAS",
    "ScheduleForCPU",
    "blas_patterns",
    "compile_blas",
    "cpu_target",
]

if not TYPE_CHECKING:  # a type checker would take every name for defined
    __getattr__, __dir__ = export_on_first_use(
        __name__,
        {
            "blas_patterns": "blas.byoc_backend",
            "compile_blas": "blas.byoc_backend",
            "cpu_target": "host_cpu_target",
            "FixSumOrder": "fix_sum_order",
            "FuseAttention": "fuse_attention",
            "OffloadBLAS": "offload_blas",
            "ScheduleForCPU": "schedule_for_cpu",
        },
    )
