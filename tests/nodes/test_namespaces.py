# SPDX-License-Identifier: Apache-2.0
"""Agents on nodes that share nothing but a network: namespaces of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.network import Network, NoNetworkError
from tests.nodes.node_processes import SECONDS
from tvm_ipc.nodes.find_mpi_installation import Mpi

#: Seconds that agents have to join in `STARTING`.
START = 8.0
STARTING = f"""
import json, sys
import tvm
from pathlib import Path
from tvm_ipc.nodes.start_and_watch_agents import NodePool, PoolRequest
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
given = json.loads(sys.argv[1])
places = NodeAddresses(tuple(given["hosts"]), given["network"], Path(given["shell"]))
NodePool(places, PoolRequest((3, 1), "mpi"), address=given["hosts"][0], timeout={START})
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(2, rate="1gbit")
    except NoNetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.parametrize("own_cores", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_cores_of_nodes(count: int, own_cores: bool, tmp_path: Path) -> None:
    try:
        made = Network(count, own_cores=own_cores)
    except NoNetworkError as error:
        pytest.skip(str(error))
    here = sorted(os.sched_getaffinity(0))
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with made as network:
        shell = str(network.shell(tmp_path / "shell"))
        found = []
        for node in network.nodes:
            ways = (
                node.inside([sys.executable, "-c", code]),
                [shell, "-x", node.address, sys.executable, "-c", f"'{code}'"],
                # The shell is called in the first node, for the others.
                network.nodes[0].inside([shell, node.address, f"{sys.executable} -c '{code}'"]),
            )
            (said,) = {subprocess.check_output(way, text=True) for way in ways}
            found.append(json.loads(said))
    if not own_cores:
        assert found == [here] * count
        return
    assert {len(cores) for cores in found} == {max(1, len(here) // count)}
    together = sorted({core for cores in found for core in cores})
    assert len(together) == min(len(here), len(found[0]) * count)
    assert set(together) <= set(here)


def places(network: Network, folder: Path) -> dict[str, Any]:
    return {
        "hosts": [node.address for node in network.nodes],
        "network": "eth0",
        "shell": str(network.shell(folder / "shell")),
    }


def run(network: Network, folder: Path, name: str, **given: Any) -> str:
    """Run a program on the first node, which is told where the nodes are; what it prints."""
    given |= places(network, folder)
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
    printed = run(network, tmp_path, "disco_over_nodes.py", workers=3, what="session")
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


def test_a_node_that_is_cut_off_while_mpi_starts_ends_by_itself(
    mpi: Mpi, network: Network, started: Callable[[], dict[int, str]], tmp_path: Path
) -> None:
    given = json.dumps(places(network, tmp_path))
    last = network.nodes[-1]
    with subprocess.Popen(
        network.nodes[0].inside([sys.executable, "-c", STARTING, given]),
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        end = time.monotonic() + SECONDS
        while sum("nodes/agent_startup_watchdog.py" in line for line in started().values()) < 2:
            assert time.monotonic() < end and program.poll() is None
        last.run("ip", "link", "set", "eth0", "down")
        cut = time.monotonic()
        errors = program.communicate(timeout=SECONDS)[1]
        assert program.returncode == 1 and "tvm_ipc.errors." in errors, errors
        while left := started():
            assert time.monotonic() < cut + START + 10.0, left
            time.sleep(0.05)
