# SPDX-License-Identifier: Apache-2.0
"""Scopes that flow into PrimFuncs: which calls need a specialised function, and these functions."""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.relax.expr import _update_type

from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.retype import retype
from tvm_ipc.transform.scopes.demands import GLOBAL
from tvm_ipc.transform.scopes.facts import FunctionFacts
from tvm_ipc.transform.scopes.place import CopyPlan
from tvm_ipc.transform.scopes.solve import PLAIN, Solution

#: A PrimFunc and the scopes that some of its parameters take.
_Demand = tuple[str, tuple[tuple[int, str], ...]]

_Site = tuple[FunctionFacts, Step]


@dataclass(eq=False)
class SpecialisedCalls:
    """The specialised functions of a module, and the calls that go to them."""

    callees: dict[_Site, tvm.ir.GlobalVar] = field(default_factory=dict)
    added: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)  #: that nobody calls any more
    demands: dict[str, _Demand] = field(default_factory=dict)  #: by name of what was added


def specialise_callees(solution: Solution, plan: CopyPlan, transparent: bool) -> SpecialisedCalls:
    """Return specialised functions for operands in scopes that code must be compiled for.

    Parameters
    ----------
    transparent : specialise for transparent scopes too, which do not need it.
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
    made: dict[_Demand, tvm.ir.GlobalVar] = {}
    left = program.calls.copy()
    for site, (name, scopes) in sites.items():
        demand = (name, tuple(sorted(scopes.items())))
        if demand not in made:
            made[demand] = _add(solution, demand, names, result)
        result.callees[site] = made[demand]
        left[name] -= 1
    for name in dict.fromkeys(name for name, _ in made):
        attrs = primfuncs.functions[name].attrs
        if not left[name] and "global_symbol" not in attrs and name not in program.referenced:
            result.removed.append(name)
    return result


def _add(
    solution: Solution, demand: _Demand, names: set[str], result: SpecialisedCalls
) -> tvm.ir.GlobalVar:
    name, scopes = demand
    primfuncs = solution.primfuncs
    function = primfuncs.functions[name]
    taken = {var: scope for k, scope in scopes for var in primfuncs.parameter(name, k).names}
    new = retype(function, lambda var: taken.get(hash(var))).without_attr("global_symbol")
    kinds = dict.fromkeys(scope.rsplit(".", 1)[-1].split("_", 1)[0] for _, scope in scopes)
    base = "_".join([name, *(kind.replace("-", "_") for kind in kinds)])
    unique, count = base, 0
    while unique in names:
        count += 1
        unique = f"{base}_{count}"
    names.add(unique)
    global_var = tvm.ir.GlobalVar(unique)
    _update_type(global_var, solution.program.module.get_global_var(name).ty)
    result.added[unique] = (global_var, new)
    result.demands[unique] = demand
    return global_var
