# SPDX-License-Identifier: Apache-2.0
"""Random graphs for all ranks with random placements, against the same as TVM compiles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.end_to_end.placed_programs import Array, Given, Program, module, run, session_of
from tests.end_to_end.random_graphs import EXTENTS, LARGEST, Dims, Step, draw_step, make
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report

MESHES = (Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 4}))
PROGRAMS = 16
STEPS = 9


class Generator:
    """Makes one program, step by step; steps that the pass refuses are left out."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        self.random = Random(seed)
        self.mesh = mesh
        a, b, c = (self.random.choice(EXTENTS) for _ in range(3))
        self.params: list[Dims] = [(a, b), (b, c), (c,), (2, a, b), (a, b)]
        self.given = [self._given(shape) for shape in self.params]
        self.dims = list(self.params)
        self.steps: list[Step] = []
        for _ in range(STEPS):
            step = self._step()
            dims = None if step is None else self._accepted([*self.steps, step], None)
            if step is not None and dims is not None and np.prod(dims) <= LARGEST:
                self.steps.append(step)
                self.dims.append(dims)
        last = self._given(self.dims[-1])
        self.wanted = last if self._accepted(self.steps, last) is not None else None

    def program(self, numpy: Callable[..., Sequence[Array]]) -> Program:
        return self._program(self.steps, self.wanted, numpy)

    def _program(
        self, steps: list[Step], wanted: Given | None, numpy: Callable[..., Sequence[Array]]
    ) -> Program:
        def results(*xs: Any) -> list[relax.Expr]:
            return self._results(steps, xs, placed=True)

        # A tensor without a placement is replicated.
        return Program(results, self.given, list(self.params), [None, wanted], numpy)

    def _results(self, steps: list[Step], xs: Sequence[Any], *, placed: bool) -> list[relax.Expr]:
        builder, values = relax.BlockBuilder.current(), list(xs)
        for step in steps:
            of = [values[k] for k in step.of]
            if step.operator != "place":
                values.append(make(builder, step, of))
            else:
                values.append(builder.emit(place(*of, self.mesh, *step.given)) if placed else of[0])
        return [op.negative(values[k]) for k in (len(values) // 2, -1)]

    def add_whole(self, builder: relax.BlockBuilder, name: str) -> None:
        """Add the program of one rank that has everything."""
        params = [
            relax.Var(f"p{k}", relax.TensorType(dims, "float32"))
            for k, dims in enumerate(self.params)
        ]
        with builder.function(name, params):
            with builder.dataflow():
                results = map(builder.emit, self._results(self.steps, params, placed=False))
                out = builder.emit_output(relax.Tuple(list(results)))
            builder.emit_func_output(out)

    def _accepted(self, steps: list[Step], wanted: Given | None) -> Dims | None:
        """Return the extents of the last value, None if the pass refuses the program."""
        made = module(self.mesh, {"main": self._program(steps, wanted, lambda *_: [])})
        try:
            LowerPlacements()(made)
        except TransformError as error:
            assert "place" in str(error), "a refusal says what to write"
            return None
        return tuple(int(extent) for extent in made["main"].ret_ty.fields[-1].shape)

    def _given(self, shape: Dims) -> Given:
        axes = list(range(len(shape)))
        self.random.shuffle(axes)
        given: Given = {}
        for name in self.mesh.axes:
            choices: list[Placement] = [Replica(), Partial()]
            choices += [Shard(axes.pop())] * 2 if axes else []
            given[name] = self.random.choice(choices)
        return given

    def _step(self) -> Step | None:
        if self.random.random() < 0.3:
            k = self.random.randrange(len(self.dims))
            return Step("place", (k,), (self._given(self.dims[k]),))
        return draw_step(self.random, self.dims)


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
    builder = relax.BlockBuilder()
    for name, one in generators.items():
        one.add_whole(builder, name)
    whole = relax.VirtualMachine(tvm.compile(builder.get(), FAST_TO_COMPILE), tvm.cpu())

    def by_tvm(name: str) -> Callable[..., Sequence[Array]]:
        function = whole[name]
        return lambda *xs: [one.numpy() for one in function(*map(tvm.runtime.tensor, xs))]

    programs = {name: one.program(by_tvm(name)) for name, one in generators.items()}
    with collect_report() as report:
        LowerPlacements()(module(mesh, programs))
    assert sum(len(one.steps) for one in generators.values()) > PROGRAMS * STEPS / 2
    with session_of(mesh) as session:
        run(session, mesh, programs)
    return Counter(one.subject.split()[0] for one in report.decisions)
