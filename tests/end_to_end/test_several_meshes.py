# SPDX-License-Identifier: Apache-2.0
"""Functions that place tensors on several meshes, and move them from one mesh to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import bindings_of
from tvm_ipc.comm import Replica, Shard
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

Array = np.ndarray[Any, Any]


def run(module: tvm.IRModule, ranks: int, arguments: list[list[Array]]) -> list[Array]:
    """Return the result of each rank; each argument has the tensor of each rank."""
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    with tvm.target.Target("llvm"):
        assert verify_cross_rank_safety(pipeline(module)) == []
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        inputs = [session.scatter(np.stack(shards)) for shards in arguments]
        out = session.load_vm_module(program)["main"](*inputs)
        return [session.get(out, rank) for rank in range(ranks)]


def numbers(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype("float32")


def spread(shards: list[Array], ranks: list[int], world: int) -> list[Array]:
    """Return the shard of each rank, zeros for a rank that is not in the mesh."""
    of_rank = dict(zip(ranks, shards, strict=True))
    return [of_rank.get(rank, 0 * shards[0]) for rank in range(world)]


def pipeline_of(first: list[int], second: list[int]) -> tvm.IRModule:
    """Return an MLP whose layers are on two meshes, as in a pipeline with two stages."""
    front, back = (comm.Mesh({"tp": len(ranks)}, ranks) for ranks in (first, second))
    columns, rows = {"tp": Shard(1)}, {"tp": Shard(0)}

    @I.ir_module
    class MLP:
        @R.function
        def main(
            x: R.Tensor((4, 12), "float32"),
            w1: R.Tensor((12, 12), "float32"),
            w2: R.Tensor((12, 12), "float32"),
        ):
            with R.dataflow():
                whole = R.comm.place(x, front, {"tp": Replica()})
                up = R.matmul(whole, R.comm.place(w1, front, columns))
                act = R.nn.relu(up)
                sent = R.comm.place(act, back, columns)
                down = R.matmul(sent, R.comm.place(w2, back, rows))
                R.output(down)
            return down

    return MLP


@pytest.mark.parametrize(
    ("ranks", "first", "second"),
    [
        (2, [0], [1]),
        (3, [0], [1, 2]),
        (3, [2, 0], [1]),
        (4, [0, 1], [2, 3]),
        (4, [3, 1], [0, 2]),
        (3, [0, 1], [2, 1]),  # rank 1 is in both
        (4, [0, 1, 2], [3]),
    ],
)
def test_from_mesh_to_mesh(ranks: int, first: list[int], second: list[int]) -> None:
    """Results without a placement are on every rank, also on those of the other mesh."""
    x, w1, w2 = numbers(4, 12), numbers(12, 12), numbers(12, 12)
    arguments = [
        [x] * ranks,
        spread(np.split(w1, len(first), 1), first, ranks),
        spread(np.split(w2, len(second), 0), second, ranks),
    ]
    for found in run(pipeline_of(first, second), ranks, arguments):
        np.testing.assert_array_equal(found, np.maximum(x @ w1, 0) @ w2)


def test_the_report_names_what_moves_between_meshes() -> None:
    with collect_report() as report:
        LowerPlacements()(pipeline_of([0], [1, 2]))
    subjects = [one.subject for one in report.decisions if one.pass_name == "LowerPlacements"]
    assert "broadcast of act from rank 0 to Mesh({'tp': 2}, ranks=(1, 2))" in subjects
    assert any("it is on Mesh({'tp': 1}), and sent is on" in one.reason for one in report.decisions)


def test_ranks_skip_what_they_do_not_need() -> None:
    """Each matmul is in a branch that only the ranks of its mesh take."""

    def matmuls(sequence: Any) -> int:
        return sum("R.matmul(" in str(binding.value) for binding in bindings_of(sequence))

    lowered = LowerPlacements()(pipeline_of([0], [1, 2]))
    tvm.ir.assert_structural_equal(tvm.script.from_source(lowered.script()), lowered)
    body = lowered["main"].body
    branches = [one.value for one in bindings_of(body) if isinstance(one.value, relax.If)]
    assert [matmuls(one.true_branch) for one in branches] == [1, 1]
    assert [matmuls(one.false_branch) for one in branches] == [0, 0]
    teams = [one for one in lowered.script().splitlines() if "tvm_ipc.team_index" in one]
    assert ["R.shape([1, 0])" in teams[0], "R.shape([2, 1, 2])" in teams[1]] == [True, True]
    calls = [one for one in bindings_of(body) if isinstance(one.value, relax.Call)]
    assert not any("R.matmul(" in str(one.value) for one in calls)


def test_two_grids_of_the_same_ranks() -> None:
    """A tensor is sharded over four ranks in one layer, and over a grid of them in the next."""
    line, grid = comm.Mesh({"tp": 4}), comm.Mesh({"dp": 2, "tp": 2})

    @I.ir_module
    class Layers:
        @R.function
        def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                up = R.matmul(x, R.comm.place(w, line, {"tp": Shard(1)}))
                both = R.comm.place(up, grid, {"dp": Shard(0), "tp": Shard(1)})
                act = R.nn.relu(both)
                back = R.comm.place(act, line, {"tp": Shard(0)})
                R.output(back)
            return back

    x, w = numbers(8, 8), numbers(8, 8)
    with collect_report() as report:
        found = run(Layers, 4, [[x] * 4, np.split(w, 4, 1)])
    assert not any("broadcast" in one.subject for one in report.decisions)
    np.testing.assert_array_equal(np.concatenate(found), np.maximum(x @ w, 0))


@pytest.mark.parametrize("rows", [1, 5])
def test_several_results_and_symbolic_rows(rows: int) -> None:
    """A tuple leaves a branch, a result is sharded unevenly, and another one is everywhere."""
    front, back = comm.Mesh({"tp": 1}, [0]), comm.Mesh({"tp": 2}, [2, 1])

    @I.ir_module
    class Model:
        @R.function
        def main(
            x: R.Tensor(("n", 8), "float32"),
            w1: R.Tensor((8, 8), "float32"),
            w2: R.Tensor((8, 7), "float32"),
        ):
            with R.dataflow():
                up = R.matmul(x, R.comm.place(w1, front, {}))
                act = R.nn.relu(up)
                doubled = R.add(up, up)
                sent = R.comm.place(act, back, {"tp": Shard(1)})
                also_sent = R.comm.place(doubled, back, {})
                down = R.matmul(sent, R.comm.place(w2, back, {"tp": Shard(0)}))
                total = R.add(down, R.sum(also_sent, axis=1, keepdims=True))
                result = R.comm.place(total, back, {"tp": Shard(1)})
                R.output(result, up)
            return (result, up)

    x, w1, w2 = numbers(rows, 8), numbers(8, 8), numbers(8, 7)
    program = tvm.compile(Model, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 3))
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        halves = spread(np.split(w2, 2, 0), [2, 1], 3)
        inputs = [session.put(x), session.put(w1), session.scatter(np.stack(halves))]
        out = session.load_vm_module(program)["main"](*inputs)
        found = [[one.numpy() for one in out.debug_get_from_remote(rank)] for rank in range(3)]
    up = x @ w1
    wanted = np.maximum(up, 0) @ w2 + 2 * up.sum(1, keepdims=True)
    padded = np.pad(wanted, ((0, 0), (0, 1)))
    np.testing.assert_array_equal(np.concatenate([found[2][0], found[1][0]], 1), padded)
    for _, everywhere in found:
        np.testing.assert_array_equal(everywhere, up)


def test_casts_and_tuples_stay_on_their_mesh() -> None:
    front, back = comm.Mesh({"tp": 1}, [0]), comm.Mesh({"tp": 1}, [1])

    @I.ir_module
    class Cast:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                a = R.nn.relu(R.comm.place(x, front, {}))
                b = R.comm.place(x, back, {})
                pair = R.split(a, 2)
                cast = R.match_cast(pair[1], R.Tensor((4, 8), "float32"))
                c = R.comm.place(R.add(cast, pair[0]), back, {})
                d = R.add(R.sum(b, axis=0), c)
                R.output(d)
            return d

    x = numbers(8, 8)
    wanted = x.sum(0) + np.maximum(x, 0)[:4] + np.maximum(x, 0)[4:]
    for found in run(Cast, 2, [[x] * 2]):
        np.testing.assert_array_equal(found, wanted)


def test_operands_on_different_meshes_are_refused() -> None:
    front, back = comm.Mesh({"tp": 2}), comm.Mesh({"tp": 2}, [1, 2])

    @I.ir_module
    class Mixed:
        @R.function
        def main(x: R.Tensor((8, 8), "float32"), y: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                a = R.comm.place(x, front, {"tp": Shard(0)})
                b = R.comm.place(y, back, {"tp": Shard(0)})
                z = R.add(a, b)
                R.output(z)
            return z

    message = "b is S.0. along 'tp' on Mesh.*ranks=.1, 2.*, but another operand is on Mesh.*'tp': 2"
    with pytest.raises(TransformError, match=message):
        LowerPlacements()(Mixed)


def test_meshes_must_have_all_ranks_of_the_session() -> None:
    message = r"on Mesh\({'tp': 1}\) and on Mesh\({'tp': 1}, ranks=\(2,\)\), but world_size is 3"
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 3)(pipeline_of([0], [2]))
