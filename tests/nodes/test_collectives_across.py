# SPDX-License-Identifier: Apache-2.0
"""Every collective between workers of several nodes against NumPy, bit for bit.

The nodes are on this machine and share nothing but the network, over which MPI moves the data. On
each node ranks are added in their order, and then nodes in theirs, so there is one right answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_processes import SECONDS

import tvm_ipc
from tvm_ipc.nodes.mpi import Mpi

RUNTIME = Path(__file__).resolve().parents[1] / "runtime"


@pytest.fixture(autouse=True)
def cases_of_one_machine(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks collectives on one machine does so here, too; workers import what we can."""
    monkeypatch.setattr("sys.path", [str(Path(__file__).parent), str(RUNTIME), *sys.path])


@contextlib.contextmanager
def opened(nodes: int, workers: int, groups: int = 1) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(workers, num_groups=groups, hosts=nodes, timeout=SECONDS) as session:
        session.import_python_module("collective_worker")
        say_backend = session.get_global_func("tests.this_session_has")
        say_backend(session.backend)
        yield session
        say_backend("")
        session.sync()


def start(session: tvm_ipc.Session, groups: int, in_group: bool, plan: str, *args: Any) -> None:
    run = session.get_global_func("tests.run_collectives")
    run(groups, in_group, f"cases_across.{plan}", *args)


def test_every_collective_of_every_type() -> None:
    with opened(2, 4) as session:
        start(session, 1, False, "all_across", 2)
        session.sync()
        # Along both axes of a mesh: teams inside of the nodes, and across them.
        for posts in (False, True):
            both = session.get_global_func("tests.collectives_in_two_teams")
            both(posts, "cases_across.pairs_anywhere")
        session.sync()


@pytest.mark.parametrize(("nodes", "workers"), [(2, 2), (4, 4), (4, 9)])
def test_layouts(nodes: int, workers: int) -> None:
    with opened(nodes, workers) as session:
        start(session, 1, False, "some_across", nodes)
        session.sync()


def test_groups_of_which_some_lie_on_two_nodes() -> None:
    with opened(2, 6, groups=3) as session:
        for seed in range(2):
            # Without waiting: ranks are in different teams at the same time.
            start(session, 3, True, "pairs_anywhere")
            start(session, 3, False, "storm_across", 2, seed, 20)
        session.sync()
