# SPDX-License-Identifier: Apache-2.0
"""Random programs whose branches make the same collectives, and mutants of them.

    python -m pytest tests/end_to_end/test_random_branches.py --programs 2000 --mutants 1000

is the long run. Ranks take different branches by their number, or by an argument. The programs are
compiled, verified, and run against NumPy. Of their planned modules mutants are made: a collective
less, two in another order, another reduction, a barrier less in one branch, a tensor where another
one is. What each mutant does is also run without workers, at sizes that tell symbolic ones apart:
the verifier has to find each that is wrong.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
import tvm_ipc.pipeline
from tests.end_to_end.mutations import aliases, mutants, other_kinds, swaps
from tests.end_to_end.random_branches import BranchProgram
from tests.end_to_end.schedules import wrongs
from tests.runtime.tensors_of_ranks import write_each
from tvm_ipc.transform import VerifyCrossRankSafety, verify_cross_rank_safety

BUDGETS = (None, None, 1 << 30, 0, 3000)
SIZES = ({"n": 2, "m": 5}, {"n": 7, "m": 3}, {"n": 0, "m": 1})
#: Of each program, at most.
MUTANTS = 6


def planned(
    program: BranchProgram, budget: int | None, *, compiled: bool = False
) -> tuple[tvm.IRModule, Any]:
    """Return what is verified of a program, and the executable where it is to be compiled."""
    kept: list[tvm.IRModule] = []

    @tvm.transform.module_pass(opt_level=0, name="Keep")
    class Keep:
        def __init__(self, **workers: int) -> None:
            self.check = VerifyCrossRankSafety(refuse_unknown=True, **workers)

        def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
            kept.append(mod)
            return self.check(mod)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm_ipc.pipeline, "VerifyCrossRankSafety", Keep)
        pipeline = tvm_ipc.get_pipeline("llvm", program.world, blas=False, barrier_budget=budget)
        if compiled:
            executable = tvm.compile(program.module, "llvm", relax_pipeline=pipeline)
            return kept[0], executable
        pipeline(program.module)
    return kept[0], None


def programs(seed: int) -> BranchProgram:
    return BranchProgram(seed, 2 + seed % 3, by_rank=seed % 2 == 0, ifs=(1, 2, 3, 5)[seed % 4])


@pytest.fixture(scope="module")
def sessions() -> Iterator[Any]:
    opened: dict[int, Any] = {}

    def get(workers: int) -> Any:
        if workers not in opened or not opened[workers].usable:
            opened[workers] = tvm_ipc.Session(workers, threads=True, timeout=30)
        return opened[workers]

    yield get
    for session in opened.values():
        session.close()


def check(program: BranchProgram, session: Any) -> None:
    """Raise an error where a program is refused, or gives what NumPy does not."""
    _, executable = planned(program, BUDGETS[program.seed % len(BUDGETS)], compiled=True)
    main = session.load_vm_module(executable)["main"]
    for round_, sizes in enumerate((*SIZES, {"n": 3, "m": 3})):
        given = program.arguments(sizes, round_)
        conditions = program.conditions(round_)
        buffers = [session.empty(arrays[0].shape, str(arrays[0].dtype)) for arrays in given]
        buffers.append(session.empty((), "bool"))
        for buffer, arrays in zip(buffers, [*given, map(np.array, conditions)], strict=True):
            write_each(buffer, arrays)
        found = main(*buffers)
        wanted = program.wanted(given, conditions)
        for rank in range(program.world):
            results = found.debug_get_from_remote(rank)
            for k, group in enumerate(wanted):
                for j, one in enumerate(group):
                    where = f"rank {rank}, if {k}, collective {j}, {sizes}"
                    np.testing.assert_array_equal(results[k][j].numpy(), one[rank], where)


@pytest.mark.slow
def test_ranks_take_different_branches(sessions: Any, request: pytest.FixtureRequest) -> None:
    """By default 24 programs, on 2 to 4 workers."""
    for seed in range(request.config.getoption("--programs")):
        program = programs(seed)
        try:
            check(program, sessions(program.world))
        except Exception as error:
            pytest.fail(f"program {seed}: {error}\n{program.source()}")


def drawn_mutants(seed: int) -> tuple[BranchProgram, list[tuple[str, tvm.IRModule]]]:
    """Return a program, and mutants of it of each sort."""
    program, rng = programs(seed), random.Random(seed)
    mod, _ = planned(program, BUDGETS[seed % len(BUDGETS)])
    assert outcome(program, mod)[0] == "right"
    sorts = [list(mutants(mod)), list(swaps(mod)), list(other_kinds(mod)), list(aliases(mod, rng))]
    drawn = []
    for sort in sorts:
        rng.shuffle(sort)
    for row in range(MUTANTS):
        drawn += [sort[row] for sort in sorts if row < len(sort)]
    return program, drawn[:MUTANTS]


def outcome(program: BranchProgram, mutant: tvm.IRModule) -> tuple[str, str]:
    """Return what the verifier makes of a mutant, and what is wrong with it.

    "refused" is one with which nothing is wrong at the sizes that are tried.
    """
    world = program.world
    choices = [(True,) * world]
    if not program.by_rank:
        some = tuple(rank % 2 == 0 for rank in range(world))
        choices += [some, tuple(not one for one in some)]
    found = verify_cross_rank_safety(mutant, world_size=world)
    wrong = [one for sizes in SIZES for one in wrongs(mutant, world, sizes, choices)]
    if not wrong:
        return ("refused" if any(not one.unknown for one in found) else "right"), ""
    if not found:
        return "missed", wrong[0]
    return "unknown" if all(one.unknown for one in found) else "caught", wrong[0]


@pytest.mark.slow
def test_mutants_are_found(request: pytest.FixtureRequest) -> None:
    """By default 60 mutants of 10 programs."""
    counts: Counter[str] = Counter()
    seed = request.config.getoption("--first-graph")
    wanted = request.config.getoption("--mutants")
    misses = []
    while sum(counts.values()) < wanted:
        program, drawn = drawn_mutants(seed)
        for what, mutant in drawn:
            result, wrong = outcome(program, mutant)
            counts[result] += 1
            if result == "missed":
                misses.append(f"program {seed}, {what}: {wrong}")
        seed += 1
    print(dict(counts), f"next seed {seed}", file=sys.stderr)
    assert not misses, "\n".join(misses)
    assert counts["caught"] > 0
