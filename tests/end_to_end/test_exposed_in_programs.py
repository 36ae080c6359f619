# SPDX-License-Identifier: Apache-2.0
"""Matmuls that read what peers show, chunk by chunk: for a gather, and before a reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

import tvm_ipc
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.transform import verify_cross_rank_safety

#: Of a chunk of a rank, whose bytes are a multiple of 64: kernels of TVM take aligned tensors.
ROWS, INNER, COLUMNS = 3, 32, 16
FLOAT = 4


class ExposingPrograms:
    """Builds a program; what is left out of it shows what each part is for."""

    def __init__(self, ranks: int, chunks: int, team: Any = 0, forgotten: str = "") -> None:
        self.ranks, self.chunks, self.forgotten = ranks, chunks, forgotten
        self.team = team
        self.builder = relax.BlockBuilder()

    def packed(self, name: str, *operands: Any, ty: Any) -> Any:
        arguments = [relax.prim_value(o) if isinstance(o, int) else o for o in operands]
        call = relax.Call(relax.ExternFunc(f"tvm_ipc.{name}"), arguments, ty_args=[ty])
        return self.builder.emit(call)

    def tensor(self, *shape: int) -> Any:
        return relax.TensorType(shape, "float32")

    def empty(self, *shape: int) -> Any:
        extents = relax.ShapeExpr(shape)
        return self.builder.emit(relax.op.builtin.alloc_tensor(extents, "float32", 0, "global"))

    def view(self, tensor: Any, index: int, *shape: int) -> Any:
        offset = FLOAT * index * int(np.prod(shape))
        return self.packed("view", tensor, offset, relax.ShapeExpr(shape), ty=self.tensor(*shape))

    def part(self, tensor: Any, shift: int, chunk: int, *shape: int) -> Any:
        """Of a tensor that has the chunks of rank after rank."""
        size = FLOAT * int(np.prod(shape))
        numbers = (shift, self.chunks * size, chunk * size)
        shape_of = relax.ShapeExpr(shape)
        return self.packed(
            "own_slice", tensor, self.team, *numbers, shape_of, ty=self.tensor(*shape)
        )

    def peer_view(self, shown: Any, shift: int, *shape: int) -> Any:
        return self.packed(
            "peer_view", shown, shift, relax.ShapeExpr(shape), ty=self.tensor(*shape)
        )

    def expose(self, tensor: Any) -> Any:
        return self.packed("expose", tensor, self.team, ty=relax.AnyType())

    def release(self, shown: list[Any]) -> None:
        if self.forgotten != "release":
            self.packed("release", self.team, *shown, ty=relax.TupleType([]))

    def linear(self, x: Any, weight: Any, out: Any) -> None:
        self.builder.emit(relax.Call(self.kernel, [x, weight, out], ty_args=[relax.TupleType([])]))

    def begin(self, rows: int) -> list[relax.Var]:
        a, b = te.placeholder((rows, INNER), "float32"), te.placeholder((INNER, COLUMNS), "float32")
        k = te.reduce_axis((0, INNER))
        out = te.compute((rows, COLUMNS), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
        kernel = te.create_prim_func([a, b, out]).with_attr("global_symbol", "linear")
        self.kernel = self.builder.add_func(kernel, "linear")
        return [relax.Var("weight", self.tensor(INNER, COLUMNS))]

    def gather_matmul(self, *others: Any) -> tvm.IRModule:
        """Of the rows of all ranks of a team, and of each of others at the same time."""
        chunk = (ROWS, INNER)
        (weight,) = self.begin(ROWS)
        x = relax.Var("x", self.tensor(self.chunks, *chunk))
        teams = [self.team, *others]
        with self.builder.function("main", [x, weight], pure=False):
            outs = [self.empty(self.ranks, self.chunks, ROWS, COLUMNS) for _ in teams]
            shown = []
            for self.team in teams:
                views = [self.view(x, j, *chunk) for j in range(self.chunks)]
                shown.append([self.expose(view) for view in views])
            for k in range(self.ranks):
                for j in range(self.chunks):
                    for self.team, out, ours in zip(teams, outs, shown, strict=True):
                        rows = self.peer_view(ours[j], k, *chunk)
                        self.linear(rows, weight, self.part(out, k, j, ROWS, COLUMNS))
            for self.team, ours in zip(teams, shown, strict=True):
                self.release(ours)
            self.builder.emit_func_output(outs[0] if len(outs) == 1 else relax.Tuple(outs))
        return self.builder.get()

    def matmul_scatter(self) -> tvm.IRModule:
        """Of what all ranks have a part of the sum of: each gets the sum of its rows."""
        (weight,) = self.begin(ROWS)
        x = relax.Var("x", self.tensor(self.ranks, self.chunks, ROWS, INNER))
        product = (ROWS, COLUMNS)
        with self.builder.function("main", [x, weight], pure=False):
            out = self.empty(self.chunks, *product)
            shown: dict[tuple[int, int], Any] = {}
            own: list[Any] = []
            for k in [*range(1, self.ranks), 0]:
                for j in range(self.chunks):
                    q = self.empty(*product)
                    self.linear(self.part(x, k, j, ROWS, INNER), weight, q)
                    shown[k, j] = self.expose(q)
                    own += [q] if k == 0 else []
            for j in range(self.chunks):
                parts = [own[j]]
                parts += [self.peer_view(shown[k, j], -k, *product) for k in range(1, self.ranks)]
                recv = self.view(out, j, *product)
                kind = 0
                ty = relax.TupleType([])
                self.packed("reduce_slices", kind, self.team, *parts, recv, ty=ty)
            self.release(list(shown.values()))
            self.builder.emit_func_output(out)
        return self.builder.get()


def compiled(module: tvm.IRModule, ranks: int) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    assert verify_cross_rank_safety(pipeline(module)) == []
    return tvm.compile(module, "llvm", relax_pipeline=pipeline)


def give(x: Any, values: np.ndarray) -> None:
    """Give each rank the tensor that is its own."""
    for rank, value in enumerate(values):
        x.debug_copy_from(rank, value)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype("float32")


#: Of no time, of some microseconds, and longer than a step of the program takes.
LINKS: list[dict[str, float]] = [
    {},
    {},
    {"latency": 2e-5, "bandwidth": 5e7, "jitter": 1e-4},
    {"jitter": 2e-3},
]


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_matmul_of_rows_that_peers_show(ranks: int, chunks: int) -> None:
    program = compiled(ExposingPrograms(ranks, chunks).gather_matmul(), ranks)
    weight = drawn(0, INNER, COLUMNS)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        x, w = session.empty((chunks, ROWS, INNER), "float32"), session.put(weight)
        for repetition in range(8):
            session.emulate_link(**LINKS[repetition % len(LINKS)])
            xs = drawn(repetition, ranks, chunks, ROWS, INNER)
            give(x, xs)
            out = main(x, w)
            for rank in range(ranks):
                np.testing.assert_array_equal(session.get(out, rank=rank), xs @ weight)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_matmul_whose_parts_peers_reduce(ranks: int, chunks: int) -> None:
    program = compiled(ExposingPrograms(ranks, chunks).matmul_scatter(), ranks)
    weights = drawn(0, ranks, INNER, COLUMNS)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        x = session.empty((ranks, chunks, ROWS, INNER), "float32")
        w = session.scatter(weights)
        for repetition in range(8):
            session.emulate_link(**LINKS[repetition % len(LINKS)])
            xs = drawn(repetition, ranks, ranks, chunks, ROWS, INNER)
            give(x, xs)
            out = main(x, w)
            wanted = sum(xs[rank] @ weights[rank] for rank in range(ranks))
            for rank in range(ranks):
                np.testing.assert_array_equal(session.get(out, rank=rank), wanted[rank])


MESH_ROWS, MESH_COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def division(teams: list[list[int]]) -> relax.ShapeExpr:
    return relax.ShapeExpr([len(teams[0]), *(rank for team in teams for rank in team)])


def test_in_both_teams_that_a_rank_of_a_mesh_is_in() -> None:
    """At the same time, and the ranks that come later to one wait for nobody in the other."""
    rows, columns = division(MESH_ROWS), division(MESH_COLUMNS)
    program = compiled(ExposingPrograms(2, 3, rows).gather_matmul(columns), 4)
    weight = drawn(0, INNER, COLUMNS)
    with tvm_ipc.Session(4, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        field = session.get_global_func("ffi.ArrayGetItem")
        x, w = session.empty((3, ROWS, INNER), "float32"), session.put(weight)
        for repetition in range(8):
            session.emulate_link(jitter=1e-3 if repetition % 2 else 0)
            xs = drawn(repetition, 4, 3, ROWS, INNER)
            give(x, xs)
            out = main(x, w)
            for which, teams in enumerate((MESH_ROWS, MESH_COLUMNS)):
                for team in teams:
                    for rank in team:
                        found = session.get(field(out, which), rank=rank)
                        np.testing.assert_array_equal(found, xs[team] @ weight)


def test_parts_are_reduced_in_each_team_of_a_mesh() -> None:
    program = compiled(ExposingPrograms(2, 2, division(MESH_COLUMNS)).matmul_scatter(), 4)
    weights = drawn(0, 4, INNER, COLUMNS)
    with tvm_ipc.Session(4, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        x, w = session.empty((2, 2, ROWS, INNER), "float32"), session.scatter(weights)
        for repetition in range(8):
            xs = drawn(repetition, 4, 2, 2, ROWS, INNER)
            give(x, xs)
            out = main(x, w)
            for team in MESH_COLUMNS:
                wanted = sum(xs[rank] @ weights[rank] for rank in team)
                for place, rank in enumerate(team):
                    np.testing.assert_array_equal(session.get(out, rank=rank), wanted[place])


def packed_calls(module: tvm.IRModule) -> list[str]:
    """The packed functions of ours that a program calls, in their order."""
    found = [call.op for call in calls(module["main"]) if isinstance(call.op, relax.ExternFunc)]
    names = [str(one.global_symbol).removeprefix("tvm_ipc.") for one in found]
    return [
        one
        for one in names
        if one in ("expose", "peer_view", "release", "own_slice", "reduce_slices")
    ]


@pytest.mark.parametrize(
    "transform",
    [
        relax.transform.DeadCodeElimination(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FoldConstant(),
        relax.transform.KillAfterLastUse(),
    ],
    ids=lambda one: str(one.info.name),
)
@pytest.mark.parametrize("program", ["gather_matmul", "matmul_scatter"])
def test_passes_leave_shows_in_their_order(transform: tvm.transform.Pass, program: str) -> None:
    """The n-th of each rank belongs to the n-th of others: none is left out, and none is shared."""
    module = getattr(ExposingPrograms(3, 2), program)()
    before = packed_calls(module)
    assert before.count("expose") == {"gather_matmul": 2, "matmul_scatter": 6}[program]
    assert packed_calls(transform(module)) == before


@pytest.mark.parametrize("forgotten", ["", "release"])
def test_what_a_program_does_not_hide_the_pipeline_hides(forgotten: str) -> None:
    for module in (
        ExposingPrograms(2, 2, forgotten=forgotten).gather_matmul(),
        ExposingPrograms(2, 2, forgotten=forgotten).matmul_scatter(),
    ):
        names = packed_calls(tvm_ipc.get_pipeline("llvm", 2)(module))
        assert names.count("release") == 1
        last = max(k for k, name in enumerate(names) if name in ("peer_view", "expose"))
        assert names.index("release") > last
