# SPDX-License-Identifier: Apache-2.0
"""Operators and collectives of which an axis is marked for streams, in workers, against NumPy.

The programs are named after nvFuser's tests of stream axes and of its host IR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.end_to_end.compare_with_numpy import Each, Example, compare_with_numpy
from tvm_ipc import get_pipeline
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.transform import collect_report, verify_cross_rank_safety

Array = np.ndarray[Any, Any]
ALL = {"d": Replica()}
ROUNDS = 3


@dataclass(frozen=True)
class Program:
    """A program for all ranks of a mesh, and what it computes.

    `shards` has the axis along which each parameter is sharded, None for a whole one; `out` is that
    of the result.
    """

    shapes: tuple[tuple[Any, ...], ...]
    shards: tuple[int | None, ...]
    body: Callable[..., relax.Expr]  # of the builder's emit, the mesh, and the parameters
    expected: Callable[..., Array]
    out: int | None
    stream: int
    chunks: int
    reason: str

    def module(self, mesh: Mesh) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        params = [
            relax.Var(f"p{k}", relax.TensorType(shape, "float32"))
            for k, shape in enumerate(self.shapes)
        ]
        with builder.function("main", params):
            with builder.dataflow():
                placed = [
                    param if axis is None else builder.emit(place(param, mesh, {"d": Shard(axis)}))
                    for param, axis in zip(params, self.shards, strict=True)
                ]
                value = builder.emit(self.body(builder.emit, mesh, *placed))
                target = ALL if self.out is None else {"d": Shard(self.out)}
                out = builder.emit_output(place(value, mesh, target, stream=self.stream), "out")
            builder.emit_func_output(out)
        return builder.get()

    def compiled(self, mesh: Mesh, **options: Any) -> Any:
        """The program, in which the mark is honoured and no hazard is found."""
        with collect_report() as report:
            lowered = get_pipeline("llvm", len(mesh.ranks), **options)(self.module(mesh))
        (mark,) = [one for one in report.decisions if one.subject.startswith("stream=")]
        chunks = f"in {self.chunks} chunk{'s' * (self.chunks > 1)}"
        assert (mark.verdict, mark.reason) == (chunks, self.reason)
        # TVM lowers symbolic offsets to PrimFuncs; before, the pipeline itself has verified them.
        is_static = all(isinstance(n, int) for shape in self.shapes for n in shape)
        assert not is_static or verify_cross_rank_safety(lowered) == []
        return tvm.compile(lowered, "llvm", relax_pipeline=tvm.transform.Sequential([]))

    def examples(self, mesh: Mesh) -> Iterator[Example]:
        """Fresh values; all teams along "d" have the same ones."""
        for number in range(ROUNDS):
            whole = [
                np.random.default_rng(10 * number + k).integers(-3, 4, shape).astype("float32")
                for k, shape in enumerate(self.shapes)
            ]
            split = [_shards(x, axis, mesh) for x, axis in zip(whole, self.shards, strict=True)]
            others = [
                x if axis is None else Each(shards)
                for x, axis, shards in zip(whole[1:], self.shards[1:], split[1:], strict=True)
            ]
            yield split[0], others, _shards(self.expected(*whole), self.out, mesh)


def _shards(x: Array, axis: int | None, mesh: Mesh) -> dict[int, Array]:
    """Return what each rank has of an array that is sharded along "d"."""
    teams = mesh.teams("d")
    parts = [x] * len(teams[0]) if axis is None else np.split(x, len(teams[0]), axis)
    return {rank: part for team in teams for rank, part in zip(team, parts, strict=True)}


def gathered(emit: Any, mesh: Mesh, x: Any) -> Any:
    return emit(place(x, mesh, ALL))


def collective(kind: str, streams: int, chunks: int = 4) -> str:
    count = min(streams, chunks)
    return f"asynchronous {kind}, {count} chunk{'s' * (count > 1)} at a time"


MEANWHILE = ", and computes another one meanwhile"
RING_GATHER = "a ring: each rank passes shards on to the next rank"
RING_SCATTER = "a ring: each rank sends the others their shards"


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


CONSTANT = np.arange(32, dtype="float32").reshape(4, 1, 8)

#: By name, from the number of ranks and of streams.
PROGRAMS: dict[str, Callable[[int, int], Program]] = {
    "Allgather": lambda d, n: Program(
        ((4, d),), (1,), lambda e, m, x: x, lambda x: x, None, 0, 4, collective("allgather", n)
    ),
    "Allreduce": lambda d, n: Program(
        *(((4, d, 8),), (1,), lambda e, m, x: op.sum(x, 1), lambda x: x.sum(1)),
        *(None, 0, 4, collective("allreduce", n)),
    ),
    "ReduceScatter": lambda d, n: Program(
        *(((4, d, 2 * d, 8),), (1,), lambda e, m, x: op.sum(x, 1), lambda x: x.sum(1)),
        *(1, 0, 4, collective("reduce_scatter", n)),
    ),
    "all-to-all": lambda d, n: Program(
        *(((4, 2 * d, 3 * d),), (1,), lambda e, m, x: x, lambda x: x),
        *(2, 0, 4, collective("all_to_all", n)),
    ),
    "AG_after": lambda d, n: Program(
        *(((4, 2 * d, 32), (32, 16)), (1, None), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, None, 0, 4, collective("allgather", n)),
    ),
    "matmul_AR": lambda d, n: Program(
        *(((4, d, 6, 16), (d, 16, 16)), (1, 0)),
        lambda e, m, x, w: op.sum(e(op.matmul(x, w)), 1),
        lambda x, w: (x @ w).sum(1),
        *(None, 0, 4, collective("allreduce", n)),
    ),
    "matmul_RS": lambda d, n: Program(
        *(((4, 2 * d, 8 * d), (8 * d, 16)), (2, 0), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, 1, 0, 4, collective("reduce_scatter", n)),
    ),
    "matmul_RS_through_bcast": lambda d, n: Program(
        *(((4, d, d, 3, 8), (d, 8, 2)), (1, 0)),
        lambda e, m, x, w: op.sum(e(op.matmul(x, e(op.expand_dims(w, [0, 2])))), 1),
        lambda x, w: (x @ w[None, :, None]).sum(1),
        *(1, 0, 4, collective("reduce_scatter", n)),
    ),
    "matmul_AR along the columns": lambda d, n: Program(
        *(((6, 8 * d), (8 * d, 4)), (1, 0), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, None, 1, 4, collective("allreduce", n)),
    ),
    "AG_matmul along axis 1": lambda d, n: Program(
        *(((3 * d, 4, 16), (16, 16)), (0, None)),
        lambda e, m, x, w: op.nn.relu(e(op.matmul(gathered(e, m, x), w))),
        lambda x, w: relu(x @ w),
        *(None, 1, 4, collective("allgather", n)),
    ),
    "AG_matmul_AR": lambda d, n: Program(
        *(((4, 2 * d, 8), (8, 4 * d), (4 * d, 8)), (1, 1, 0)),
        lambda e, m, x, w, v: op.matmul(e(op.nn.relu(e(op.matmul(gathered(e, m, x), w)))), v),
        lambda x, w, v: relu(x @ w) @ v,
        *(None, 0, 4, collective("allgather and allreduce", n)),
    ),
    "two products of a gather": lambda d, n: Program(
        *(((4, 2 * d, 16), (16, 8), (8,)), (1, None, None)),
        lambda e, m, x, w, b: (
            lambda whole: op.multiply(
                e(op.nn.relu(e(op.matmul(whole, w)))),
                e(op.add(e(op.matmul(whole, e(op.negative(w)))), b)),
            )
        )(gathered(e, m, x)),
        lambda x, w, b: relu(x @ w) * (x @ -w + b),
        *(None, 0, 4, collective("allgather", n)),
    ),
    "a gather less the maxima of rows, and a residual": lambda d, n: Program(
        *(((4, 2 * d, 8), (4, 2 * d, 8)), (1, None)),
        lambda e, m, x, y: (
            lambda whole: op.add(
                e(op.subtract(whole, e(op.max(whole, -1, keepdims=True)))), e(op.negative(y))
            )
        )(gathered(e, m, x)),
        lambda x, y: x - x.max(-1, keepdims=True) - y,
        *(None, 0, 4, collective("allgather", n)),
    ),
    "a gather times its transpose": lambda d, n: Program(
        *(((4, 2 * d, 4),), (1,)),
        lambda e, m, x: (lambda whole: op.matmul(whole, e(op.permute_dims(whole, [0, 2, 1]))))(
            gathered(e, m, x)
        ),
        lambda x: x @ x.transpose(0, 2, 1),
        *(None, 0, 4, collective("allgather", n)),
    ),
    "a constant, and a concatenation": lambda d, n: Program(
        *(((4, 2 * d, 8), (4, 3, 8)), (1, None)),
        lambda e, m, x, y: op.concat(
            [e(op.add(gathered(e, m, x), relax.const(CONSTANT))), e(op.nn.relu(y))], 1
        ),
        lambda x, y: np.concatenate([x + CONSTANT, relu(y)], 1),
        *(None, 0, 4, collective("allgather", n)),
    ),
    "reshaped": lambda d, n: Program(
        *(((4, 2 * d, 8, 2), (16, 16)), (1, None)),
        lambda e, m, x, w: op.matmul(e(op.reshape(gathered(e, m, x), (4, 2 * d, 16))), w),
        lambda x, w: x.reshape(4, 2 * d, 16) @ w,
        *(None, 0, 4, collective("allgather", n)),
    ),
    "AllgatherP2p": lambda d, n: Program(
        ((d, 4),), (0,), lambda e, m, x: x, lambda x: x, None, 0, d, RING_GATHER
    ),
    "AllgatherP2p along axis 1": lambda d, n: Program(
        ((3, 2 * d, 5),), (1,), lambda e, m, x: x, lambda x: x, None, 1, d, RING_GATHER
    ),
    "AG_matmul_P2p": lambda d, n: Program(
        *(((d, 3, 16), (16, 16)), (0, None)),
        lambda e, m, x, w: op.matmul(gathered(e, m, x), w),
        *(np.matmul, None, 0, d, RING_GATHER + MEANWHILE),
    ),
    "AG_matmul_P2p along axis 1": lambda d, n: Program(
        *(((3, 2 * d, 16), (16, 5), (5,)), (1, None, None)),
        lambda e, m, x, w, b: op.add(e(op.matmul(gathered(e, m, x), w)), b),
        lambda x, w, b: x @ w + b,
        *(None, 1, d, RING_GATHER + MEANWHILE),
    ),
    "ReduceScatterRing": lambda d, n: Program(
        *(((4 * d, 8 * d), (8 * d, 16)), (1, 0), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, 0, 0, d, RING_SCATTER + MEANWHILE),
    ),
    "ReduceScatterRing and ReLU": lambda d, n: Program(
        *(((3, 2 * d, 8 * d), (8 * d, 16)), (2, 0)),
        lambda e, m, x, w: op.nn.relu(e(place(e(op.matmul(x, w)), m, {"d": Shard(1)}))),
        lambda x, w: relu(x @ w),
        *(1, 1, d, RING_SCATTER + MEANWHILE),
    ),
    "ReduceScatterRing of a sum": lambda d, n: Program(
        *(((d, 2 * d, 16),), (0,), lambda e, m, x: op.sum(x, 0), lambda x: x.sum(0)),
        *(0, 0, d, RING_SCATTER),
    ),
}


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_two_workers(name: str, streams: int) -> None:
    program = PROGRAMS[name](2, streams)
    mesh = Mesh({"d": 2})
    for blas in (False, True) if streams == 2 else (False,):
        compiled = program.compiled(mesh, streams=streams, blas=blas)
        compare_with_numpy(compiled, 2, program.examples(mesh))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_more_workers(name: str, ranks: int) -> None:
    program, mesh = PROGRAMS[name](ranks, 2), Mesh({"d": ranks})
    compare_with_numpy(program.compiled(mesh, blas=False), ranks, program.examples(mesh))


@pytest.mark.parametrize("axes", [{"d": 2, "other": 2}, {"other": 2, "d": 2}])
@pytest.mark.parametrize("name", ["matmul_AR", "AG_after", "AG_matmul_P2p", "ReduceScatterRing"])
def test_along_an_axis_of_a_mesh(name: str, axes: dict[str, int]) -> None:
    program, mesh = PROGRAMS[name](2, 2), Mesh(axes)
    compare_with_numpy(program.compiled(mesh, blas=False), 4, program.examples(mesh))


#: By name, from the number of ranks and an extent.
SYMBOLIC: dict[str, Callable[[int, Any], Program]] = {
    "matmul_AR": lambda d, n: Program(
        *(((4, n, 8 * d), (8 * d, 16)), (2, 0), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, None, 0, 4, collective("allreduce", 2)),
    ),
    "AG_after": lambda d, n: Program(
        *(((4, n * d, 32), (32, 16)), (1, None), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, None, 0, 4, collective("allgather", 2)),
    ),
    "AG_matmul_P2p": lambda d, n: Program(
        *(((n * d, 16), (16, 16)), (0, None)),
        lambda e, m, x, w: op.matmul(gathered(e, m, x), w),
        *(np.matmul, None, 0, d, RING_GATHER + MEANWHILE),
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_other_extents_may_be_symbolic(name: str) -> None:
    mesh = Mesh({"d": 2})
    compiled = SYMBOLIC[name](2, tirx.Var("n", "int64")).compiled(mesh)
    for n in (1, 2, 7, 16):
        compare_with_numpy(compiled, 2, SYMBOLIC[name](2, n).examples(mesh))


def test_one_chunk() -> None:
    program = Program(
        *(((1, 6, 16), (16, 16)), (2, 0), lambda e, m, x, w: op.matmul(x, w)),
        *(np.matmul, None, 0, 1, collective("allreduce", 2, 1)),
    )
    mesh = Mesh({"d": 2})
    compare_with_numpy(program.compiled(mesh), 2, program.examples(mesh))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_gpus_have_the_same_chunks(name: str) -> None:
    program, mesh = PROGRAMS[name](2, 2), Mesh({"d": 2})
    with collect_report() as report:
        lowered = get_pipeline({"kind": "cuda", "arch": "sm_90"}, 2)(program.module(mesh))
    (mark,) = [one for one in report.decisions if one.subject.startswith("stream=")]
    schedule, _, streams = mark.reason.partition(", computed on ")
    assert (mark.verdict, schedule) == (f"in {program.chunks} chunks", program.reason)
    assert ("tvm_ipc.set_stream" in lowered.script()) == (streams == "2 streams")
    assert verify_cross_rank_safety(lowered) == []
