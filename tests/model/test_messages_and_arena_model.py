# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks (point_to_point.cc), and growth of the arena (arena.cc)."""

from __future__ import annotations

import pytest
from explorer import Memory, Process, ProtocolError, explore

PACKETS = 5


def sender(slots: int, ahead: int) -> Process:
    process = Process("sender")
    for packet in range(1, PACKETS + 1):
        process.wait(
            f"packet {packet - ahead} to be taken",
            lambda m, packet=packet: m.get("taken", 0) >= packet - ahead,
        )
        process.write(("packet", packet % slots), packet)
        process.write(("slot", packet % slots), packet)
    return process


def receiver(slots: int, taken_first: bool = False) -> Process:
    process = Process("receiver")
    for packet in range(1, PACKETS + 1):
        process.wait(
            f"packet {packet}",
            lambda m, packet=packet: m.get(("slot", packet % slots), 0) >= packet,
        )
        if taken_first:
            process.write("taken", packet)
        process.expect(("packet", packet % slots), packet)
        if not taken_first:
            process.write("taken", packet)
    return process


def test_messages_arrive_in_order():
    assert explore([sender(2, 2), receiver(2)]) > 20


@pytest.mark.parametrize(
    "processes",
    [
        [sender(2, 3), receiver(2)],
        [sender(1, 2), receiver(1)],
        [sender(2, 2), receiver(2, taken_first=True)],
    ],
    ids=["sends too far ahead", "one slot", "taken before it was read"],
)
def test_a_lost_packet_is_found(processes):
    with pytest.raises(ProtocolError):
        explore(processes)


def owner(order: str) -> Process:
    """Grows twice: commits a page (`Arena::Grow`), hands out a block, publishes its offset."""
    process = Process("owner")
    for page in (1, 2):
        actions = {
            "commit": lambda p=page: process.write(("page", p), "committed"),
            "write": lambda p=page: process.write(("data", p), p),
            "publish": lambda p=page: process.write("offset", p),
        }
        for name in order.split():
            actions[name]()
    return process


def peer() -> Process:
    process = Process("peer")

    def touch(memory: Memory) -> None:
        page = memory["offset"]
        if memory.get(("page", page)) != "committed":
            raise ProtocolError(f"a page that was never committed is touched: {page}")
        if memory.get(("data", page)) != page:
            raise ProtocolError(f"page {page} is read before it was written")

    for page in (1, 2):
        process.wait(f"an offset in page {page}", lambda m, p=page: m.get("offset", 0) >= p)
        process.do("read there", touch)
    return process


def test_a_peer_touches_only_committed_pages():
    assert explore([owner("commit write publish"), peer(), peer()]) > 20


@pytest.mark.parametrize("order", ["publish commit write", "commit publish write"])
def test_an_offset_that_is_published_too_early_is_found(order):
    with pytest.raises(ProtocolError, match="page"):
        explore([owner(order), peer()])
