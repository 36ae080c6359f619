# SPDX-License-Identifier: Apache-2.0
"""From the model to an executable, and what the passes did on the way.

They are TVM's own, but for `LowerGPUIPCAllocStorage`: TVM's asks for several times the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax import transform
from tvm.support import cc

from tvm_ipc.contract import IPC_MEMORY, AllReduceStrategy
from tvm_ipc.demo.mlp import MAIN
from tvm_ipc.demo.schedule import schedule_matmuls
from tvm_ipc.errors import IPCError
from tvm_ipc.transform import LowerGPUIPCAllocStorage

_CUSTOM_ALLREDUCE: Final = "runtime.disco.cuda_ipc.custom_allreduce"


@dataclass(frozen=True)
class Compiled:
    """An executable, and facts about its main function.

    Attributes
    ----------
    allreduces : in the model.
    rewritten : those of them that read their input in IPC memory.
    ipc_storages : planned storages in IPC memory, in bytes each.
    other_storages : planned storages in ordinary memory, in bytes each.
    """

    executable: Any
    processor: str
    allreduces: int
    rewritten: int
    ipc_storages: tuple[int, ...]
    other_storages: tuple[int, ...]


def compile_module(module: tvm.IRModule, strategy: AllReduceStrategy) -> Compiled:
    """Compile for this machine's processor."""
    if cc.get_cc() is None:
        raise IPCError(
            "TVM links what it compiled with a C++ compiler, and there is none: "
            "install g++ or clang, or name one in the environment variable CXX"
        )
    target = tvm.target.Target.from_device("cpu")
    with target:
        legal = tvm.transform.Sequential(
            [
                transform.LegalizeOps(),
                transform.AnnotateTIROpPattern(),
                transform.FoldConstant(),
                transform.FuseOps(),
                transform.FuseTIR(),
                schedule_matmuls,
                transform.RewriteDataflowReshape(),
                transform.ToNonDataflow(),
                transform.RemovePurityChecking(),
                # From here on outputs are allocated explicitly, which the rewrite looks for.
                transform.CallTIRRewrite(),
            ]
        )(module)
        planned = tvm.transform.Sequential(
            [
                transform.IPCAllReduceRewrite(int(strategy)),
                # After the rewrite, so that it reuses memory only within a scope.
                transform.StaticPlanBlockMemory(),
            ]
        )(legal)
        lowered = tvm.transform.Sequential(
            [
                # Before the generic lowering, which knows no scope.
                LowerGPUIPCAllocStorage(),
                transform.LowerAllocTensor(),
                transform.KillAfterLastUse(),
                transform.LowerRuntimeBuiltin(),
                transform.ComputePrimValue(),
                transform.VMShapeLower(),
                transform.AttachGlobalSymbol(),
            ]
        )(planned)
    storages = _storages(planned[MAIN])
    return Compiled(
        executable=relax.build(lowered, target, relax_pipeline=None),
        processor=str(target.attrs.get("mcpu", "this processor")),
        allreduces=_count(module[MAIN], "relax.ccl.allreduce"),
        rewritten=_count(planned[MAIN], _CUSTOM_ALLREDUCE),
        ipc_storages=tuple(size for scope, size in storages if scope == IPC_MEMORY),
        other_storages=tuple(size for scope, size in storages if scope != IPC_MEMORY),
    )


def _calls(function: relax.Function, callee: str) -> list[relax.Call]:
    """Return the calls of an operator or of a packed function."""
    calls = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call):
            name = getattr(node.op, "global_symbol", None) or getattr(node.op, "name", None)
            if name == callee:
                calls.append(node)

    relax.analysis.post_order_visit(function, visit)
    return calls


def _count(function: relax.Function, callee: str) -> int:
    return len(_calls(function, callee))


def _storages(function: relax.Function) -> list[tuple[str, int]]:
    """Return scope and bytes of what the plan allocates."""
    return [
        (str(call.args[2].value), int(call.args[0].values[0]))
        for call in _calls(function, "relax.memory.alloc_storage")
    ]
