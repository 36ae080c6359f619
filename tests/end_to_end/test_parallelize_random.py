# SPDX-License-Identifier: Apache-2.0
"""Random graphs that are cut by random plans, in real workers, against the same on one worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.random_graphs import Graph, annotated, draw, shrunk
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Shard

MESHES = (Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1]), Mesh({"tp": 4}))
#: How many are compiled together.
TOGETHER = 25


def arrays_of(result: Any, rank: int) -> list[Any]:
    """Return the results of a call on one rank."""
    return [np.array(one.numpy()) for one in result.debug_get_from_remote(rank)]


def differences(
    session: Any, mesh: Mesh, graphs: dict[str, Graph], legalize: bool = False
) -> tuple[dict[str, str], Any]:
    """Return which graphs have wrong results on some rank, and the collectives of all.

    Operators become PrimFuncs before they are sharded if `legalize` is set.
    """
    builder, annotated_builder = relax.BlockBuilder(), relax.BlockBuilder()
    plan = {}
    for name, graph in graphs.items():
        graph.emit(builder, name)
        graph.emit(annotated_builder, name, mesh)
        for k, axes in enumerate(graph.plan):
            if axes:
                plan[f"{name}_p{k}"] = {axis: Shard(cut) for axis, cut in axes.items()}
    whole = builder.get()
    annotated_mod = annotated_builder.get()
    if legalize:
        annotated_mod = relax.transform.LegalizeOps()(annotated_mod)
    made = parallelize(annotated_mod, plan, mesh)
    functions = dict(made.module.functions_items())
    for name in graphs:
        other = relax.utils.copy_with_new_vars(whole[name])
        variable = tvm.ir.GlobalVar(f"{name}_whole")
        functions[variable] = other.with_attr("global_symbol", f"{name}_whole")
    pipeline = tvm_ipc.get_pipeline("llvm", len(mesh.ranks))
    executable = tvm.compile(tvm.IRModule(functions), FAST_TO_COMPILE, relax_pipeline=pipeline)
    loaded = session.load_vm_module(executable)
    found = {}
    for name, graph in graphs.items():
        parts, wholes = [], []
        for k, array in enumerate(graph.arrays()):
            cut = made.shards[f"{name}_p{k}"]
            parts.append(put(session, {rank: cut.shard(array, rank) for rank in mesh.ranks}))
            wholes.append(put(session, dict.fromkeys(mesh.ranks, array)))
        result, right = loaded[name](*parts), loaded[f"{name}_whole"](*wholes)
        for k, expected in enumerate(arrays_of(right, 0)):
            scale = max(1.0, float(np.abs(expected).max(initial=0)))
            for rank in mesh.ranks:
                got = arrays_of(result, rank)[k]
                where = f"result {k} on rank {rank}"
                if got.shape != expected.shape:
                    found[name] = f"{where} has the shape {got.shape}, not {expected.shape}"
                elif not np.allclose(got, expected, rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
                    found[name] = f"{where} is off by {np.abs(got - expected).max()}"
    return found, made.collectives


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plans", "annotations", "primfuncs"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_graphs(mesh: Mesh, form: str, pytestconfig: pytest.Config) -> None:
    """Annotations shard operators, or the PrimFuncs that they become."""
    count = pytestconfig.getoption("--graphs") // len(MESHES)
    first = pytestconfig.getoption("--first-graph")
    kinds: Counter[str] = Counter()
    legalize = form == "primfuncs"
    with session_of(mesh) as session:

        def fails(graph: Graph) -> bool:
            try:
                return bool(differences(session, mesh, {"f": graph}, legalize)[0])
            except Exception:
                return True

        for start in range(first, first + count, TOGETHER):
            seeds = range(start, min(start + TOGETHER, first + count))
            graphs = {f"f{seed}": draw(seed, tuple(mesh.axes)) for seed in seeds}
            if form != "plans":
                axes = tuple(mesh.axes)
                graphs = {
                    name: annotated(graph, int(name[1:]), axes) for name, graph in graphs.items()
                }
            try:
                wrong, collectives = differences(session, mesh, graphs, legalize)
            except Exception as error:
                wrong = {name: str(error) for name, graph in graphs.items() if fails(graph)}
                assert wrong, f"graphs that only fail together: {error}"
                collectives = {}
            kinds.update(collectives)
            for name, why in wrong.items():
                raise AssertionError(f"{name}: {why}; as small as {shrunk(graphs[name], fails)}")
    interesting = {"allgather"} if legalize else {"allgather", "allreduce"}
    assert interesting <= kinds.keys(), "the graphs are of interest"
