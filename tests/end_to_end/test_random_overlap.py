# SPDX-License-Identifier: Apache-2.0
"""Random programs of matmuls that are overlapped with collectives give what NumPy gives.

    python -m pytest tests/end_to_end/test_random_overlap.py --programs 1000

is the long run. Without the option there are 24 programs: 8 for each number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
from tests.end_to_end.random_overlap import KINDS, SIZES, OverlapProgram
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.transform import collect_report

WORLDS = (2, 3, 4)


@pytest.fixture(scope="module", params=WORLDS)
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tvm_ipc.Session(request.param, threads=True, timeout=60) as session:
        yield session


def check(session: Any, program: OverlapProgram) -> Counter[str]:
    """Raise an error if results are not NumPy's; return how often sites were overlapped, or not."""
    pipeline = tvm_ipc.get_pipeline(
        "llvm", program.world, overlap=program.chunks, blas=bool(program.seed % 2)
    )
    with collect_report() as report:
        executable = tvm.compile(program.module, "llvm", relax_pipeline=pipeline)
    main = session.load_vm_module(executable)["main"]
    for n in SIZES if program.symbolic else SIZES[:1]:
        program.forget()
        arguments = []
        for parameter in program.parameters:
            arrays = parameter.arrays(n)
            arguments.append(put_each(session, arrays))
        for _ in range(2):
            found = main(*arguments, tvm.runtime.ShapeTuple([n]))
        for rank in range(program.world):
            parts = found.debug_get_from_remote(rank)
            for part, value in zip(parts, program.results, strict=True):
                where = f"n {n}, rank {rank}, {value.var.name}"
                np.testing.assert_array_equal(part.numpy(), value.arrays(n)[rank], where)
    return Counter(
        "overlapped" if one.verdict.startswith("in ") else "skipped"
        for one in report.decisions
        if one.pass_name == "OverlapCommunication"
    )


@pytest.mark.slow
def test_random_overlapped_programs(session: Any, request: pytest.FixtureRequest) -> None:
    count = 2 * request.config.getoption("--programs") // len(WORLDS)
    made_of: set[str] = set()
    sites: Counter[str] = Counter()
    for seed in range(count):
        program = OverlapProgram(seed, session.num_workers)
        made_of |= program.made_of
        try:
            sites += check(session, program)
        except Exception as error:
            script = program.module.script()
            pytest.fail(f"program {seed}, overlap={program.chunks}: {error}\n{script}")
    assert sites["overlapped"] > sites["skipped"] // 2
    if count > 30:
        assert made_of >= {*KINDS, "whole session", "result", "constant"}
        assert session.num_workers < 4 or "named ranks" in made_of
