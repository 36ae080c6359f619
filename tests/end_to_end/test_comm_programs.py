# SPDX-License-Identifier: Apache-2.0
"""Programs with collectives of `tvm_ipc.comm`, compiled, checked, and run against NumPy."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.collective_results import Array, call_and_results, cut
from tests.runtime.tensors_of_ranks import assert_each, write_each
from tvm_ipc import comm
from tvm_ipc.comm import KINDS, Mesh, Teams
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.packed_functions import REDUCED_TYPES
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

#: What the members of a team have; what each of them gets, None where nothing is defined.
Results = Callable[[list[Array]], "list[Array | None] | list[Array]"]
REPETITIONS = 8


def case(
    name: str, teams: Teams, axis: int, **options: Any
) -> tuple[Callable[[Any], relax.Call], Results]:
    """A collective of a kind, and the results of a team."""
    n = len(teams[0])
    uneven = bool(options)
    given = {
        "reduction": "max" if KINDS[name].rooted else "sum",
        "root": 0 if uneven else n - 1,
        "axis": axis,
        "split_axis": int(not uneven),
        "concat_axis": int(uneven),
        "pairs": [[k, (k + 1) % n] for k in range(n)],
        "source": n - 1,
        "target": 0,
        "team": teams,
        **options,
    }
    parameters = inspect.signature(getattr(comm, name)).parameters
    return call_and_results(
        name, **{key: value for key, value in given.items() if key in parameters}
    )


def cases(teams: Teams) -> dict[str, tuple[Callable[[Any], relax.Call], Results]]:
    """By a name that begins with a kind: a collective of a tensor of 2n + 1 x 2n, and results."""
    n = len(teams[0])
    found = {}
    for name, kind in KINDS.items():
        if name == "send_recv" and n == 1:
            continue
        found[name] = case(name, teams, int(kind.splits))
        if kind.concatenates:
            found[f"{name} uneven"] = case(name, teams, 1, extent=2 * n * n - n + 1)
        elif kind.splits:
            found[f"{name} uneven"] = case(name, teams, 0, uneven=True)
    return found


def add_function(
    builder: relax.BlockBuilder,
    name: str,
    make: Callable[[Any], relax.Call],
    dtype: str,
    shape: tuple[Any, ...],
) -> None:
    """Add a function that returns a collective of its parameter, and may not work in place."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function(name, [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(make(x)))
        builder.emit_func_output(out)


@contextmanager
def running(mod: tvm.IRModule, ranks: int, groups: int = 1) -> Iterator[Any]:
    """A session, and the module in it."""
    program = tvm.compile(
        mod,
        "llvm",
        relax_pipeline=tvm_ipc.get_pipeline("llvm", ranks, num_groups=groups, blas=False),
    )
    with tvm_ipc.Session(ranks, num_groups=groups, threads=True, timeout=60) as session:
        yield session, session.load_vm_module(program)


def numpy_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)


def values(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Small integers, so that every order of adding them gives the same."""
    drawn = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 6, shape)
    return drawn.astype(numpy_type(dtype))


def check(session: Any, function: Any, teams: Teams, results: Results, arguments: Any) -> None:
    """Call a function again and again with other values in the same buffer."""
    shape, dtype = arguments
    buffer = session.empty(shape, dtype)
    for repetition in range(REPETITIONS):
        given = {
            rank: values(100 * repetition + rank, shape, dtype) for team in teams for rank in team
        }
        write_each(buffer, given)
        out = function(buffer)
        for team in teams:
            wanted = results([given[rank] for rank in team])
            for rank, result in zip(team, wanted, strict=True):
                if result is not None:
                    got = session.get(out, rank=rank)
                    np.testing.assert_array_equal(got, result.astype(got.dtype), f"rank {rank}")
        np.testing.assert_array_equal(session.get(buffer, rank=team[0]), given[team[0]])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_each_kind(ranks: int) -> None:
    teams = (tuple(range(ranks)),)
    shape = (2 * ranks + 1, 2 * ranks)
    dtypes = REDUCED_TYPES if ranks == 2 else ("float32", "bfloat16", "int8")
    made = {(name, dtype): case for name, case in cases(teams).items() for dtype in dtypes}
    names = {key: "_".join(key).replace(" ", "_") for key in made}
    builder = relax.BlockBuilder()
    for (name, dtype), (make, _) in made.items():
        add_function(builder, names[name, dtype], make, dtype, shape)
    with running(builder.get(), ranks) as (session, program):
        for (name, dtype), (_, results) in made.items():
            check(session, program[names[name, dtype]], teams, results, (shape, dtype))


@pytest.mark.parametrize("ranks", [None, [2, 0, 3, 1]])
def test_along_both_axes_of_a_mesh(ranks: list[int] | None) -> None:
    mesh = Mesh({"x": 2, "y": 2}, ranks)
    shape = (5, 4)
    builder = relax.BlockBuilder()
    found = {
        f"{axis}_{name.replace(' ', '_')}": (mesh.teams(axis), case)
        for axis in ("x", "y")
        for name, case in cases(mesh.teams(axis)).items()
    }
    for name, (_, (make, _)) in found.items():
        add_function(builder, name, make, "float32", shape)
    with running(builder.get(), 4) as (session, program):
        for name, (teams, (_, results)) in found.items():
            check(session, program[name], teams, results, (shape, "float32"))


#: Those whose parts are put where they belong as soon as they have come, so nothing is between.
JOINED_BY_A_KERNEL = ("allgather uneven", "gather uneven", "all_to_all uneven")


@pytest.mark.parametrize("posts", [False, True], ids=["called", "posted"])
def test_along_both_axes_at_once(posts: bool) -> None:
    """Of a mesh; if they are posted, while the program multiplies what it was given."""
    mesh, shape, dtype = Mesh({"x": 2, "y": 2}), (5, 4), "bfloat16"
    kinds = {axis: cases(mesh.teams(axis)) for axis in mesh.axes}
    names = [name for name in kinds["x"] if not name.startswith("take_shard")]
    builder = relax.BlockBuilder()
    for name in names:
        x = relax.Var("x", relax.TensorType(shape, dtype))
        with builder.function(name.replace(" ", "_"), [x]):
            with builder.dataflow():
                parts = [builder.emit(kinds[axis][name][0](x)) for axis in mesh.axes]
                beside = builder.emit(relax.op.multiply(x, x))
                out = builder.emit_output(relax.Tuple([*parts, beside]))
            builder.emit_func_output(out)
    pipeline = tvm_ipc.get_pipeline("llvm", 4, blas=False, async_collectives=posts)
    with collect_report() as report:
        program = tvm.compile(builder.get(), "llvm", relax_pipeline=pipeline)
    posted = {one.function for one in report.decisions if one.verdict == "asynchronous"}
    can_be = {name.replace(" ", "_") for name in names if name not in JOINED_BY_A_KERNEL}
    assert posted == (can_be if posts else set())
    with tvm_ipc.Session(4, threads=True, timeout=60) as session:
        loaded, buffer = session.load_vm_module(program), session.empty(shape, dtype)
        for name, repetition in itertools.product(names, range(REPETITIONS)):
            given = [values(100 * repetition + rank, shape, dtype) for rank in range(4)]
            write_each(buffer, given)
            out = loaded[name.replace(" ", "_")](buffer)
            found = [out.debug_get_from_remote(rank) for rank in range(4)]
            for k, axis in enumerate(mesh.axes):
                for team in mesh.teams(axis):
                    wanted = kinds[axis][name][1]([given[rank] for rank in team])
                    for rank, result in zip(team, wanted, strict=True):
                        if result is not None:
                            got = found[rank][k].numpy()
                            where = f"{name} along {axis} on rank {rank}"
                            np.testing.assert_array_equal(got, result.astype(got.dtype), where)
            for rank in range(4):
                np.testing.assert_array_equal(found[rank][2].numpy(), given[rank] * given[rank])


def test_along_one_axis_and_then_the_other() -> None:
    """What peers of one team read is not what peers of the other one do."""
    mesh = Mesh({"x": 2, "y": 2})
    rows = 512  # more than is copied instead of shown where it lies

    def layers(x: Any) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        for _ in range(3):
            x = builder.emit(comm.allreduce(builder.emit(relax.op.add(x, x)), team=mesh.teams("x")))
            x = builder.emit(comm.allgather(x, team=mesh.teams("y")))
            x = builder.emit(comm.reduce_scatter(x, "max", team=mesh.teams("y")))
        return relax.op.negative(x)

    builder = relax.BlockBuilder()
    add_function(builder, "main", layers, "float32", (rows, 4))
    pipeline = tvm_ipc.get_pipeline("llvm", 4, blas=False)
    assert verify_cross_rank_safety(pipeline(builder.get())) == []

    def results(xs: list[Array]) -> list[Array]:
        for _ in range(3):
            xs = [2 * (xs[k % 2] + xs[k % 2 + 2]) for k in range(4)]
            both = [np.concatenate([xs[k], xs[k + 1]]) for k in (0, 2)]
            most = [np.maximum(b, b) for b in both]
            xs = [np.split(most[k // 2], 2)[k % 2] for k in range(4)]
        return [-x for x in xs]

    with running(builder.get(), 4) as (session, program):
        whole = ((0, 1, 2, 3),)
        check(session, program["main"], whole, results, ((rows, 4), "float32"))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_world_and_groups(groups: int) -> None:
    builder = relax.BlockBuilder()
    size = 4 // groups
    team = tuple(tuple(range(first, first + size)) for first in range(0, 4, size))
    world = ((0, 1, 2, 3),)
    in_group: dict[str, Any] = {"team": "group", "workers": size}
    makes = {
        "world": (call_and_results("allreduce"), world),
        "group": (call_and_results("allreduce", team="group"), team),
        "gathered": (call_and_results("allgather", axis=1, **in_group), team),
        "sent": (call_and_results("send_recv", 3, 1, workers=4), world),
        "own_of_all": (call_and_results("take_shard", workers=4, uneven=True), world),
        "own_of_the_group": (call_and_results("take_shard", uneven=True, **in_group), team),
    }
    for name, ((make, _), _) in makes.items():
        add_function(builder, name, make, "float32", (3, 2))
    with running(builder.get(), 4, groups) as (session, program):
        for name, ((_, results), teams) in makes.items():
            check(session, program[name], teams, results, ((3, 2), "float32"))


def test_symbolic_extents() -> None:
    """Scattered in uneven parts and gathered again, from a root that the caller names."""
    n, root = tirx.Var("n", "int64"), tirx.Var("root", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    which = relax.Var("which", relax.ShapeType([root]))
    team = [0, 1, 2]
    with builder.function("main", [x, which]):
        with builder.dataflow():
            part = builder.emit(comm.scatter(x, root, uneven=True, team=team))
            twice = builder.emit(relax.op.add(part, part))
            out = builder.emit_output(comm.allgather(twice, extent=n, team=team))
        builder.emit_func_output(out)
    with running(builder.get(), 3) as (session, program):
        for rows in (0, 1, 2, 3, 7, 1000):
            buffer = session.empty((rows, 3), "float32")
            given = [values(rank, (rows, 3), "float32") for rank in range(3)]
            write_each(buffer, given)
            for source in range(3):
                out = program["main"](buffer, tvm.runtime.ShapeTuple([source]))
                assert_each(out, [2 * given[source]] * 3)
        program["main"](buffer, tvm.runtime.ShapeTuple([3]))
        with pytest.raises(WorkerError, match="scatter: there is no root 3 in a team of 3"):
            session.sync()


def test_a_part_of_a_length_that_is_known_where_it_runs() -> None:
    n = tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    add_function(
        builder,
        "main",
        lambda x: comm.take_shard(x, uneven=True, team=[2, 0, 1]),
        "float32",
        (n, 3),
    )
    with running(builder.get(), 3) as (session, program):
        for rows in (0, 1, 2, 3, 7, 100):
            buffer = session.empty((rows, 3), "float32")
            given = [values(rank, (rows, 3), "float32") for rank in range(3)]
            write_each(buffer, given)
            out = program["main"](buffer)
            for place, rank in enumerate([2, 0, 1]):
                wanted = cut(given[rank], 3)[place]
                np.testing.assert_array_equal(session.get(out, rank=rank), wanted)


def test_a_session_of_another_size_refuses_parts_that_nobody_sends() -> None:
    builder = relax.BlockBuilder()
    add_function(builder, "main", lambda x: comm.take_shard(x, workers=2), "float32", (4, 2))
    program = tvm.compile(
        builder.get(), "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2, blas=False)
    )
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        session.load_vm_module(program)
        with pytest.raises(WorkerError, match="compiled for 2 workers, and this session has 3"):
            session.sync()


def test_a_part_that_is_not_one_of_the_whole_is_refused_where_it_runs() -> None:
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 2), "float32"))
    whole = relax.Var("whole", relax.TensorType((m,), "float32"))
    with builder.function("main", [x, whole]):
        with builder.dataflow():
            out = builder.emit_output(comm.allgather(x, extent=m, team=[0, 1]))
        builder.emit_func_output(out)
    with running(builder.get(), 2) as (session, program):
        x = session.empty((3, 2), "float32")
        assert session.get(program["main"](x, session.empty((5,), "float32"))).shape == (5, 2)
        program["main"](x, session.empty((7,), "float32"))
        with pytest.raises(WorkerError, match="3"):
            session.sync()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: comm.allgather(x, workers=3),
            "has a relax.comm.collective over 3 workers, but the session has 4",
        ),
        (
            lambda x: comm.allgather(x, team="group", workers=4),
            "has a relax.comm.collective over 4 workers, but a group has 2",
        ),
        (
            lambda x: comm.allreduce(x, team=[[0, 5]]),
            r"has a collective \(allreduce\) over the team \[0, 5\], but world_size is 4",
        ),
        (lambda x: comm.allreduce(x, team=[[0, 1], [2, 4]]), r"the teams \[\[0, 1\], \[2, 4\]\]"),
    ],
)
def test_teams_that_do_not_fit_the_session(make: Any, message: str) -> None:
    builder = relax.BlockBuilder()
    add_function(builder, "main", make, "float32", (4, 2))
    pipeline = tvm_ipc.get_pipeline("llvm", 4, num_groups=2)
    with pytest.raises(TransformError, match=message):
        pipeline(builder.get())
