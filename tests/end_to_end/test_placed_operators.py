# SPDX-License-Identifier: Apache-2.0
"""Every operator that has a rule, on parts of random tensors, against the same operator on all."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.end_to_end.operator_cases import CASES, Case, Draw, Drawn
from tests.end_to_end.placed_programs import Given, compare, cut, put, session_of
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.spmd.rules.operator_rule_table import RULES

PAIR = Mesh({"tp": 2})
MESHES = (Mesh({"dp": 2, "tp": 2}, [2, 0, 3, 1]), Mesh({"tp": 3}))
#: Half of the time would go into optimizing kernels that run once.
FAST_TO_COMPILE = tvm.target.Target({"kind": "llvm", "opt-level": 0})
TRIES = 400


def add(
    builder: relax.BlockBuilder,
    name: str,
    drawn: Drawn,
    mesh: Mesh,
    given: list[Given] | None,
    wanted: Given,
) -> None:
    """Add a function for all ranks, or, given no places, one that works on whole tensors."""
    params = [
        relax.Var(f"p{k}", relax.TensorType(one.shape, one.dtype))
        for k, one in enumerate(drawn.params)
    ]
    with builder.function(name, params):
        with builder.dataflow():
            xs = params
            if given is not None:
                xs = [
                    builder.emit(place(x, mesh, one)) for x, one in zip(params, given, strict=True)
                ]
            made = builder.emit(drawn.make(*xs))
            fields = [made]
            if isinstance(made.ty, relax.TupleType):
                fields = [
                    builder.emit(relax.TupleGetItem(made, k)) for k in range(len(made.ty.fields))
                ]
            if given is not None:
                fields = [
                    builder.emit(place(x, mesh, wanted)) if fits(wanted, int(x.ty.ndim)) else x
                    for x in fields
                ]
            out = builder.emit_output(relax.Tuple(fields))
        builder.emit_func_output(out)


def fits(wanted: Given, ndim: int) -> bool:
    """Whether a result has the axis along which it is to be divided."""
    return bool(wanted) and all(one.axis < ndim for one in wanted.values())


def module(drawn: Drawn, mesh: Mesh, given: list[Given], wanted: Given) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    add(builder, "main", drawn, mesh, given, wanted)
    return builder.get()


def accepted(drawn: Drawn, mesh: Mesh, given: list[Given], wanted: Given) -> bool:
    try:
        LowerPlacements()(module(drawn, mesh, given, wanted))
    except TransformError as error:
        assert "place" in str(error), "a refusal says what to write"
        return False
    return True


def placements(
    random: Random, mesh: Mesh, drawn: Drawn, operand: int, partial: bool
) -> dict[str, Placement]:
    one = drawn.params[operand]
    axes = list(range(len(one.shape)))
    random.shuffle(axes)
    found: dict[str, Placement] = {}
    for name in mesh.axes:
        choices: list[Placement] = [Replica()]
        choices += [Shard(axes.pop())] * 2 if axes else []
        choices += [Partial()] if partial and "float" in one.dtype else []
        found[name] = random.choice(choices)
    return found


def draw_placed(case: Case, seed: int, mesh: Mesh) -> tuple[Drawn, list[Given], Given] | None:
    """Return a random call, of which something is divided, and where its tensors lie."""
    random = Random(seed)
    for attempt in range(10 * TRIES):
        drawn = case.draw(Draw(seed * TRIES + attempt))
        given = [placements(random, mesh, drawn, k, case.partial) for k in range(len(drawn.params))]
        if not any(isinstance(one, Shard) for of in given for one in of.values()):
            continue
        wanted: Given = {}
        if random.random() < 0.6:
            wanted = {random.choice(list(mesh.axes)): Shard(random.choice((0, 0, 1)))}
        if accepted(drawn, mesh, given, wanted):
            return drawn, given, wanted
    return None


def test_every_rule_has_a_case() -> None:
    assert {name for case in CASES for name in case.names} == RULES.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.names[0] + "-" + case.draw.__name__)
def test_axes_that_may_be_divided(case: Case) -> None:
    drawn = case.draw(Draw(0, even=True))
    found = [
        "".join(
            str(axis)
            for axis in range(len(one.shape))
            if accepted(
                drawn,
                PAIR,
                [{"tp": Shard(axis)} if k == j else {} for j in range(len(drawn.params))],
                {},
            )
        )
        for k, one in enumerate(drawn.params)
    ]
    assert found == list(case.parts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_of_random_tensors(mesh: Mesh, pytestconfig: pytest.Config) -> None:
    rounds = pytestconfig.getoption("--operator-rounds")
    chosen = pytestconfig.getoption("--operator")
    with session_of(mesh) as session:
        for first in range(0, rounds, 2):
            calls = {}
            for case in CASES:
                if chosen and chosen not in case.names:
                    continue
                for seed in range(first, min(first + 2, rounds)):
                    one = draw_placed(case, seed, mesh)
                    if one is not None:
                        calls[f"f{len(calls)}"] = (case, seed, *one)
            count = Counter(case.draw.__name__ for case, *_ in calls.values())
            missing = {c.draw.__name__ for c in CASES if not chosen} - count.keys()
            assert not missing, "something of each may be divided"
            run(session, mesh, calls)


def run(session: Any, mesh: Mesh, calls: dict[str, Any]) -> None:
    builder = relax.BlockBuilder()
    for name, (_, _, drawn, given, wanted) in calls.items():
        add(builder, name, drawn, mesh, given, wanted)
        add(builder, f"{name}_whole", drawn, mesh, None, wanted)
    pipeline = tvm_ipc.get_pipeline("llvm", len(mesh.ranks))
    executable = tvm.compile(builder.get(), FAST_TO_COMPILE, relax_pipeline=pipeline)
    loaded = session.load_vm_module(executable)
    for name, (case, seed, drawn, given, wanted) in calls.items():
        random = np.random.default_rng(seed)
        wholes = [one.values(random) for one in drawn.params]
        parts = []
        for whole, one in zip(wholes, given, strict=True):
            of_ranks = cut(mesh, whole, one, _Exact(random))
            if not whole.shape:  # of which NumPy makes a vector
                of_ranks = {rank: part.reshape(()) for rank, part in of_ranks.items()}
            parts.append(of_ranks)
        found = loaded[name](*(put(session, one) for one in parts))
        replicas = [dict.fromkeys(mesh.ranks, whole) for whole in wholes]
        whole = loaded[f"{name}_whole"](*(put(session, one) for one in replicas))
        results = {rank: found.debug_get_from_remote(rank) for rank in mesh.ranks}
        right = whole.debug_get_from_remote(mesh.ranks[0])
        where = f"{case.names}, round {seed}, {drawn.params} as {given}, wanted {wanted}"
        for k, one in enumerate(right):
            ranks = {rank: np.array(results[rank][k].numpy()) for rank in mesh.ranks}
            whole_one = np.array(one.numpy())
            placed = wanted if fits(wanted, whole_one.ndim) else {}
            compare(mesh, ranks, whole_one, placed, f"{where}, result {k}")


class _Exact:
    """Parts of sums that are added without rounding."""

    def __init__(self, random: Any) -> None:
        self.random = random

    def uniform(self, _low: float, _high: float, shape: Any) -> Any:
        return self.random.integers(-16, 16, shape) / 8
