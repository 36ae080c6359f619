# SPDX-License-Identifier: Apache-2.0
"""Matmuls that read what peers show, chunk by chunk: for a gather, and before a reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.end_to_end.compare_with_numpy import Each, Example, compare_with_numpy, verified
from tests.end_to_end.host_programs import OPTIMIZATIONS, HostBuilder, packed_names

#: Of a chunk of a rank, whose bytes are a multiple of 64: kernels of TVM take aligned tensors.
ROWS, INNER, COLUMNS = 3, 32, 16
FLOAT = 4


class ExposingPrograms(HostBuilder):
    """Builds a program; what is left out of it shows what each part is for."""

    def __init__(self, ranks: int, chunks: int, team: Any = 0, forgotten: str = "") -> None:
        self.ranks, self.chunks, self.forgotten = ranks, chunks, forgotten
        self.team = team
        super().__init__()

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
            self.packed("release", self.team, *shown)

    def begin(self, rows: int) -> list[relax.Var]:
        self.kernel = self.add_matmul(rows, INNER, COLUMNS)
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
                        self.call(self.kernel, rows, weight, self.part(out, k, j, ROWS, COLUMNS))
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
                    self.call(self.kernel, self.part(x, k, j, ROWS, INNER), weight, q)
                    shown[k, j] = self.expose(q)
                    own += [q] if k == 0 else []
            for j in range(self.chunks):
                parts = [own[j]]
                parts += [self.peer_view(shown[k, j], -k, *product) for k in range(1, self.ranks)]
                recv = self.view(out, j, *product)
                kind = 0
                self.packed("reduce_slices", kind, self.team, *parts, recv)
            self.release(list(shown.values()))
            self.builder.emit_func_output(out)
        return self.builder.get()


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype("float32")


RANKS = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
CHUNKS = [1, pytest.param(2, marks=pytest.mark.slow), 5]
#: Of no time, of some microseconds, and longer than a step of the program takes.
LINKS: list[dict[str, float]] = [
    {},
    {},
    {"latency": 2e-5, "bandwidth": 5e7, "jitter": 1e-4},
    {"jitter": 2e-3},
]


def on_links(session: Any, number: int) -> None:
    session.emulate_link(**LINKS[number % len(LINKS)])


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_matmul_of_rows_that_peers_show(ranks: int, chunks: int) -> None:
    program = verified(ExposingPrograms(ranks, chunks).gather_matmul(), ranks)
    weight = drawn(0, INNER, COLUMNS)
    inputs = [drawn(repetition, ranks, chunks, ROWS, INNER) for repetition in range(8)]
    examples = ((xs, [weight], [xs @ weight] * ranks) for xs in inputs)
    compare_with_numpy(program, ranks, examples, on_links)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_matmul_whose_parts_peers_reduce(ranks: int, chunks: int) -> None:
    program = verified(ExposingPrograms(ranks, chunks).matmul_scatter(), ranks)
    weights = drawn(0, ranks, INNER, COLUMNS)

    def example(repetition: int) -> Example:
        xs = drawn(repetition, ranks, ranks, chunks, ROWS, INNER)
        return xs, [Each(weights)], sum(xs[rank] @ weights[rank] for rank in range(ranks))

    compare_with_numpy(program, ranks, map(example, range(8)), on_links)


MESH_ROWS, MESH_COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def division(teams: list[list[int]]) -> relax.ShapeExpr:
    return relax.ShapeExpr([len(teams[0]), *(rank for team in teams for rank in team)])


def test_in_both_teams_that_a_rank_of_a_mesh_is_in() -> None:
    """At the same time, and the ranks that come later to one wait for nobody in the other."""
    rows, columns = division(MESH_ROWS), division(MESH_COLUMNS)
    program = verified(ExposingPrograms(2, 3, rows).gather_matmul(columns), 4)
    weight = drawn(0, INNER, COLUMNS)

    def example(repetition: int) -> Example:
        xs = drawn(repetition, 4, 3, ROWS, INNER)
        teams = [*MESH_ROWS, *MESH_COLUMNS]
        both = [[xs[team] @ weight for team in teams if rank in team] for rank in range(4)]
        return xs, [weight], both

    def with_jitter(session: Any, number: int) -> None:
        session.emulate_link(jitter=1e-3 if number % 2 else 0)

    compare_with_numpy(program, 4, map(example, range(8)), with_jitter)


def test_parts_are_reduced_in_each_team_of_a_mesh() -> None:
    program = verified(ExposingPrograms(2, 2, division(MESH_COLUMNS)).matmul_scatter(), 4)
    weights = drawn(0, 4, INNER, COLUMNS)

    def example(repetition: int) -> Example:
        xs = drawn(repetition, 4, 2, 2, ROWS, INNER)
        wanted: dict[int, Any] = {}
        for team in MESH_COLUMNS:
            wanted.update(zip(team, sum(xs[rank] @ weights[rank] for rank in team), strict=True))
        return xs, [Each(weights)], wanted

    compare_with_numpy(program, 4, map(example, range(8)))


def packed_calls(module: tvm.IRModule) -> list[str]:
    """The packed functions of ours that a program calls, in their order."""
    ours = ("expose", "peer_view", "release", "own_slice", "reduce_slices")
    names = [one.removeprefix("tvm_ipc.") for one in packed_names(module)]
    return [one for one in names if one in ours]


@OPTIMIZATIONS
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
