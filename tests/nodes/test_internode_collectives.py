# SPDX-License-Identifier: Apache-2.0
"""Every collective between workers of several nodes against NumPy, bit for bit.

The nodes are on this machine and share nothing but the network, over which MPI moves the data. On
each node ranks are added in their order, and then nodes in theirs, so there is one right answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.nodes.node_processes import SECONDS
from tests.runtime.collective_cases import tree_sum
from tests.runtime.ragged_rows import SPREADS, check, rows_of
from tvm_ipc.nodes.find_mpi_installation import Mpi


@contextlib.contextmanager
def opened(nodes: int, workers: int, groups: int = 1) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(workers, num_groups=groups, hosts=nodes, timeout=SECONDS) as session:
        session.import_python_module("tests.runtime.collective_worker")
        say_backend = session.get_global_func("tests.this_session_has")
        say_backend(session.backend)
        yield session
        say_backend("")
        session.sync()


def start(session: tvm_ipc.Session, groups: int, in_group: bool, plan: str, *args: Any) -> None:
    run = session.get_global_func("tests.run_collectives")
    run(groups, in_group, f"tests.nodes.internode_cases.{plan}", *args)


@pytest.fixture(scope="module")
def session(mpi: Mpi) -> Iterator[tvm_ipc.Session]:
    with opened(2, 4) as session:
        yield session


def test_every_collective_of_every_type(session: tvm_ipc.Session) -> None:
    start(session, 1, False, "all_across", 2)
    session.sync()


@pytest.mark.parametrize("posts", [False, True])
def test_teams_inside_of_nodes_and_across(posts: bool, session: tvm_ipc.Session) -> None:
    """Along both axes of a mesh."""
    both = session.get_global_func("tests.collectives_in_two_teams")
    both(posts, "tests.nodes.internode_cases.pairs_anywhere")
    session.sync()


@pytest.mark.parametrize("spread", SPREADS)
def test_rows_that_only_their_senders_count(spread: str, session: tvm_ipc.Session) -> None:
    for count, row in ((0, (4,)), (50, (3,)), (800, (257,))):
        for groups in (1, 3):
            check(session, rows_of(spread, 4, count, row, "float32", groups), "float32")


def test_teams_that_the_controller_makes(session: tvm_ipc.Session) -> None:
    rows = np.arange(4 * 5000, dtype="float32").reshape(4, 5000)
    given = session.scatter(rows)
    for copy in range(10):
        team = session.team([3, 0, 2], copy)  # which the nodes may not know yet
        gathered, total = session.empty((15000,), "float32"), session.empty((5000,), "float32")
        session.allgather(given, gathered, team=team)
        session.allreduce(given, total, team=team)
    for rank in team.ranks:
        assert (session.get(gathered, rank) == rows[[3, 0, 2]].reshape(-1)).all()
        assert (session.get(total, rank) == rows[[0, 2, 3]].sum(0)).all()


@pytest.mark.parametrize("order", ["nodes", "flat"])
@pytest.mark.parametrize(("nodes", "workers"), [(2, 4), (2, 5), (3, 5)])
def test_tree_sums_have_the_bits_of_one_machine(
    mpi: Mpi, nodes: int, workers: int, order: str
) -> None:
    """Nodes of 2 + 2 and 2 + 2 + 1 members are subtrees, those of 3 + 2 are not."""
    random = np.random.default_rng(workers)
    rows = random.normal(size=(workers, 5 * 1000)).astype("float32")
    members = [[0, 1, 2, 3], [3, 0, 2, 1], [1, 2, 3], [1, 2, 3, 0]]
    with tvm_ipc.Session(workers, hosts=nodes, order=order, timeout=SECONDS) as session:
        given = session.scatter(rows)
        total = session.allreduce(given, op="tree_sum")
        for rank in range(workers):
            np.testing.assert_array_equal(session.get(total, rank), tree_sum(list(rows)))
        if workers == 4:
            part = session.reduce_scatter(session.put(rows[0]), op="tree_sum")
            np.testing.assert_array_equal(session.get(part, 3), 4 * rows[0][3750:])
        for ranks in members:
            team = session.team(ranks)
            out = session.empty((5000,), "float32")
            session.allreduce(given, out, op="tree_sum", team=team)
            for rank in ranks:
                wanted = tree_sum([rows[one] for one in team.ranks])
                np.testing.assert_array_equal(session.get(out, rank), wanted)


@pytest.mark.parametrize(("nodes", "workers"), [(2, 2), (4, 9)])
def test_layouts(mpi: Mpi, nodes: int, workers: int) -> None:
    with opened(nodes, workers) as session:
        start(session, 1, False, "some_across", nodes)
        session.sync()


def test_groups_of_which_some_lie_on_two_nodes(mpi: Mpi) -> None:
    with opened(2, 6, groups=3) as session:
        for seed in range(2):
            # Without waiting: ranks are in different teams at the same time.
            start(session, 3, True, "pairs_anywhere")
            start(session, 3, False, "storm_across", 2, seed, 20)
        session.sync()
