# SPDX-License-Identifier: Apache-2.0
"""Random programs for all ranks: random shapes, operators and placements, against NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tests.end_to_end.placed_programs import Array, Given, Program, module, run, session_of
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report

MESHES = (Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 4}))
PROGRAMS = 16
STEPS = 9
EXTENTS = (1, 2, 3, 4, 5, 6, 8)


@dataclass
class Step:
    """What a value is made of: earlier ones, by their numbers."""

    name: str
    of: tuple[int, ...]
    relax: Callable[..., relax.Expr]
    numpy: Callable[..., Array]


UNARY: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "relu": (op.nn.relu, lambda x: np.maximum(x, 0)),
    "cos": (op.cos, np.cos),
    "sigmoid": (op.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (op.tanh, np.tanh),
    "negative": (op.negative, np.negative),
}
BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (op.add, np.add),
    "subtract": (op.subtract, np.subtract),
    "multiply": (op.multiply, np.multiply),
    "maximum": (op.maximum, np.maximum),
}


def softmax(x: Array) -> Array:
    exponential = np.exp(x - x.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


class Generator:
    """Makes one program, step by step; steps that the pass refuses are left out."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        self.random = Random(seed)
        self.mesh = mesh
        a, b, c = (self.random.choice(EXTENTS) for _ in range(3))
        self.shapes: list[tuple[int, ...]] = [(a, b), (b, c), (c,), (2, a, b), (a, b)]
        self.given = [self._given(shape, partial=True) for shape in self.shapes]
        self.arrays = [np.zeros(shape) for shape in self.shapes]
        self.steps: list[Step] = []
        self.refused: Counter[str] = Counter()
        for _ in range(STEPS):
            step = self._step()
            if step is not None and self._accepts([*self.steps, step], self._wanted([None])):
                self.steps.append(step)
                self.arrays.append(step.numpy(*(self.arrays[k] for k in step.of)))
        last = self._given(self.arrays[-1].shape, partial=True)
        wanted = self._wanted([last])
        self.wanted = wanted if self._accepts(self.steps, wanted) else self._wanted([None])

    def program(self) -> Program:
        return self._program(self.steps, self.wanted)

    def _wanted(self, last: list[Given | None]) -> list[Given | None]:
        return [None, *last]

    def _program(self, steps: list[Step], wanted: list[Given | None]) -> Program:
        def relax_of(*xs: Any) -> list[relax.Expr]:
            values = list(xs)
            for step in steps:
                made = step.relax(*(values[k] for k in step.of))
                values.append(relax.BlockBuilder.current().emit(made))
            # No place makes them: where nothing is said they are replicated.
            return [op.negative(values[k]) for k in (len(values) // 2, -1)]

        def numpy_of(*xs: Array) -> list[Array]:
            values = list(xs)
            for step in steps:
                values.append(step.numpy(*(values[k] for k in step.of)))
            return [-values[k] for k in (len(values) // 2, -1)]

        return Program(relax_of, self.given, list(self.shapes), wanted, numpy_of)

    def _accepts(self, steps: list[Step], wanted: list[Given | None]) -> bool:
        try:
            LowerPlacements()(module(self.mesh, {"main": self._program(steps, wanted)}))
        except TransformError as error:
            assert "place" in str(error), "a refusal says what to write"
            self.refused[steps[-1].name if steps else "result"] += 1
            return False
        return True

    def _given(self, shape: tuple[int, ...], partial: bool) -> Given:
        axes = list(range(len(shape)))
        self.random.shuffle(axes)
        given: Given = {}
        for name in self.mesh.axes:
            choices: list[Placement] = [Replica()]
            choices += [Shard(axes.pop())] * 2 if axes else []
            choices += [Partial()] if partial else []
            given[name] = self.random.choice(choices)
        return given

    def _step(self) -> Step | None:
        random, arrays = self.random, self.arrays
        kinds = ("unary", "binary", "matmul", "permute", "reshape", "softmax", "sum", "place")
        kind = random.choices(kinds, (2, 3, 4, 1, 2, 1, 1, 2))[0]
        k = random.choice([*range(len(arrays)), len(arrays) - 1, len(arrays) - 1])
        shape = arrays[k].shape
        if kind == "unary":
            name = random.choice(list(UNARY))
            return Step(name, (k,), *UNARY[name])
        if kind == "place":
            given = self._given(shape, partial=True)
            return Step("place", (k,), lambda x: place(x, self.mesh, given), lambda x: x)
        if kind == "softmax" and shape:
            return Step("softmax", (k,), lambda x: op.nn.softmax(x), softmax)
        if kind == "sum" and shape:
            axis = random.randrange(len(shape))
            keep = random.random() < 0.5
            return Step(
                "sum",
                (k,),
                lambda x: op.sum(x, axis=axis, keepdims=keep),
                lambda x: x.sum(axis, keepdims=keep),
            )
        if kind == "permute" and shape:
            order = random.sample(range(len(shape)), len(shape))
            return Step(
                "permute",
                (k,),
                lambda x: op.permute_dims(x, order),
                lambda x: x.transpose(order),
            )
        if kind == "reshape" and shape:
            new = self._reshaped(shape)
            return Step("reshape", (k,), lambda x: op.reshape(x, new), lambda x: x.reshape(new))
        if kind == "binary":
            others = [j for j, x in enumerate(arrays) if _fits(shape, x.shape)]
            name = random.choice(list(BINARY))
            return Step(name, (k, random.choice(others)), *BINARY[name])
        if kind == "matmul" and shape:
            others = [j for j, x in enumerate(arrays) if _multiplies(shape, x.shape)]
            if others:
                return Step("matmul", (k, random.choice(others)), op.matmul, np.matmul)
        return None

    def _reshaped(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self.random.randrange(len(shape))
        if self.random.random() < 0.5 and axis + 1 < len(shape):
            return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
        divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
        divisor = self.random.choice(divisors)
        return (*shape[:axis], divisor, shape[axis] // divisor, *shape[axis + 1 :])


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        return len(np.broadcast_shapes(one, other)) <= 4
    except ValueError:
        return False


def _multiplies(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        return np.matmul(np.zeros(one), np.zeros(other)).ndim in (1, 2, 3, 4)
    except ValueError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_programs(mesh: Mesh, request: pytest.FixtureRequest) -> None:
    """By default the functions of one module for each mesh."""
    count = max(PROGRAMS, request.config.getoption("--programs") // len(MESHES))
    kinds: Counter[str] = Counter()
    for first in range(0, count, PROGRAMS):
        kinds += check(mesh, range(first, first + PROGRAMS))
    wanted = {"allgather", "all_to_all", "allreduce", "reduce_scatter", "take_shard"}
    assert wanted <= kinds.keys(), "the programs are of interest"


def check(mesh: Mesh, seeds: range) -> Counter[str]:
    """Raise an error where a program is wrong; return the kinds of collectives."""
    generators = {f"f{seed}": Generator(seed, mesh) for seed in seeds}
    programs = {name: one.program() for name, one in generators.items()}
    with collect_report() as report:
        LowerPlacements()(module(mesh, programs))
    assert sum(len(one.steps) for one in generators.values()) > PROGRAMS * STEPS / 2
    with session_of(mesh) as session:
        run(session, mesh, programs)
    return Counter(one.subject.split()[0] for one in report.decisions)
