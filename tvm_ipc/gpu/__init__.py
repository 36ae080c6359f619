# SPDX-License-Identifier: Apache-2.0
"""Support for NVIDIA GPUs: device discovery, CUDA graphs, and the headers of the CUDA wheels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_ipc.lazy_exports import export_on_first_use

if TYPE_CHECKING:
    from tvm_ipc.gpu.rewrite_cuda_graph import RewriteCUDAGraph

__all__ = ["RewriteCUDAGraph"]

if not TYPE_CHECKING:  # a type checker would take every name for defined
    __getattr__, __dir__ = export_on_first_use(__name__, {"RewriteCUDAGraph": "rewrite_cuda_graph"})
