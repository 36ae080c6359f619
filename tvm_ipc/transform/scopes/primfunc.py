# SPDX-License-Identifier: Apache-2.0
"""What PrimFuncs say of the scopes of their parameters, and which of them they write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx

from tvm_ipc.transform.scopes.demands import GLOBAL


@dataclass
class PrimFuncFacts:
    """A PrimFunc, seen from its callers."""

    function: tirx.PrimFunc
    scopes: list[str | None] = field(default_factory=list)  #: by parameter; None: any scope will do


class PrimFuncs:
    """Facts of the PrimFuncs of a module, found when they are asked for."""

    def __init__(self, module: tvm.IRModule) -> None:
        self._functions = {
            str(global_var.name_hint): function
            for global_var, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        self._facts: dict[str, PrimFuncFacts] = {}
        self._accesses: dict[str, dict[int, tuple[bool, bool]]] = {}

    def facts(self, name: str) -> PrimFuncFacts:
        """Return what a PrimFunc says of its parameters."""
        known = self._facts.get(name)
        if known is None:
            function = self._functions[name]
            pinned = (function.attrs or {}).get("tvm_ipc.param_scopes", None)
            scopes: list[str | None] = []
            for k, param in enumerate(function.params):
                scope: str | None = _scope(param)
                if scope in ("", GLOBAL):
                    scope = str(pinned[k]) if pinned is not None and str(pinned[k]) else None
                scopes.append(scope)
            known = self._facts[name] = PrimFuncFacts(function, scopes)
        return known

    def writes(self, name: str, k: int) -> bool:
        """Whether a PrimFunc may write a parameter."""
        return True

    def refusal(self, name: str, k: int) -> str | None:
        """Return why a parameter cannot be given another scope, or None if it can."""
        return "not yet"


def _scope(param: Any) -> str:
    return str(param.ty.storage_scope) if isinstance(param.ty, tirx.BufferType) else ""
