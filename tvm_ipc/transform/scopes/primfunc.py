# SPDX-License-Identifier: Apache-2.0
"""What PrimFuncs say of the scopes of their parameters.

The scope of a parameter can change only together with that of all its names in the body, and not at
all where nothing is known of what becomes of its pointer.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from tvm_ipc.transform.ir.prim_funcs import BufferParameter, find_parameters, memory_scope
from tvm_ipc.transform.scopes.demands import GLOBAL

#: Attribute of a function: the scope of each parameter, "" where nothing is said. Of a Relax
#: function, what callers hand over; of a PrimFunc, what it was compiled for, "global" included.
PARAM_SCOPES = "tvm_ipc.param_scopes"


class PrimFuncs:
    """Facts of the PrimFuncs of a module, found when they are asked for."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.functions: dict[str, tirx.PrimFunc] = {
            str(global_var.name_hint): function
            for global_var, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        self._scopes: dict[str, list[str | None]] = {}
        self._parameters: dict[str, list[BufferParameter]] = {}

    def scopes(self, name: str) -> list[str | None]:
        """Return the scope that each parameter must be in; None where any will do.

        A parameter that says "global" is taken to say nothing, unless an attribute pins it: TVM
        writes "global" where nobody said anything.
        """
        known = self._scopes.get(name)
        if known is None:
            function = self.functions[name]
            pinned = (function.attrs or {}).get(PARAM_SCOPES, None)
            known = []
            for k, param in enumerate(function.params):
                scope: str | None = memory_scope(param)
                if scope in ("", GLOBAL):
                    scope = str(pinned[k]) or None if pinned is not None else None
                known.append(scope)
            self._scopes[name] = known
        return known

    def parameter(self, name: str, k: int) -> BufferParameter:
        """Return what the body of a PrimFunc does with a parameter."""
        known = self._parameters.get(name)
        if known is None:
            known = self._parameters[name] = find_parameters(self.functions[name])
        return known[k]

    def writes(self, name: str, k: int) -> bool:
        """Whether a PrimFunc may write a parameter."""
        return self.parameter(name, k).may_be_written

    def refusal(self, name: str, k: int) -> str | None:
        """Return why a parameter cannot be given another scope, or None if it can."""
        if not isinstance(self.functions[name].params[k].ty, tirx.BufferType):
            return f"parameter {k} of {name!r} is a bare pointer"
        parameter = self.parameter(name, k)
        if parameter.escapes:
            return f"parameter {k} of {name!r} {parameter.escapes}"
        if parameter.declared_elsewhere:
            return f"parameter {k} of {name!r} is also {parameter.declared_elsewhere}"
        return None
