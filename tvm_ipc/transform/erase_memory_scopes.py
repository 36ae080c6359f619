# SPDX-License-Identifier: Apache-2.0
"""The pass `EraseMemoryScopes`, which removes transparent memory scopes from PrimFuncs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc import arguments
from tvm_ipc.analysis.primfunc_effects import memory_scope
from tvm_ipc.analysis.retype_primfunc_scopes import retype
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.memory_scopes.operator_scope_demands import DEFAULT_REGISTRY, GLOBAL
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.tvm_moved_names import SBlock

_NAME = "EraseMemoryScopes"


@module_pass
class EraseMemoryScopes(ModulePass):
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

        def erased(var: tirx.Var) -> str | None:
            return GLOBAL if memory_scope(var) in scopes else None

        result = mod
        for global_var, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and _has_parameter_in(function, scopes):
                result = mod.clone() if result is mod else result
                result.update_func(global_var, retype(function, erased))
        return result


def _has_parameter_in(function: tirx.PrimFunc, scopes: frozenset[str]) -> bool:
    """Return whether a parameter is in one of the scopes.

    Raise a TransformError if the body allocates memory in one of them.
    """

    def visit(node: tirx.AllocBuffer | SBlock) -> None:
        is_block = isinstance(node, SBlock)
        for buffer in node.alloc_buffers if is_block else [node.buffer]:
            scope = memory_scope(buffer)
            if scope in scopes:
                raise TransformError(
                    f"{_NAME}: a PrimFunc allocates {buffer.name} in {scope!r}, which "
                    "only the runtime can do; make it a parameter"
                )

    tvm_ffi.structural_walk(function.body, [((tirx.AllocBuffer, SBlock), visit)])
    return any(memory_scope(param) in scopes for param in function.params)
