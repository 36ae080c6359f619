# SPDX-License-Identifier: Apache-2.0
"""Passes over Relax modules; each of them also works in your own `tvm.transform.Sequential`.

The passes rewrite IR to IR. Of the runtime they use only the names in `tvm_ipc.packed_functions`,
so that their result does not depend on the functions and devices of the machine that compiles.
"""

import tvm_ffi

from tvm_ipc.errors import TransformError
from tvm_ipc.transform.apply_tvm_fusion_where_supported import FuseSupported
from tvm_ipc.transform.async_collectives import AsyncCollectives
from tvm_ipc.transform.byoc.check_compiler_results import Compiled, CompileError, compile_each
from tvm_ipc.transform.byoc.extern_declaration import script
from tvm_ipc.transform.byoc.outlined_function_symbol_policies import (
    ExistingGlobalSymbols,
    FreshGlobalSymbols,
    GlobalSymbolCache,
    MappedGlobalSymbols,
)
from tvm_ipc.transform.convert_from_and_to_ccl import ConvertFromCCL, ConvertToCCL
from tvm_ipc.transform.elide_concat_copies import ElideConcatCopies
from tvm_ipc.transform.erase_memory_scopes import EraseMemoryScopes
from tvm_ipc.transform.fuse_allreduce_epilogue import FuseAllReduceEpilogue
from tvm_ipc.transform.inline_compiler_functions import InlineCompilerFunctions
from tvm_ipc.transform.ipc_allreduce_rewrite import IPCAllReduceRewrite
from tvm_ipc.transform.legalize_equal_calls_once import LegalizeOps
from tvm_ipc.transform.lower_extern_calls import LowerExternCalls
from tvm_ipc.transform.lower_gpu_ipc_alloc_storage import LowerGPUIPCAllocStorage
from tvm_ipc.transform.lower_offset_alloc_tensor import LowerPackedAllocTensor
from tvm_ipc.transform.mark_compiler_functions_as_extern import MarkCompilerFunctionsAsExtern
from tvm_ipc.transform.memory_scopes import ANY, RESULT, ScopeRegistry, demand_scope, register_scope
from tvm_ipc.transform.outline_compiler_functions import OutlineCompilerFunctions
from tvm_ipc.transform.overlap_communication_with_matmuls import OverlapCommunication
from tvm_ipc.transform.pipeline_all_gather import PipelineAllGather
from tvm_ipc.transform.plan_memory_scopes import PlanMemoryScopes
from tvm_ipc.transform.report import Report, collect_report
from tvm_ipc.transform.require_workers import RequireWorkers
from tvm_ipc.transform.run_module_codegen import RunModuleCodegen
from tvm_ipc.transform.static_plan_block_memory import StaticPlanBlockMemory, plan_memory
from tvm_ipc.transform.verify_cross_rank_safety import (
    Hazard,
    VerifyCrossRankSafety,
    verify_cross_rank_safety,
)

__all__ = [
    "ANY",
    "RESULT",
    "AsyncCollectives",
    "CompileError",
    "Compiled",
    "ConvertFromCCL",
    "ConvertToCCL",
    "ElideConcatCopies",
    "EraseMemoryScopes",
    "ExistingGlobalSymbols",
    "FreshGlobalSymbols",
    "FuseAllReduceEpilogue",
    "FuseSupported",
    "GlobalSymbolCache",
    "Hazard",
    "IPCAllReduceRewrite",
    "InlineCompilerFunctions",
    "LegalizeOps",
    "LowerExternCalls",
    "LowerGPUIPCAllocStorage",
    "LowerPackedAllocTensor",
    "MappedGlobalSymbols",
    "MarkCompilerFunctionsAsExtern",
    "OutlineCompilerFunctions",
    "OverlapCommunication",
    "PipelineAllGather",
    "PlanMemoryScopes",
    "Report",
    "RequireWorkers",
    "RunModuleCodegen",
    "ScopeRegistry",
    "StaticPlanBlockMemory",
    "VerifyCrossRankSafety",
    "collect_report",
    "compile_each",
    "demand_scope",
    "plan_memory",
    "register_scope",
    "script",
    "verify_cross_rank_safety",
]

# TVM calls a pass through its FFI, which keeps the type only of registered exceptions.
tvm_ffi.register_error("TransformError", TransformError)
