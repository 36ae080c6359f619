# SPDX-License-Identifier: Apache-2.0
"""Symbolic extents that ranks know only by their shards: multiples of the number of ranks.

    w1: R.Tensor(("k", "n"))    S[1] on 2 ranks, w2: R.Tensor(("n", "m")) S[0]

No rank can tell whether the last shard has padding, so `n` becomes `n_shard * 2`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax, tirx
from tvm.relax.analysis import definable_tir_vars_in_type, tir_vars_in_type

from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.placements.placed_tensor import local_type


def with_multiples_of_ranks(
    functions: Mapping[str, relax.Function],
    mesh: Mesh,
    placements: Mapping[relax.Var, Placements],
    derived: frozenset[relax.Var],
) -> Mapping[str, relax.Function]:
    """Return the functions with extents that no rank would know as multiples of the ranks.

    Parameters
    ----------
    functions : the functions of a global program; they are returned themselves if none changes.
    mesh : the mesh of the ranks.
    placements : the placements of the parameters.
    derived : the parameters whose placements follow from the program. Extents of others, which a
        plan places, do not change.
    """
    changed = {}
    for name, function in functions.items():
        local_types = [
            local_type(mesh, param.ty, placements[param]) if param in placements else param.ty
            for param in function.params
        ]
        known = {symbol for ty in local_types for symbol in definable_tir_vars_in_type(ty)}
        multiples = {}
        for param in function.params:
            if param not in derived:
                continue
            dims = extents(param.ty) or []
            for placement, workers in zip(placements[param], mesh.axes.values(), strict=True):
                symbol = dims[placement.axis] if isinstance(placement, Shard) else None
                if isinstance(symbol, tirx.Var) and symbol not in known:
                    of_shard = tirx.Var(f"{symbol.name}_shard", str(symbol.ty))
                    multiples[symbol] = of_shard, of_shard * workers
        if multiples:
            # TVM requires that a parameter defines each symbol.
            shards = relax.ShapeType([of_shard for of_shard, _ in multiples.values()])
            defined = _with_params(function, [*function.params, relax.Var("shards", shards)])
            whole = {symbol: extent for symbol, (_, extent) in multiples.items()}
            bound = defined.bind_symbolic_vars(whole)
            changed[name] = _with_params(bound, list(bound.params)[:-1])
    return {**functions, **changed} if changed else functions


def _with_params(function: relax.Function, params: list[relax.Var]) -> relax.Function:
    return relax.Function(
        params, function.body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def symbols_of_results(functions: Mapping[str, relax.Function]) -> frozenset[tirx.Var]:
    """Return the symbols of the extents of results."""
    results = (function.ret_ty for function in functions.values())
    return frozenset(symbol for ty in results for symbol in tir_vars_in_type(ty))
