# SPDX-License-Identifier: Apache-2.0
"""Agents on nodes that share nothing but a network: namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from network import Network, NoNetworkError
from node_processes import SECONDS

from tvm_ipc.nodes.mpi import Mpi


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(2, rate="1gbit")
    except NoNetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made


def run(network: Network, folder: Path, name: str, **given: Any) -> str:
    """Run a program on the first node, which is told where the nodes are; what it prints."""
    given |= {
        "hosts": [node.address for node in network.nodes],
        "network": "eth0",
        "shell": str(network.shell(folder / "shell")),
    }
    program = [sys.executable, str(Path(__file__).parent / name)]
    done = subprocess.run(
        network.nodes[0].inside([*program, json.dumps(given)]),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_session_of_disco_over_two_nodes(
    mpi: Mpi, network: Network, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    printed = run(network, tmp_path, "disco_over_nodes.py", ranks=[[1], [2]], what="session")
    told, ok = printed.splitlines()
    assert ok == "ok"
    assert [(n["host"], n["address"], n["shares_memory"]) for n in json.loads(told)] == [
        ("node1", network.nodes[0].address, True),
        ("node2", network.nodes[1].address, False),
    ]


def test_a_module_is_sent_to_a_node_that_does_not_have_it(
    mpi: Mpi, network: Network, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    run(network, tmp_path, "module_over_nodes.py")
