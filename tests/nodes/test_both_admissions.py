# SPDX-License-Identifier: Apache-2.0
"""Both listeners of a session treat the same wrong connections in the same way.

The native one admits the workers of one machine, and that of Python the processes of other
machines. `docs/internals.md` states what both promise.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import tvm_ffi

import tvm_ipc.runtime
from tvm_ipc.nodes import admission
from tvm_ipc.nodes.admission import Admission
from tvm_ipc.nodes.handshake import (
    HEAD,
    HELLO,
    NONCE_BYTES,
    Key,
    PeerIdentity,
    pack_claim,
    versions,
)

SECONDS = 20.0
#: More connections than either listener keeps pending.
CROWD = 300
AGENT = PeerIdentity(0, "agent")


class Listener(Protocol):
    """A listener that expects one process."""

    def connect(self) -> socket.socket:
        """Return a new connection to it."""

    def proof(self, connection: socket.socket, secret: bytes | None = None) -> bytes:
        """Return the message of the expected process; with another secret, that of an impostor."""

    def admits(self, connection: socket.socket) -> bool:
        """Wait for the answer to `proof`, and return whether the process was admitted."""

    def close(self) -> None:
        """End it."""


class OfWorkers:
    """The native listener of a session server (`core/admit_workers_to_session.h`)."""

    HEADER = struct.Struct("IIQ")
    HELLO, WELCOME = 1, 9

    def __init__(self) -> None:
        tvm_ipc.runtime.ready()
        native = tvm_ffi.get_global_func
        self._close = native("tvm_ipc.node.close")
        settings = ("mpi", ["0", "1"], tvm_ffi.Shape([1, 1]), 1, 60.0, 0, "auto", False)
        self._node = native("tvm_ipc.node.open")(*settings)
        invitation = bytes(native("tvm_ipc.node.invitation")(self._node))
        self._name, _, rest = invitation.partition(b"\n")
        self._token = rest[:16]

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(b"\0" + self._name)
        connection.settimeout(SECONDS)
        return connection

    def proof(self, connection: socket.socket, secret: bytes | None = None) -> bytes:
        hello = struct.pack("16s16siiii", secret or self._token, b"mpi", 1, 2, 1, 0)
        return self.HEADER.pack(self.HELLO, 0, len(hello)) + hello

    def admits(self, connection: socket.socket) -> bool:
        kind, _, _ = self.HEADER.unpack(connection.recv(self.HEADER.size, socket.MSG_WAITALL))
        return bool(kind == self.WELCOME)

    def close(self) -> None:
        self._close(self._node)


class OfNodes:
    """The listener of Python for agents, session servers and workers of nodes."""

    def __init__(self) -> None:
        self._key = Key.new()
        self._admission = Admission(self._key, [AGENT], "127.0.0.1")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._admission.poll(0.01)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._admission.address, SECONDS)

    def proof(self, connection: socket.socket, secret: bytes | None = None) -> bytes:
        key = self._key if secret is None else Key(secret * 2, self._key.session)
        nonce = connection.recv(len(HELLO) + NONCE_BYTES, socket.MSG_WAITALL)[len(HELLO) :]
        own, claim = bytes(NONCE_BYTES), pack_claim(AGENT, versions())
        return HEAD.pack(HELLO, own, len(claim)) + claim + key.of_joiner(nonce, own, claim)

    def admits(self, connection: socket.socket) -> bool:
        return connection.recv(1) == b"\1"

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._admission.close()
        for connection in self._admission.admitted.values():
            connection.close()


@pytest.fixture(params=[OfWorkers, OfNodes])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    one: Any = request.param()
    yield one
    one.close()


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda proof: b"",
    "a web browser": lambda proof: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": lambda proof: random.Random(1).randbytes(5000),
    "zeros": lambda proof: bytes(100_000),
    "ones": lambda proof: b"\xff" * 5000,
    "half": lambda proof: proof[: len(proof) // 2],
    "all but a byte": lambda proof: proof[:-1],
    "a byte before": lambda proof: b"x" + proof,
}


def is_closed(connection: socket.socket) -> bool:
    """Wait until the listener has closed a connection."""
    try:
        while connection.recv(4096):
            pass
    except (ConnectionError, TimeoutError) as error:
        return not isinstance(error, TimeoutError)
    return True


def join(listener: Listener) -> None:
    with listener.connect() as connection:
        connection.sendall(listener.proof(connection))
        assert listener.admits(connection)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_messages_admit_nobody_and_delay_nobody(wrong: str, listener: Listener) -> None:
    with listener.connect() as ending, listener.connect() as staying:
        for connection in (ending, staying):
            with contextlib.suppress(ConnectionError):  # it was closed meanwhile
                connection.sendall(WRONG[wrong](listener.proof(connection)))
        with contextlib.suppress(OSError):
            ending.shutdown(socket.SHUT_WR)
        assert is_closed(ending)
        begin = time.monotonic()
        join(listener)
        assert time.monotonic() - begin < admission.PENDING_SECONDS / 2


def test_who_does_not_know_the_secret_is_told_and_not_admitted(listener: Listener) -> None:
    with listener.connect() as impostor:
        impostor.sendall(listener.proof(impostor, b"sixteen bytes..."))
        assert not listener.admits(impostor)
        assert is_closed(impostor)
    join(listener)


@pytest.mark.slow
def test_who_is_slow_is_sent_away(listener: Listener) -> None:
    """Each byte comes soon after the one before, but all of them do not."""
    with listener.connect() as slow:
        proof = listener.proof(slow)
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in proof:
                slow.sendall(bytes([byte]))
                time.sleep(2 * admission.PENDING_SECONDS / len(proof))
        assert time.monotonic() - begin < 1.5 * admission.PENDING_SECONDS
    join(listener)


def test_a_crowd_takes_the_place_of_its_own_oldest(listener: Listener) -> None:
    crowd = [listener.connect() for _ in range(CROWD)]
    assert is_closed(crowd[0])
    join(listener)
    for connection in crowd:
        connection.close()


def test_a_process_is_admitted_once(listener: Listener) -> None:
    with listener.connect() as early:
        proof = listener.proof(early)
        join(listener)
        with pytest.raises(ConnectionError):  # it listens no more, and all others are sent away
            early.sendall(proof)
            assert is_closed(early)
            listener.connect()
