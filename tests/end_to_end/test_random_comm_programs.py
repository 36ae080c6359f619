# SPDX-License-Identifier: Apache-2.0
"""Random programs that communicate, checked, and run against NumPy: each right, and less one thing.

    python -m pytest tests/end_to_end/test_random_comm_programs.py --programs 500

is the long run. There are chains of collectives along the axes of random meshes, called and posted,
and programs with works, shows, messages and branches. Teams alternate, so a meeting of one of them
proves nothing of what another one reads; ranks are late before any kernel and any collective, and
each program runs again and again.

What each rank does, and when, is also run without workers. That tells whether a program is wrong
from which a wait, a meeting, or a collective of one branch was taken: the check has to find each
that is.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
import tvm_ipc.pipeline
from tests.end_to_end.harness import AddDelays
from tests.end_to_end.mutations import mutants
from tests.end_to_end.overlap_cases import Case
from tests.end_to_end.random_comm import ROWS, Program
from tests.end_to_end.random_host import HostProgram
from tests.end_to_end.schedules import wrongs
from tests.runtime.tensors_of_ranks import put_each, write_each
from tvm_ipc.comm import KINDS
from tvm_ipc.transform import VerifyCrossRankSafety, collect_report, verify_cross_rank_safety

ROUNDS = 3
STEPS = (4, 8, 16, 24)
#: Of each world, beside what the option --programs says.
WORLDS = (1, 2, 3, 4, 5, 6)
PROGRAMS_OF_SESSION = 40


#: Of each program, in the short run.
MUTANTS = 5
#: Found or not, and wrong or not: a program from which something was taken.
Outcome = tuple[bool, bool]


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> list[tvm.IRModule]:
    """Have programs that are late; return, for those that are compiled, what is planned."""
    planned: list[tvm.IRModule] = []

    @tvm.transform.module_pass(opt_level=0, name="KeepAndDelay")
    class KeepAndDelay:
        def __init__(self, **workers: int) -> None:
            self.check = VerifyCrossRankSafety(**workers)

        def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
            planned.append(mod)
            return AddDelays()(self.check(mod))

    monkeypatch.setattr(tvm_ipc.pipeline, "VerifyCrossRankSafety", KeepAndDelay)
    return planned


def findings(mod: tvm.IRModule, world: int) -> set[tuple[Any, ...]]:
    hazards = verify_cross_rank_safety(mod, world_size=world)
    return {(one.kind, one.memory, one.binding, one.unknown) for one in hazards}


def mutate(
    mod: tvm.IRModule, world: int, rows: int, seed: int, most: int | None
) -> Counter[Outcome]:
    """Take one thing after the other from a program; the check finds what is wrong then."""
    found: Counter[Outcome] = Counter()
    known = findings(mod, world)
    assert all(unknown for *_, unknown in known)
    assert wrongs(mod, world, rows) == []
    taken = list(mutants(mod))
    if most is not None and len(taken) > most:
        few = most // 2
        taken = taken[:few] + random.Random(seed).sample(taken[few:], most - few)
    for what, mutant in taken:
        is_found, wrong = bool(findings(mutant, world) - known), wrongs(mutant, world, rows)
        assert is_found or not wrong, f"without {what}: {wrong[0]}, which the check does not find"
        found[is_found, bool(wrong)] += 1
    return found


def check(
    session: Any, program: Program, planned: list[tvm.IRModule], most: int | None, **options: Any
) -> list[str]:
    """Raise an error where a program is not right; return what was decided of its collectives."""
    pipeline = tvm_ipc.get_pipeline("llvm", program.world, blas=False, **options)
    with collect_report() as report:
        executable = tvm.compile(program.module, "llvm", relax_pipeline=pipeline)
    mod = planned.pop()
    assert verify_cross_rank_safety(mod) == []
    sizes = ROWS if program.symbolic else (program.rows,)
    for rows in sizes if not options["async_collectives"] else ():
        assert wrongs(mod, program.world, rows) == []
    mutate(mod, program.world, sizes[-1], program.seed, most)
    main = session.load_vm_module(executable)["main"]
    reset = session.get_global_func("tests.race_reset")
    for round_ in range(ROUNDS):
        for rows in sizes:
            program.again(round_, rows)
            arguments = []
            for parameter in program.parameters:
                arrays = parameter.arrays(rows)
                arguments.append(put_each(session, arrays))
            reset(program.seed + round_)
            found = main(*arguments)
            for rank in range(program.world):
                parts = found.debug_get_from_remote(rank)
                for part, value in zip(parts, program.results, strict=True):
                    wanted = value.arrays(rows)[rank]
                    if wanted is not None:
                        where = f"rows {rows}, rank {rank}, {value.var.name}"
                        np.testing.assert_array_equal(part.numpy(), wanted, where)
    return [one.verdict for one in report.decisions]


class Sessions:
    """Sessions of some workers, each for some programs: a rank may be in 126 teams of it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._opened: Any = None

    def of(self, seed: int) -> Any:
        """Return the session for the program with this seed."""
        if self._opened is None or seed % PROGRAMS_OF_SESSION == 0:
            self.close()
            self._opened = tvm_ipc.Session(self.world, threads=True, timeout=60)
            self._opened.import_python_module("tests.end_to_end.race_worker")
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


@pytest.fixture(scope="module", params=WORLDS)
def sessions(request: pytest.FixtureRequest) -> Iterator[Sessions]:
    sessions = Sessions(request.param)
    yield sessions
    sessions.close()


@pytest.mark.slow
def test_random_programs(
    sessions: Sessions, delayed: list[tvm.IRModule], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--programs") // len(WORLDS)
    world = sessions.world
    kinds: set[str] = set()
    verdicts: set[str] = set()
    for seed in range(count):
        program = Program(seed, world, STEPS[seed % len(STEPS)])
        kinds |= program.kinds
        try:
            options = {
                "barrier_budget": (None, 1 << 30)[seed % 2],
                "async_collectives": seed % 3 == 2,
            }
            most = MUTANTS if count < 30 else None
            verdicts |= {*check(sessions.of(seed), program, delayed, most, **options)}
        except Exception as error:
            pytest.fail(f"program {seed} of {world} ranks: {error}\n{program.module.script()}")
    if count > 30:
        assert kinds == set(KINDS) - ({"send_recv"} if world == 1 else set())
        assert verdicts >= {"barrier left out", "asynchronous"}


def check_host(
    session: Any,
    program: HostProgram,
    planned: list[tvm.IRModule],
    budget: int | None,
    most: int | None,
) -> Counter[Outcome]:
    """Raise an error where a program is not right, with its condition true and false."""
    world = program.world
    pipeline = tvm_ipc.get_pipeline("llvm", world, barrier_budget=budget, blas=False)
    executable = tvm.compile(program.module, "llvm", relax_pipeline=pipeline)
    outcomes = mutate(planned.pop(), world, 0, program.seed, most)
    main = session.load_vm_module(executable)["main"]
    reset = session.get_global_func("tests.race_reset")
    for round_ in range(ROUNDS):
        given = program.arguments(round_)
        buffers = [session.empty(arrays[0].shape, "int32") for arrays in given]
        for condition in (True, False):
            for buffer, arrays in zip(buffers, given, strict=True):
                write_each(buffer, arrays)
            reset(program.seed + round_)
            found = main(*buffers, session.put(np.array(condition)))
            wanted = program.wanted(given, condition)
            for rank in range(world):
                parts = found.debug_get_from_remote(rank)
                for part, arrays in zip(parts, wanted, strict=True):
                    where = f"condition {condition}, rank {rank}"
                    np.testing.assert_array_equal(part.numpy(), arrays[rank], where)
    return outcomes


@pytest.mark.slow
def test_random_host_programs(
    sessions: Sessions, delayed: list[tvm.IRModule], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--programs") // len(WORLDS)
    world = sessions.world
    made_of: set[str] = set()
    outcomes: Counter[Outcome] = Counter()
    for seed in range(count):
        program = HostProgram(seed, world, (6, 12, 20)[seed % 3])
        made_of |= program.made_of
        try:
            how = (None, 1 << 30)[seed % 2], MUTANTS if count < 30 else None
            outcomes += check_host(sessions.of(seed), program, delayed, *how)
        except Exception as error:
            pytest.fail(f"program {seed} of {world} ranks: {error}\n{program.module.script()}")
    if count > 30:
        assert made_of >= {
            "wait",
            "release",
            "peer_view",
            "if of all",
            "if of ranks",
            "start of permute",
        }
        assert world == 1 or "message" in made_of
        assert min(outcomes[True, True], outcomes[False, False]) > 0


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        *(("allgather", 1), ("allgather", 3)),
        *(("reduce_scatter", 1), ("reduce_scatter", 3), ("allreduce", 3)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_products_that_overlap(
    ranks: int, kind: str, chunks: int, delayed: list[tvm.IRModule]
) -> None:
    """Programs that `OverlapCommunication` makes; test_overlap.py runs them."""
    case = Case(kind, ranks, 12, 16, 16)
    tvm_ipc.get_pipeline("llvm", ranks, overlap=chunks, blas=False)(case.module())
    outcomes = mutate(delayed.pop(), ranks, 0, 0, None)
    assert outcomes[True, True] > 0
