# SPDX-License-Identifier: Apache-2.0
"""Plans memory scopes as a constraint problem.

`collect` reads the constraints of a module, `solve` chooses scopes, `copy_sites` and
`specialise_primfuncs_for_scopes` decide on copies and specialised PrimFuncs, and `rewrite` applies
the plan.
"""

from tvm_ipc.packed_functions import ANY, RESULT
from tvm_ipc.transform.memory_scopes.operator_scope_demands import (
    DEFAULT_REGISTRY,
    ScopeRegistry,
    demand_scope,
    register_scope,
)

__all__ = ["ANY", "DEFAULT_REGISTRY", "RESULT", "ScopeRegistry", "demand_scope", "register_scope"]
