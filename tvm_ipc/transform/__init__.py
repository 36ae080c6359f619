# SPDX-License-Identifier: Apache-2.0
"""Passes over Relax modules, each usable alone in a `tvm.transform.Sequential`.

They rewrite IR to IR and know of the runtime only the names in `tvm_ipc.contract`: what they give
does not depend on what is registered, or which devices there are, where they run.
"""

import tvm_ffi

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.blas.partition import blas_patterns, compile_blas
from tvm_ipc.transform.byoc.compiled import Compiled, CompileError, compile_each
from tvm_ipc.transform.byoc.extern import script
from tvm_ipc.transform.byoc.global_symbol_cache import (
    ExistingGlobalSymbols,
    FreshGlobalSymbols,
    GlobalSymbolCache,
    MappedGlobalSymbols,
)
from tvm_ipc.transform.convert_ccl import ConvertFromCCL, ConvertToCCL
from tvm_ipc.transform.erase_memory_scopes import EraseMemoryScopes
from tvm_ipc.transform.fuse_allreduce_epilogue import FuseAllReduceEpilogue
from tvm_ipc.transform.gather_in_streams import GatherInStreams
from tvm_ipc.transform.inline_compiler_functions import InlineCompilerFunctions
from tvm_ipc.transform.ipc_allreduce_rewrite import IPCAllReduceRewrite
from tvm_ipc.transform.keep_from_fusion import KeepFromFusion
from tvm_ipc.transform.legalize_ops import LegalizeOps
from tvm_ipc.transform.lower_extern_calls import LowerExternCalls
from tvm_ipc.transform.lower_gpu_ipc_alloc_storage import LowerGPUIPCAllocStorage
from tvm_ipc.transform.lower_packed_alloc_tensor import LowerPackedAllocTensor
from tvm_ipc.transform.lower_placements import LowerPlacements
from tvm_ipc.transform.mark_compiler_functions_as_extern import MarkCompilerFunctionsAsExtern
from tvm_ipc.transform.offload_blas import OffloadBLAS
from tvm_ipc.transform.outline_compiler_functions import OutlineCompilerFunctions
from tvm_ipc.transform.overlap_communication import OverlapCommunication
from tvm_ipc.transform.place_parts import PlaceParts
from tvm_ipc.transform.plan_memory_scopes import PlanMemoryScopes
from tvm_ipc.transform.post_collectives import PostCollectives
from tvm_ipc.transform.report import Report, collect_report
from tvm_ipc.transform.require_workers import RequireWorkers
from tvm_ipc.transform.rewrite_cuda_graph import RewriteCUDAGraph
from tvm_ipc.transform.rules.table import declare_rule
from tvm_ipc.transform.run_module_codegen import RunModuleCodegen
from tvm_ipc.transform.schedule_for_cpu import ScheduleForCPU
from tvm_ipc.transform.scopes import ANY, RESULT, ScopeRegistry, demand_scope, register_scope
from tvm_ipc.transform.static_plan_block_memory import StaticPlanBlockMemory, plan_memory
from tvm_ipc.transform.verify_cross_rank_safety import (
    Hazard,
    VerifyCrossRankSafety,
    verify_cross_rank_safety,
)

__all__ = [
    "ANY",
    "RESULT",
    "CompileError",
    "Compiled",
    "ConvertFromCCL",
    "ConvertToCCL",
    "EraseMemoryScopes",
    "ExistingGlobalSymbols",
    "FreshGlobalSymbols",
    "FuseAllReduceEpilogue",
    "GatherInStreams",
    "GlobalSymbolCache",
    "Hazard",
    "IPCAllReduceRewrite",
    "InlineCompilerFunctions",
    "KeepFromFusion",
    "LegalizeOps",
    "LowerExternCalls",
    "LowerGPUIPCAllocStorage",
    "LowerPackedAllocTensor",
    "LowerPlacements",
    "MappedGlobalSymbols",
    "MarkCompilerFunctionsAsExtern",
    "OffloadBLAS",
    "OutlineCompilerFunctions",
    "OverlapCommunication",
    "PlaceParts",
    "PlanMemoryScopes",
    "PostCollectives",
    "Report",
    "RequireWorkers",
    "RewriteCUDAGraph",
    "RunModuleCodegen",
    "ScheduleForCPU",
    "ScopeRegistry",
    "StaticPlanBlockMemory",
    "VerifyCrossRankSafety",
    "blas_patterns",
    "collect_report",
    "compile_blas",
    "compile_each",
    "declare_rule",
    "demand_scope",
    "plan_memory",
    "register_scope",
    "script",
    "verify_cross_rank_safety",
]

# TVM calls a pass through its FFI, which raises only the exceptions it knows as what they are.
tvm_ffi.register_error("TransformError", TransformError)
