# SPDX-License-Identifier: Apache-2.0
"""Agents on nodes that share nothing but a network: namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


def test_a_session_of_disco_over_two_nodes(
    mpi: Mpi, network: Network, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    given = {
        "ranks": [[1], [2]],
        "what": "session",
        "hosts": [node.address for node in network.nodes],
        "network": "eth0",
        "shell": str(network.shell(tmp_path / "shell")),
    }
    program = [sys.executable, str(Path(__file__).parent / "disco_over_nodes.py")]
    done = subprocess.run(
        network.nodes[0].inside([*program, json.dumps(given)]),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    told, ok = done.stdout.splitlines()
    assert ok == "ok"
    assert [(n["host"], n["address"], n["shares_memory"]) for n in json.loads(told)] == [
        ("node1", network.nodes[0].address, True),
        ("node2", network.nodes[1].address, False),
    ]


def test_a_module_is_sent_to_a_node_that_does_not_have_it(
    mpi: Mpi, network: Network, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    given = {
        "hosts": [node.address for node in network.nodes],
        "network": "eth0",
        "shell": str(network.shell(tmp_path / "shell")),
    }
    program = [sys.executable, str(Path(__file__).parent / "module_over_nodes.py")]
    done = subprocess.run(
        network.nodes[0].inside([*program, json.dumps(given)]),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
