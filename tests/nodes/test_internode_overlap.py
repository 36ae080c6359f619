# SPDX-License-Identifier: Apache-2.0
"""Programs in which products go on beside communication, on several nodes, against NumPy.

They are compiled as for one machine: the number of workers is all that a program knows.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
from tests.end_to_end.overlap_cases import Case
from tests.nodes.node_processes import SECONDS
from tests.runtime.tensors_of_ranks import assert_each_tuple
from tvm_ipc.errors import WorkerDiedError, WorkerError
from tvm_ipc.nodes.find_mpi_installation import Mpi

GATHER = Case("allgather", 5, 33, 1200, 16, products=2, bias=True)
SCATTER = Case("reduce_scatter", 5, 33, 32, 1200)
REDUCE = Case("allreduce", 5, 165, 32, 704, reduction="avg")
CASES = {one.kind: one for one in (GATHER, SCATTER, REDUCE)}


Started = Callable[[], dict[int, str]]


def compiled(case: Case, chunks: int) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", case.ranks, overlap=chunks)
    with tvm_ipc.transform.collect_report() as report:
        program = tvm.compile(case.module(), "llvm", relax_pipeline=pipeline)
    said = {one.verdict for one in report.decisions if one.pass_name == "OverlapCommunication"}
    assert said == {f"in {chunks} chunks"}
    return program


def check(case: Case, session: tvm_ipc.Session, main: Any, seed: int) -> None:
    """What each worker gets is what NumPy gives."""
    xs, others, wanted = case.example(seed, case.rows)
    assert_each_tuple(main(session.scatter(np.stack(xs)), *others), wanted)


@pytest.fixture(scope="module")
def session(mpi: Mpi) -> Iterator[tvm_ipc.Session]:
    """Three workers on one node, and two on the other."""
    with tvm_ipc.Session(5, hosts=2, timeout=SECONDS) as session:
        yield session


@pytest.mark.parametrize("kind", CASES)
def test_every_worker_gets_what_numpy_gives(kind: str, session: tvm_ipc.Session) -> None:
    main = session.load_vm_module(compiled(CASES[kind], 3))["main"]
    for seed in range(3):  # over memory that was used before
        check(CASES[kind], session, main, seed)


def test_a_worker_of_the_other_node_fails_and_dies(mpi: Mpi, started: Started) -> None:
    """While what is shown is on its way."""
    case = replace(GATHER, ranks=2, rows=700)
    with tvm_ipc.Session(2, hosts=2, timeout=SECONDS) as session:
        session.import_python_module("tests.nodes.node_functions")
        main = session.load_vm_module(compiled(case, 4))["main"]
        check(case, session, main, 0)
        xs, others, _ = case.example(1, case.rows)
        arguments = [session.put(one) for one in (xs[0], *others)]
        session.get_global_func("tests.nodes.fail_on")(1)
        main(*arguments)
        with pytest.raises(WorkerError, match="rank 1 was told to"):
            session.sync()
        check(case, session, main, 2)
        session.get_global_func("tests.nodes.stay_on")(1)
        main(*arguments)
        threading.Timer(0.3, os.kill, (session.pids[1], signal.SIGKILL)).start()
        with pytest.raises(WorkerDiedError, match=r"worker 1 of node 1 \(.*\) died of SIGKILL"):
            session.sync()
