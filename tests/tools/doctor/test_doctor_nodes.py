# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc doctor --hosts`: what it says of machines, and of those that cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.tools import command_line
from tvm_ipc.tools.doctor.multi_node_check import render_hosts


@pytest.fixture(autouse=True)
def mpi() -> None:
    try:
        find_mpi()
    except IPCError as error:
        pytest.skip(str(error))


def test_two_nodes_of_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["doctor", "--hosts", "2", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["problem"] is None
    first, second = facts["nodes"]
    assert (first["ranks"], second["ranks"]) == ([0], [1])
    assert first["host"] == second["host"]
    assert "latency" not in first
    assert second["latency"] > 0
    assert second["rate"] > 0
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert first["congestion"] == second["congestion"] == control


def test_a_machine_that_there_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["doctor", "--hosts", "localhost,nowhere.invalid"]) == 1
    said = capfd.readouterr().out
    assert said.startswith("Not ready: 'nowhere.invalid' cannot be reached from this machine")


@pytest.mark.parametrize("controls", [("cubic", "reno"), ("cubic", "bbr"), ("bbr2", "bbr")])
def test_a_control_of_congestion_that_makes_collectives_slow(controls: tuple[str, str]) -> None:
    node = {"host": "a", "address": "10.0.0.1", "cores": 2}
    nodes = [{**node, "congestion": control} for control in controls]
    said = render_hosts({"launcher": "", "seconds": 1.0, "nodes": nodes, "problem": None})
    assert said.startswith("Ready on 2 nodes: a worker was tried on each.\n")
    slow = [str(k) for k, control in enumerate(controls) if control.startswith("bbr")]
    assert [line[:8].strip() for line in said.splitlines()].count("SLOW") == bool(slow)
    if slow:
        assert f"BBR on {'nodes' if slow[1:] else 'node'} {', '.join(slow)}," in said
        assert "net.ipv4.tcp_congestion_control=cubic" in said


def test_a_machine_by_itself_has_no_link_that_could_be_slow() -> None:
    node = {"host": "a", "address": "127.0.0.1", "cores": 2, "congestion": "bbr"}
    facts = {"launcher": "", "seconds": 1.0, "nodes": [node, node], "problem": None}
    assert "SLOW" not in render_hosts(facts)
