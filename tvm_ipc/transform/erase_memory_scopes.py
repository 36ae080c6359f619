# SPDX-License-Identifier: Apache-2.0
"""The pass `EraseMemoryScopes`, which removes transparent memory scopes from PrimFuncs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_ipc import arguments
from tvm_ipc.analysis.retype_primfunc_scopes import retype
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.memory_scopes.operator_scope_demands import DEFAULT_REGISTRY, GLOBAL
from tvm_ipc.transform.module_pass import module_pass, option

_NAME = "EraseMemoryScopes"


@module_pass
class EraseMemoryScopes:
    """Replace transparent scopes by "global" in the parameters of all PrimFuncs and their aliases.

    Before:

        @T.prim_func
        def f(x: T.Buffer((4,), "float32", scope="ipc_memory")): ...

    After:

        @T.prim_func
        def f(x: T.Buffer((4,), "float32")): ...

    Code for "global" memory can access transparent scopes, but TVM does not build a function that
    names one. Run this pass after `PlanMemoryScopes`, which reads the scopes, and before PrimFuncs
    are built.

    Parameters
    ----------
    scopes : the scopes to erase; None for all registered transparent scopes.

    Raises
    ------
    TransformError
        A PrimFunc allocates memory in such a scope, which only the runtime can do. The input module
        is unchanged.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import EraseMemoryScopes
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @T.prim_func
    ...     def clear(x: T.Buffer((4,), "float32", scope="ipc_memory")):
    ...         for i in range(4):
    ...             x[i] = T.float32(0)
    ... ''')
    >>> "ipc_memory" in EraseMemoryScopes()(mod).script()
    False
    """

    scopes: Sequence[str] | None = option(
        arguments.texts, "a list of names of scopes", default=None
    )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module without the scopes."""
        registered = DEFAULT_REGISTRY.scopes
        chosen = self.scopes or [name for name, transparent in registered.items() if transparent]
        scopes = frozenset(chosen) - {GLOBAL}
        result = mod
        for global_var, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and _has_parameter_in(function, scopes):
                result = mod.clone() if result is mod else result
                erased = retype(function, lambda var: GLOBAL if _scope(var) in scopes else None)
                result.update_func(global_var, erased)
        return result


def _scope(var: tirx.Var) -> str:
    """Return the memory scope of a variable, "" if it has no memory."""
    has_memory = isinstance(var.ty, tirx.BufferType | tvm.ir.PointerType)
    return str(var.ty.storage_scope) if has_memory else ""


def _has_parameter_in(function: tirx.PrimFunc, scopes: frozenset[str]) -> bool:
    """Return whether a parameter is in one of the scopes.

    Raise a TransformError if the body allocates memory in one of them.
    """

    def visit(node: tirx.AllocBuffer | s_tir.SBlock) -> None:
        is_block = isinstance(node, s_tir.SBlock)
        for buffer in node.alloc_buffers if is_block else [node.buffer]:
            if _scope(buffer) in scopes:
                raise TransformError(
                    f"{_NAME}: a PrimFunc allocates {buffer.name} in {_scope(buffer)!r}, which "
                    "only the runtime can do; make it a parameter"
                )

    tvm_ffi.structural_walk(function.body, [((tirx.AllocBuffer, s_tir.SBlock), visit)])
    return any(_scope(param) in scopes for param in function.params)
