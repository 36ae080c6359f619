# SPDX-License-Identifier: Apache-2.0
"""Memory scopes as constraints: demands, facts of a module, a solver, and what applies it."""

from tvm_ipc.contract import ANY, RESULT
from tvm_ipc.transform.scopes.demands import (
    DEFAULT_REGISTRY,
    ScopeRegistry,
    demand_scope,
    register_scope,
)

__all__ = ["ANY", "DEFAULT_REGISTRY", "RESULT", "ScopeRegistry", "demand_scope", "register_scope"]
