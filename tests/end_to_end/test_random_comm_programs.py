# SPDX-License-Identifier: Apache-2.0
"""Random chains of collectives along the axes of random meshes, checked, and run against NumPy.

    python -m pytest tests/end_to_end/test_random_comm_programs.py --programs 500

is the long run. Teams alternate, so a meeting of one of them proves nothing of what another one
reads; ranks are late before any kernel and any collective, and each program runs again and again.
A third of them post collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from happens_before import races
from harness import AddDelays
from random_comm import ROWS, Program

import tvm_ipc
import tvm_ipc.pipeline
from tvm_ipc.comm import KINDS
from tvm_ipc.transform import VerifyCrossRankSafety, collect_report, verify_cross_rank_safety

ROUNDS = 3
STEPS = (4, 8, 16, 24)
#: Of each world, beside what the option --programs says.
WORLDS = (1, 2, 3, 4, 5, 6)


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


def check(session: Any, program: Program, planned: list[tvm.IRModule], **options: Any) -> list[str]:
    """Raise an error where a program is not right; return what was decided of its collectives."""
    pipeline = tvm_ipc.get_pipeline("llvm", program.world, blas=False, **options)
    with collect_report() as report:
        executable = tvm.compile(program.module, "llvm", relax_pipeline=pipeline)
    mod = planned.pop()
    assert verify_cross_rank_safety(mod) == []
    sizes = ROWS if program.symbolic else (program.rows,)
    for rows in sizes:
        assert races(mod, program.world, rows) == []
    main = session.load_vm_module(executable)["main"]
    reset = session.get_global_func("tests.race_reset")
    for round_ in range(ROUNDS):
        for rows in sizes:
            program.again(round_, rows)
            arguments = []
            for parameter in program.parameters:
                arrays = parameter.arrays(rows)
                arguments.append(session.empty(arrays[0].shape, program.dtype))
                for rank, array in enumerate(arrays):
                    arguments[-1].debug_copy_from(rank, array)
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


@pytest.fixture(scope="module", params=WORLDS)
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tvm_ipc.Session(request.param, threads=True, timeout=60) as session:
        session.import_python_module("race_worker")
        yield session


def test_random_programs(
    session: Any, delayed: list[tvm.IRModule], request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--programs") // len(WORLDS)
    world = session.num_workers
    kinds: set[str] = set()
    verdicts: set[str] = set()
    for seed in range(count):
        program = Program(seed, world, STEPS[seed % len(STEPS)])
        kinds |= program.kinds
        try:
            options = {
                "barrier_budget": (None, 1 << 30)[seed % 2],
                "post_collectives": seed % 3 == 2,
            }
            verdicts |= {*check(session, program, delayed, **options)}
        except Exception as error:
            pytest.fail(f"program {seed} of {world} ranks: {error}\n{program.module.script()}")
    if count > 30:
        assert kinds == set(KINDS) - ({"send_recv"} if world == 1 else set())
        assert verdicts >= {"barrier left out", "posted"}
