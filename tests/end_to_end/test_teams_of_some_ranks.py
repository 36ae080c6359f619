# SPDX-License-Identifier: Apache-2.0
"""Collectives in teams that leave out ranks: those take no part, and get zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.collective_results import Array, call_and_results
from tvm_ipc import comm
from tvm_ipc.comm import KINDS
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

#: The number of ranks, and teams that leave out some of them.
TEAMS: list[tuple[int, list[list[int]]]] = [
    (2, [[1]]),
    (3, [[0, 2]]),
    (3, [[2, 1]]),
    (4, [[1, 3]]),
    (4, [[3, 1, 0]]),
    (4, [[2], [0]]),
]
SHAPE = (12, 6)


def arguments_of(name: str, size: int) -> dict[str, Any]:
    """Return the options of a collective of a kind, besides its team."""
    kind, last = KINDS[name], size - 1
    options: dict[str, Any] = {}
    if kind.rooted:
        options["root"] = last
    if kind.reduces:
        options["reduction"] = "max"
    if kind.splits != kind.concatenates:
        options["axis"] = 1
    if kind.splits and kind.concatenates:
        options |= {"split_axis": 1, "concat_axis": 0}
    if name == "permute":
        options["pairs"] = [[k, (k + 1) % size] for k in range(size)]
    if name == "send_recv":
        options |= {"source": 0, "target": last}
    return options


def module_of(make: Callable[[relax.Expr], relax.Expr], dtype: str = "float32") -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(make(x))
        builder.emit_func_output(out)
    return builder.get()


def run(module: tvm.IRModule, xs: list[Array], repetitions: int = 1, **options: Any) -> list[Array]:
    """Return the result of each rank, of a program that the verifier accepts."""
    pipeline = tvm_ipc.get_pipeline("llvm", len(xs), **options)
    with tvm.target.Target("llvm"):
        assert verify_cross_rank_safety(pipeline(module)) == []
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(len(xs), threads=True, timeout=60) as session:
        function, x = session.load_vm_module(program)["main"], session.empty(SHAPE, "float32")
        for rank, value in enumerate(xs):
            x.debug_copy_from(rank, value)
        for _ in range(repetitions):
            out = function(x)
        return [session.get(out, rank) for rank in range(len(xs))]


def values(ranks: int) -> list[Array]:
    draw = np.random.default_rng(ranks).integers
    return [draw(1, 9, SHAPE).astype("float32") for _ in range(ranks)]


@pytest.mark.parametrize(("ranks", "teams"), TEAMS)
@pytest.mark.parametrize("name", KINDS)
def test_each_kind(name: str, ranks: int, teams: list[list[int]]) -> None:
    make, results = call_and_results(name, **arguments_of(name, len(teams[0])), team=teams)
    xs = values(ranks)
    module = module_of(make)
    tvm.ir.assert_structural_equal(tvm.script.from_source(module.script()), module)
    found = run(module, xs)
    wanted: dict[int, Any] = {}
    for team in teams:
        wanted |= zip(team, results([xs[rank] for rank in team]), strict=True)
    for rank in range(ranks):
        if rank not in wanted:
            assert not found[rank].any(), f"rank {rank} is in no team"
        elif wanted[rank] is not None:
            np.testing.assert_array_equal(found[rank], wanted[rank])


@pytest.mark.parametrize("ranks", [3, 4])
def test_alternating_with_all_ranks(ranks: int) -> None:
    """A buffer that members read in place is not written before all of them have read it."""
    some, rows = [0, ranks - 1], 6000 * SHAPE[1]

    def layers(x: Any) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        x = builder.emit(relax.op.broadcast_to(relax.op.reshape(x, (1, *SHAPE)), (500, *SHAPE)))
        x = builder.emit(relax.op.reshape(x, (rows // SHAPE[1], SHAPE[1])))
        for _ in range(3):
            part = builder.emit(comm.allreduce(builder.emit(relax.op.add(x, x)), team=[some]))
            part = builder.emit(comm.allreduce(builder.emit(relax.op.negative(part)), team=[some]))
            x = builder.emit(comm.allreduce(builder.emit(relax.op.add(part, x)), "max"))
        return x

    xs = values(ranks)
    tiled = [np.tile(x, (500, 1)) for x in xs]
    for _ in range(3):
        total = -2 * (2 * tiled[0] + 2 * tiled[ranks - 1])
        parts = [total if rank in some else 0 * total for rank in range(ranks)]
        most = np.max([part + x for part, x in zip(parts, tiled, strict=True)], axis=0)
        tiled = [most] * ranks
    for found in run(module_of(layers), xs, repetitions=3):
        np.testing.assert_array_equal(found, tiled[0])


@I.ir_module
class Layer:
    """A matmul, an all-reduce among ranks 0 and 2, and the norm of its sum with a residual."""

    @R.function
    def main(x: R.Tensor((12, 6), "float32")):
        with R.dataflow():
            lv = R.matmul(x, R.ones((6, 64), "float32"))
            lv1 = R.comm.allreduce(lv, team=[[0, 2]])
            lv2 = R.add(lv1, R.ones((12, 64), "float32"))
            gv = R.nn.rms_norm(lv2, R.ones((64,), "float32"), axes=[-1])
            R.output(gv)
        return gv


def test_ranks_outside_compute_with_zeros_in_a_fusible_program() -> None:
    """A rank outside has the norm of its own residual, as if nothing were fused or overlapped."""
    xs = values(3)
    with collect_report() as report:
        found = run(Layer, xs, overlap=2)
    reasons = {one.pass_name: one.reason for one in report.decisions if "leave out" in one.reason}
    assert reasons["OverlapCommunication"] == "its teams leave out rank 1"
    assert reasons["FuseAllReduceEpilogue"].startswith("its teams leave out ranks")
    total = (xs[0] + xs[2]).sum(1, keepdims=True) + np.ones((1, 64), "float32")
    wanted = total / np.sqrt((total * total).mean(1, keepdims=True) + 1e-5)
    for rank in (0, 2):
        np.testing.assert_allclose(found[rank], wanted, rtol=1e-5)
    np.testing.assert_allclose(found[1], np.ones((12, 64)) / np.sqrt(1 + 1e-5), rtol=1e-6)


def test_started_and_awaited() -> None:
    @I.ir_module
    class Started:
        @R.function(pure=False)
        def main(x: R.Tensor((12, 6), "float32")):
            out = R.builtin.alloc_tensor(R.shape([12, 6]), R.dtype("float32"), 0, "global")
            request = R.comm.start(R.comm.allreduce(x, team=[[0, 2]]), out)
            y = R.negative(x)
            R.comm.wait(request)
            return R.add(y, out)

    xs = values(3)
    found = run(Started, xs)
    np.testing.assert_array_equal(found[0], xs[2])
    np.testing.assert_array_equal(found[1], -xs[1])
    np.testing.assert_array_equal(found[2], xs[0])


OUTSIDE = pytest.mark.parametrize(
    ("ranks", "team", "root"), [(2, [1], 0), (3, [0, 1], 2), (4, [3, 1], 0), (4, [1, 0, 3], 2)]
)


@OUTSIDE
@pytest.mark.parametrize("axis", [0, 1])
def test_roots_outside_of_the_team(ranks: int, team: list[int], root: int, axis: int) -> None:
    """A root outside takes part in its collective; another rank outside gets zeros."""
    xs = values(ranks)
    own = [xs[rank] for rank in team]
    options: dict[str, Any] = {"root_rank": root, "team": team}

    def result(name: str, **more: Any) -> list[Array]:
        module = module_of(lambda x: getattr(comm, name)(x, **options, **more))
        tvm.ir.assert_structural_equal(tvm.script.from_source(module.script()), module)
        return run(module, xs)

    np.testing.assert_array_equal(result("gather", axis=axis)[root], np.concatenate(own, axis))
    extent = len(team) * SHAPE[axis] - len(team) + 1
    uneven = np.take(np.concatenate(own, axis), range(extent), axis)
    np.testing.assert_array_equal(result("gather", axis=axis, extent=extent)[root], uneven)
    shards = np.split(xs[root], len(team), axis)
    found = result("scatter", axis=axis)
    for rank in range(ranks):
        wanted = shards[team.index(rank)] if rank in team else 0 * shards[0]
        np.testing.assert_array_equal(found[rank], wanted)
    found = result("broadcast")
    for rank in range(ranks):
        takes_part = rank == root or rank in team
        np.testing.assert_array_equal(found[rank], xs[root] if takes_part else 0 * xs[root])
    np.testing.assert_array_equal(result("reduce", reduction="max")[root], np.max(own, axis=0))
    np.testing.assert_array_equal(result("reduce", scale=0.5)[root], np.sum(own, axis=0) / 2)


def test_a_root_is_given_by_its_rank_or_its_index() -> None:
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    by_index = comm.broadcast(x, 1, team=[2, 0])
    assert tvm_ffi.structural_equal(comm.broadcast(x, root_rank=0, team=[2, 0]), by_index)
    assert tvm_ffi.structural_equal(comm.broadcast(x, root_rank=3), comm.broadcast(x, 3))
    outside = comm.gather(x, root_rank=1, team=[2, 0])
    assert str(outside) == (
        'R.comm.collective(x, concat_axis=0, kind="gather", root_rank=1, team=[[2, 0]])'
    )
    for make, message in (
        (lambda: comm.broadcast(x, 1, root_rank=0, team=[2, 0]), "root is 1 and root_rank is 0"),
        (lambda: comm.broadcast(x, root_rank=0, team=[[2, 0], [1, 3]]), "there are several teams"),
        (lambda: comm.broadcast(x, root_rank=0, team="group"), "there are several teams"),
        (
            lambda: comm.collective(x, kind="broadcast", root_rank=0, team=[[2, 0]]),
            "root_rank is 0; expected the rank of a root that is not in the only team",
        ),
        (
            lambda: comm.collective(x, kind="allreduce", reduction="sum", root_rank=0),
            "allreduce: root_rank is 0; expected None",
        ),
        (
            lambda: comm.start(outside, relax.Var("out", x.ty)),
            "start: gather: the root, rank 1, is not in the team",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    module = module_of(lambda x: comm.broadcast(x, root_rank=4, team=[[0, 2]]))
    with pytest.raises(TransformError, match="but world_size is 4; a team consists of the ranks"):
        tvm_ipc.get_pipeline("llvm", 4)(module)


def test_a_team_of_ranks_that_the_session_lacks_is_refused() -> None:
    module = module_of(lambda x: comm.allreduce(x, team=[[0, 3]]))
    message = "over the team .0, 3., but world_size is 3; a team consists of the ranks 0 to 2"
    with pytest.raises(TransformError, match=message):
        tvm_ipc.get_pipeline("llvm", 3)(module)


def test_functions_for_members_refuse_other_ranks() -> None:
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        x = session.empty((4,), "float32")

        session.get_global_func("tvm_ipc.expose")(x, tvm_ffi.Shape([2, 0, 2]))
        message = r"expose: teams of the ranks \[0, 2\]: rank 1 is in none; only members may call"
        with pytest.raises(WorkerError, match=message):
            session.sync()
