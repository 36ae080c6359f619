# SPDX-License-Identifier: Apache-2.0
"""Random shape expressions through our pipeline give what NumPy gives, at several sizes.

    python -m pytest tests/end_to_end/test_random_shapes.py --shapes 1000

is the long run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
from tests.end_to_end.harness import Program, build, parsed, run
from tests.end_to_end.programs import Arrays
from tests.end_to_end.random_shapes import Shapes
from tvm_ipc.transform import collect_report

BATCH = 6
LENGTHS = (3, 5, 8, 12)


class ShapeProgram(Program):
    """A program whose extents are expressions."""

    def __init__(self, seed: int, size: int, world: int) -> None:
        self.seed, self.size, self.world, self.groups = seed, size, world, 1
        self.shapes = Shapes(seed, size, world)
        self.main = self.shapes.function
        self.functions = [self.main]

    def sizes(self, rows: tuple[int, ...]) -> list[dict[str, int]]:
        return self.shapes.chosen_sizes(len(rows))

    def arguments(self, sizes: dict[str, int]) -> list[Arrays]:
        return self.shapes.arguments(sizes, self.seed + sum(sizes.values()))


def compiles_with_tvm(program: Program) -> bool:
    """Whether TVM's own pipeline compiles it."""
    try:
        tvm.compile(parsed([program]), "llvm")
    except Exception:
        return False
    return True


def check(session: Any, programs: list[Program], path: Path) -> int:
    """Raise an error if a program does not compile, or gives something else.

    Returns how many of its tensors were not proved to lie where they may.
    """
    with collect_report() as report:
        build(programs, path)
    run(session, programs, path, (0, 1, 2))
    unproved = [one for one in report.decisions if one.verdict == "not proved"]
    # Whether ranks take one branch together is the caller's to know.
    return sum(one.subject != "communication" for one in unproved)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_random_shapes(world: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--shapes") // 2
    skipped = unproved = 0
    failures = []
    with tvm_ipc.Session(world, threads=True, timeout=60) as session:
        for start in range(0, count, BATCH):
            numbers = range(start, min(start + BATCH, count))
            programs = [ShapeProgram(one, LENGTHS[one % len(LENGTHS)], world) for one in numbers]
            try:
                unproved += check(session, programs, tmp_path / f"{start}.so")
            except Exception:
                for one in programs:
                    try:
                        unproved += check(session, [one], tmp_path / f"{one.seed}.so")
                    except Exception as error:
                        if not compiles_with_tvm(one):
                            skipped += 1
                            continue
                        how = f"{type(error).__name__}: {error}\n{one.source()}"
                        failures.append(f"program {one.seed} of {world} workers: {how}")
    assert not failures, "\n".join(failures)
    assert skipped <= count // 10
    # The check tells what it cannot prove from what is wrong; it proves nearly everything.
    assert unproved <= count // 50
