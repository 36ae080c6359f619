# SPDX-License-Identifier: Apache-2.0
"""Random programs through our pipeline, run by real workers, give what NumPy gives.

    python -m pytest tests/end_to_end/test_random_programs.py --programs 2000

is the long run. A program that fails is made smaller, and the message says how to run it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
import tvm_ipc.pipeline
from tests.collective_results import RESULTS
from tests.end_to_end.harness import (
    ROWS,
    AddDelays,
    Program,
    WrongProgramError,
    build,
    check_plan,
    run,
)
from tvm_ipc.transform import VerifyCrossRankSafety

BATCH = 8
SIZES = (4, 8, 12, 20)
KINDS = {"2": (2, 1), "3": (3, 1), "4/2": (4, 2)}


@pytest.fixture(scope="module")
def sessions() -> Iterator[Callable[[str], Any]]:
    opened: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in opened or not opened[kind].usable:
            workers, groups = KINDS[kind]
            opened[kind] = tvm_ipc.Session(workers, num_groups=groups, timeout=60)
            opened[kind].import_python_module("tests.end_to_end.race_worker")
        return opened[kind]

    yield get
    for session in opened.values():
        session.close()


def options(seed: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """How the programs of a batch are built, and which sizes they run with."""
    rng = random.Random(seed)
    chosen = {
        "allreduce_strategy": rng.choice(("auto", "auto", "oneshot", "twoshot", "default")),
        "barrier_budget": rng.choice((None, None, 0, 1 << 30)),
        "blas": False if rng.random() < 0.5 else None,
    }
    return chosen, tuple(rng.sample(ROWS, 2))


def check(session: Any, programs: list[Program], path: Path) -> None:
    """Raise an error if any of the programs is not right in every way."""
    number = programs[0].seed // BATCH
    chosen, rows = options(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm_ipc.pipeline, "VerifyCrossRankSafety", verify_and_delay)
        kept = build(programs, path, **chosen)
    check_plan(programs, kept)
    session.get_global_func("tests.race_reset")(number if number % 3 else -1)
    run(session, programs, path, rows)


def verify_and_delay(**workers: int) -> tvm.transform.Pass:
    return tvm.transform.Sequential([VerifyCrossRankSafety(**workers), AddDelays()])


def fails(kind: str, sessions: Any, seed: int, size: int, path: Path) -> str | None:
    """Return how a program fails alone, None if it does not."""
    try:
        check(sessions(kind), [Program(seed, size, *KINDS[kind])], path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def smallest(kind: str, sessions: Any, seed: int, size: int, path: Path) -> str:
    """Say how a program fails with the fewest statements, and how to see that again."""
    for fewer in range(1, size + 1):
        how = fails(kind, sessions, seed, fewer, path.with_suffix(f".{fewer}.so"))
        if how is not None:
            return (
                f"{how}\n{Program(seed, fewer, *KINDS[kind]).source()}\nrun it again: "
                "python -m pytest tests/end_to_end/test_random_programs.py "
                f"--program-seed {seed} --program-size {fewer} --program-ranks {kind}"
            )
    return f"program {seed} of size {size} fails only together with others"


@pytest.mark.parametrize("kind", ["2", pytest.param("3", marks=pytest.mark.slow), "4/2"])
def test_random_programs(
    kind: str,
    sessions: Callable[[str], Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = request.config.getoption
    if given("--program-seed") is not None:
        if given("--program-ranks") == kind:
            seed, size = given("--program-seed"), given("--program-size")
            how = fails(kind, sessions, seed, size, tmp_path / "program.so")
            assert how is None, how + "\n" + Program(seed, size, *KINDS[kind]).source()
        return
    count = given("--programs") // (4 if kind == "4/2" else 1)
    for start in range(0, count, BATCH):
        programs = [
            Program(seed, SIZES[seed % len(SIZES)], *KINDS[kind])
            for seed in range(start, min(start + BATCH, count))
        ]
        if count > 100:
            with capsys.disabled():
                print(f"\r{kind} workers: programs {start} to {start + BATCH}", end=" ", flush=True)
        path = tmp_path / f"programs-{start}.so"
        try:
            check(sessions(kind), programs, path)
        except WrongProgramError as error:
            program = error.program
            pytest.fail(f"{error}\n" + smallest(kind, sessions, program.seed, program.size, path))
        except Exception as error:
            for program in programs:
                alone = path.with_suffix(f".{program.seed}.so")
                if fails(kind, sessions, program.seed, program.size, alone):
                    pytest.fail(smallest(kind, sessions, program.seed, program.size, path))
            raise error
        path.unlink()


def test_a_wrong_result_is_seen_and_made_small(
    sessions: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the all-reduce forgot a rank.
    monkeypatch.setitem(RESULTS, "allreduce", lambda member: member.sent[member.index])
    found = [smallest("2", sessions, seed, 4, tmp_path / f"{seed}.so") for seed in range(4)]
    assert any("elements differ" in how and "--program-seed" in how for how in found)
