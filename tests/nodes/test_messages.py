# SPDX-License-Identifier: Apache-2.0
"""What an agent and the controller say to each other: whole, bounded, and data alone."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Iterator

import pytest
import tvm  # noqa: F401  loads the native library

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.controller_agent_json_messages import MOST_BYTES, Messages, pack, unpack
from tvm_ipc.nodes.start_and_watch_agents import NodePool, _Node


@pytest.fixture
def ends() -> Iterator[tuple[Messages, Messages]]:
    one, other = socket.socketpair()
    with one, other:
        yield Messages(one), Messages(other)


def test_messages_come_whole_and_in_order(ends: tuple[Messages, Messages]) -> None:
    here, there = ends
    assert there.receive() == []
    here.send("facts", host="näme", cores=2)
    line = pack("read", path="/a\nb")
    here.connection.sendall(line[:5])
    assert there.receive() == [{"kind": "facts", "host": "näme", "cores": 2}]
    here.connection.sendall(line[5:] + pack("ended", rank=1)[:-1])
    assert there.receive() == [{"kind": "read", "path": "/a\nb"}]
    here.connection.sendall(b"\n")
    here.connection.close()
    assert there.receive() == [{"kind": "ended", "rank": 1}] and there.ended
    assert there.receive() == []
    there.send("facts")  # to nobody
    assert there.ended


class _Broken:
    """A connection that ends with an error."""

    def __init__(self, number: int) -> None:
        self._error = OSError(number, "so it is")

    def recv(self, *_: object) -> bytes:
        raise self._error

    def sendall(self, _data: bytes, _flags: int = 0) -> None:
        raise self._error


@pytest.mark.parametrize("hears", [True, False])
def test_who_is_cut_off_is_told_from_who_has_ended(hears: bool) -> None:
    for number, cut_off in (
        (errno.ETIMEDOUT, True),
        (errno.EHOSTUNREACH, True),
        (errno.ENETUNREACH, True),
        (errno.ECONNRESET, False),
        (errno.EPIPE, False),
    ):
        messages = Messages(_Broken(number))  # type: ignore[arg-type]
        assert messages.receive() == [] if hears else messages.send("facts") is None
        assert messages.ended and messages.cut_off is cut_off


def test_messages_have_a_limit(ends: tuple[Messages, Messages]) -> None:
    here, there = ends
    with pytest.raises(IPCError, match="may have 65536"):
        here.send("failed", why="x" * MOST_BYTES)
    here.connection.setblocking(False)
    sent = 0
    with pytest.raises(IPCError, match="more than 65536 bytes"):
        for _ in range(1000):
            sent += here.connection.send(bytes(1000))
            there.receive()
    assert sent <= 2 * MOST_BYTES + 1000


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b"{}", b'{"kind": 1}', b"\xff", b"nan", b"[" * 50_000, b"__import__('os')"],
)
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(IPCError, match="a message is not valid"):
        unpack(line)


WRONG = [
    {"kind": "dance"},
    {"kind": "facts"},
    {"kind": "read", "digest": "x"},  # nobody asked
    {"kind": "started", "processes": [1]},
    {"kind": "started", "processes": {"one": "two"}},
    {"kind": "ended", "rank": 7, "code": 0},  # of another node
    {"kind": "ended", "rank": [1], "code": 0},
    {"kind": "ended", "rank": 1, "code": None},
    {"kind": "failed", "why": "no memory"},
]


@pytest.mark.parametrize("message", WRONG, ids=str)
def test_the_controller_names_the_node_that_says_it(
    message: dict[str, object], ends: tuple[Messages, Messages]
) -> None:
    here, there = ends
    nodes = NodePool.__new__(NodePool)  # without agents
    nodes.nodes, nodes.exit_codes, nodes._failure = (_Node(4, (1,), there),), {}, None
    nodes._lock = threading.RLock()
    here.connection.sendall(pack(**message))  # type: ignore[arg-type]
    for _ in range(2):  # it stays what it is
        with pytest.raises(IPCError, match=r"the agent of node 4 (sent|failed)"):
            nodes.check()


def test_noise_is_an_error_or_nothing(ends: tuple[Messages, Messages]) -> None:
    random_ = random.Random(3)
    line = pack("facts", host="a", cores=[1, {"b": None}])
    for _ in range(2000):
        spoilt = bytearray(line[:-1])
        for _ in range(random_.randrange(1, 4)):
            spoilt[random_.randrange(len(spoilt))] = random_.randrange(256)
        with contextlib.suppress(IPCError):
            assert isinstance(unpack(bytes(spoilt))["kind"], str)
