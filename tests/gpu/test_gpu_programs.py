# SPDX-License-Identifier: Apache-2.0
"""Programs that TVM and our pipeline compiled, on CPUs and on GPUs; a kit carries them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.gpu.gpu_programs import PROGRAMS, RANKS
from tests.gpu.gpu_sessions import target_of

Program = Callable[[str, str], Path]
CALLS = 5  #: an odd number of replays, where there are graphs: the first call captures


def check(session: tvm_ipc.Session, path: Path, name: str) -> None:
    """Call a program again and again with new inputs, and compare what comes out on all ranks."""
    program = PROGRAMS[name]
    main = session.load_vm_module(str(path))["main"]
    for seed in range(CALLS):
        inputs = program.inputs(seed)
        result = main(*(given(session, values) for values in zip(*inputs, strict=True)))
        wanted = program.expected(inputs)
        for rank in range(RANKS):
            got = session.get(result, rank=rank)
            np.testing.assert_allclose(got, wanted, program.tolerance, program.tolerance)


def given(session: tvm_ipc.Session, values: tuple[Any, ...]) -> Any:
    """A tensor of each rank's own."""
    made = session.empty(values[0].shape, str(values[0].dtype))
    session.scatter_from_worker0(session.put(np.stack(values)), made)
    return made


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
@pytest.mark.parametrize("name", [name for name, one in PROGRAMS.items() if not one.graph])
def test_on_cpus(
    name: str, threads: bool, program: Program, opened: Callable[..., tvm_ipc.Session]
) -> None:
    check(opened(RANKS, threads, "cpu"), program(name, "cpu"), name)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_gpus(
    name: str,
    threads: bool,
    program: Program,
    devices: tuple[Any, ...],
    opened: Callable[..., tvm_ipc.Session],
) -> None:
    if threads and len(devices) < RANKS:
        pytest.skip("a program allocates: ranks that are threads want a GPU each")
    check(opened(RANKS, threads), program(name, target_of(devices[0])), name)
