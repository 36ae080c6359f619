# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc doctor --hosts`: what it says of machines, and of those that cannot be had."""

from __future__ import annotations

import json

import pytest

from tvm_ipc import command_line
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.mpi import find_mpi


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


def test_a_machine_that_there_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["doctor", "--hosts", "localhost,nowhere.invalid"]) == 1
    said = capfd.readouterr().out
    assert "PROBLEM  IPCError: 'nowhere.invalid' leads nowhere from this machine" in said
