# SPDX-License-Identifier: Apache-2.0
"""Takes memory scopes out of PrimFuncs that code generators need not know.

Before:
    @T.prim_func
    def f(x: T.Buffer((4,), "float32", scope="ipc_memory")): ...

After:
    @T.prim_func
    def f(x: T.Buffer((4,), "float32")): ...

Code for "global" memory works on the scopes that are erased, and TVM refuses to build a function
that names one. Runs after `PlanMemoryScopes`, which reads them, and before PrimFuncs are built.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.retype import retype
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.scopes.demands import DEFAULT_REGISTRY, GLOBAL

_NAME = "EraseMemoryScopes"


@module_pass
class EraseMemoryScopes:
    """Replace transparent scopes by "global" in all PrimFuncs: parameters and what aliases them.

    Parameters
    ----------
    scopes : the scopes to erase; all transparent ones that are known if None.

    Raises
    ------
    TransformError
        A PrimFunc allocates memory in such a scope, which only the runtime can do; the module that
        was given is as it was.
    """

    scopes: Sequence[str] | None = option(
        arguments.texts, "a list of names of scopes", default=None
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without the scopes."""
        known = DEFAULT_REGISTRY.scopes
        chosen = self.scopes or [scope for scope, transparent in known.items() if transparent]
        scopes = frozenset(chosen) - {GLOBAL}
        result = mod
        for global_var, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and _names(function, scopes):
                result = mod.clone() if result is mod else result
                result.update_func(global_var, retype(function, lambda var: _new(var, scopes)))
        return result


def _new(var: tirx.Var, scopes: frozenset[str]) -> str | None:
    return GLOBAL if _scope(var) in scopes else None


def _scope(var: tirx.Var) -> str:
    memory = isinstance(var.ty, tirx.BufferType | tvm.ir.PointerType)
    return str(var.ty.storage_scope) if memory else ""


def _names(function: tirx.PrimFunc, scopes: frozenset[str]) -> bool:
    """Whether a parameter is in one of the scopes; nothing else may start to be."""

    def visit(node: tirx.AllocBuffer | s_tir.SBlock) -> None:
        many = isinstance(node, s_tir.SBlock)
        for buffer in node.alloc_buffers if many else [node.buffer]:
            if _scope(buffer) in scopes:
                raise TransformError(
                    f"{_NAME}: a PrimFunc allocates {buffer.name} in {_scope(buffer)!r}, which "
                    "only the runtime can do; make it a parameter"
                )

    tvm_ffi.structural_walk(function.body, [((tirx.AllocBuffer, s_tir.SBlock), visit)])
    return any(_scope(param) in scopes for param in function.params)
