# SPDX-License-Identifier: Apache-2.0
"""Which address the controller listens on."""

from __future__ import annotations

import re

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import listen_address
from tvm_ipc.nodes.listen_address import address_towards


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], str]:
    """Addresses that packets to hosts are sent from, by IPv4 and 6."""
    table: dict[tuple[str, int], str] = {}
    monkeypatch.setattr(
        listen_address, "_source_address", lambda host, family: table.get((host, family))
    )
    return table


def test_this_machine_alone() -> None:
    assert address_towards(["127.0.0.1"]) == address_towards([]) == "127.0.0.1"
    assert address_towards(["127.0.0.1", "127.0.1.1"]) == "127.0.0.1"


@pytest.mark.parametrize("name", ["none.invalid", "a..b", "a" * 64])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(IPCError, match=f"'{re.escape(name)}' cannot be reached from this"):
        address_towards(["127.0.0.1", name])


def test_a_name_of_this_machine_that_is_loopback(ways: dict[tuple[str, int], str]) -> None:
    ways.update({("here", 4): "127.0.0.1", ("here", 6): "::1", ("there", 4): "10.0.0.7"})
    assert address_towards(["here", "there"]) == "10.0.0.7"
    assert address_towards(["there", "here"]) == "10.0.0.7"


def test_ipv6_where_ipv4_does_not_lead(ways: dict[tuple[str, int], str]) -> None:
    ways.update({("a", 4): "10.0.0.7", ("a", 6): "fd00::7", ("b", 6): "fd00::7"})
    assert address_towards(["a", "b"]) == "fd00::7"


def test_several_interfaces(ways: dict[tuple[str, int], str]) -> None:
    ways.update({("a", 4): "10.0.0.7", ("b", 4): "10.1.0.7"})
    with pytest.raises(IPCError, match=r"no one interface .*a: from 10\.0\.0\.7; b: from 10\.1"):
        address_towards(["a", "b"])
