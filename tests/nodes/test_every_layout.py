# SPDX-License-Identifier: Apache-2.0
"""Two and four nodes in namespaces, with one to three workers each: `every_layout.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes.network import Network, NoNetworkError
from tvm_ipc.nodes.find_mpi_installation import Mpi

#: Nodes, workers on each, and groups: of one rank, inside of nodes, across them, and both.
LAYOUTS = ((2, 1, 2), (2, 2, 2), (2, 3, 3), (4, 1, 2), (4, 2, 4), (4, 3, 3))
SECONDS = 3000


@pytest.mark.parametrize(("nodes", "workers", "groups"), LAYOUTS)
def test_every_layout(
    nodes: int,
    workers: int,
    groups: int,
    mpi: Mpi,
    started: Callable[[], dict[int, str]],
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    if not pytestconfig.getoption("--every-layout"):
        pytest.skip("--every-layout runs it")
    try:
        network = Network(nodes, memory="2g")
    except NoNetworkError as error:
        pytest.skip(str(error))
    with network:
        given = {
            "hosts": [node.address for node in network.nodes],
            "network": "eth0",
            "shell": str(network.shell(tmp_path / "shell")),
            "workers": workers,
            "groups": groups,
        }
        program = [sys.executable, str(Path(__file__).parent / "every_layout.py")]
        done = subprocess.run(
            network.nodes[0].inside([*program, json.dumps(given)]),
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0 and done.stdout == "ok\n"
