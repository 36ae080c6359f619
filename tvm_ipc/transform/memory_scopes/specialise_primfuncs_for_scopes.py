# SPDX-License-Identifier: Apache-2.0
"""Specialises PrimFuncs for operands in scopes other than "global"."""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import tirx

from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.retype_primfunc_scopes import retype
from tvm_ipc.transform.memory_scopes.constraint_types import ScopedFunction
from tvm_ipc.transform.memory_scopes.copy_sites import CopyPlan
from tvm_ipc.transform.memory_scopes.operator_scope_demands import GLOBAL
from tvm_ipc.transform.memory_scopes.solve import PLAIN, Solution
from tvm_ipc.tvm_private_names import update_type

#: The name of a PrimFunc, and the scopes of some of its parameters.
_Demand = tuple[str, tuple[tuple[int, str], ...]]

#: A call that needs a specialised function.
_Site = tuple[ScopedFunction, Step]


@dataclass(eq=False)
class SpecialisedCalls:
    """The specialised functions of a module, and the calls that are redirected to them."""

    callees: dict[_Site, tvm.ir.GlobalVar] = field(default_factory=dict)  #: the new callees
    added: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)  #: functions without remaining callers
    demands: dict[str, _Demand] = field(default_factory=dict)  #: by name of the added function


def specialise_callees(solution: Solution, plan: CopyPlan, transparent: bool) -> SpecialisedCalls:
    """Return specialised functions for operands in scopes that code must be compiled for.

    Parameters
    ----------
    transparent : specialise also for transparent scopes, which do not require it.
    """
    program, primfuncs = solution.program, solution.primfuncs
    copied = {id(use) for copy in [*plan.copies, *plan.around] for use in copy.uses}
    sites: dict[_Site, tuple[str, dict[int, str]]] = {}
    for use in program.uses:
        scope = solution.scopes[use.tensor.leaf]
        if use.param is None or use.exact is not None or id(use) in copied:
            continue
        if scope in (PLAIN, GLOBAL) or (solution.registry.scopes[scope] and not transparent):
            continue
        if primfuncs.refusal(*use.param) is None:
            assert use.step is not None
            name, scopes = sites.setdefault((use.function, use.step), (use.param[0], {}))
            scopes[use.param[1]] = scope
    result = SpecialisedCalls()
    names = {str(global_var.name_hint) for global_var in program.module.get_global_vars()}
    specialised: dict[_Demand, tvm.ir.GlobalVar] = {}
    remaining_calls = program.calls.copy()
    for site, (name, scopes) in sites.items():
        demand = (name, tuple(sorted(scopes.items())))
        if demand not in specialised:
            specialised[demand] = _add_function(solution, demand, names, result)
        result.callees[site] = specialised[demand]
        remaining_calls[name] -= 1
    for name in dict.fromkeys(name for name, _ in specialised):
        attrs = primfuncs.functions[name].attrs
        if (
            not remaining_calls[name]
            and "global_symbol" not in attrs
            and name not in program.referenced
        ):
            result.removed.append(name)
    return result


def _add_function(
    solution: Solution, demand: _Demand, names: set[str], result: SpecialisedCalls
) -> tvm.ir.GlobalVar:
    """Add a specialised function to `result` and return its global variable."""
    name, scopes = demand
    primfuncs = solution.primfuncs
    function = primfuncs.functions[name]
    scope_of = {var: scope for k, scope in scopes for var in primfuncs.parameters(name)[k].aliases}
    new = retype(function, lambda var: scope_of.get(hash(var))).without_attr("global_symbol")
    kinds = dict.fromkeys(scope.rsplit(".", 1)[-1].split("_", 1)[0] for _, scope in scopes)
    base = "_".join([name, *(kind.replace("-", "_") for kind in kinds)])
    unique, count = base, 0
    while unique in names:
        count += 1
        unique = f"{base}_{count}"
    names.add(unique)
    global_var = tvm.ir.GlobalVar(unique)
    update_type(global_var, solution.program.module.get_global_var(name).ty)
    result.added[unique] = (global_var, new)
    result.demands[unique] = demand
    return global_var
