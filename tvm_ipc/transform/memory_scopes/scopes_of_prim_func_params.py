# SPDX-License-Identifier: Apache-2.0
"""The buffer parameters of PrimFuncs: the scopes they need, and whether these can change.

The scope of a parameter can change only together with the scope of all its aliases in the body. It
cannot change if its pointer escapes the analysis.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from tvm_ipc.analysis.primfunc_effects import PrimFuncs, memory_scope
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL

#: The attribute of a function that lists a scope for each parameter, "" where unspecified. For a
#: Relax function these are the scopes that callers pass; for a PrimFunc, the scopes that it was
#: compiled for, "global" included.
PARAM_SCOPES = "tvm_ipc.param_scopes"


class PrimFuncParams(PrimFuncs):
    """The parameters of the PrimFuncs of a module, with their scopes."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._scopes: dict[str, list[str | None]] = {}

    def scopes(self, name: str) -> list[str | None]:
        """Return the scope that each parameter needs; None where it accepts any scope.

        A parameter in "global" accepts any scope unless the attribute pins it, because TVM also
        writes "global" where no scope was specified.
        """
        scopes = self._scopes.get(name)
        if scopes is None:
            function = self.functions[name]
            pinned = (function.attrs or {}).get(PARAM_SCOPES, None)
            scopes = []
            for k, param in enumerate(function.params):
                scope: str | None = memory_scope(param)
                if scope in ("", GLOBAL):
                    scope = str(pinned[k]) or None if pinned is not None else None
                scopes.append(scope)
            self._scopes[name] = scopes
        return scopes

    def writes(self, name: str, k: int) -> bool:
        """Return whether a PrimFunc may write a parameter."""
        return self.parameters(name)[k].may_be_written

    def refusal(self, name: str, k: int) -> str | None:
        """Return why a parameter cannot be moved to another scope, or None if it can."""
        if not isinstance(self.functions[name].params[k].ty, tirx.BufferType):
            return f"parameter {k} of {name!r} is a bare pointer"
        parameter = self.parameters(name)[k]
        if parameter.escapes:
            return f"parameter {k} of {name!r} {parameter.escapes}"
        if parameter.declared_elsewhere:
            return f"parameter {k} of {name!r} is also {parameter.declared_elsewhere}"
        return None
