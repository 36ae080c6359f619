# SPDX-License-Identifier: Apache-2.0
"""How two processes prove to each other that they know a session's secret, over TCP.

The one that listens is the controller (`Door`), the one that connects (`enter`) an agent or a
worker. Three messages, numbers in network order:

1. controller: `HELLO`, nonce
2. joiner: `HELLO`, nonce, length of the claim, claim, proof of all of this
3. controller: 0 or 1 (let in), length of the reason, reason, proof of all of this

A claim is the place (node, rank, role) that the joiner wants, and what it runs (`versions`). A
proof is the HMAC-SHA256, with a key of its own for each direction, of both nonces and what is said.
The nonces are new for each connection: what somebody recorded proves nothing in another, nor in the
other direction. Nothing is believed before its proof is, no length is above `MOST_BYTES`, and
nothing is unpickled or evaluated. The secret itself is in none of the messages.

What comes after the three messages is neither encrypted nor proven: who can change packets between
the machines can change it. Where such people are, go through a tunnel.

These three messages stay as they are: other versions of this package refuse each other by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.metadata
import platform
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvm_ipc.errors import DeadlineError, IPCError

HELLO = b"tvm_ipc join 1\r\n\0\xff"  # bytes that no text protocol says
NONCE_BYTES = 32
PROOF_BYTES = 32
#: Of a claim, and of a reason.
MOST_BYTES = 1024
#: Message 2 up to the claim, and message 3 up to the reason.
HEAD = struct.Struct(f"!{len(HELLO)}s{NONCE_BYTES}sH")
ANSWER = struct.Struct("!BH")
_CLAIM = struct.Struct("!IiB")
#: Seconds after which a peer that acknowledges nothing is gone, whatever the system's default.
_SILENCE = 20.0
_RETRY_SECONDS = 0.05
_COMPARED = ("tvm-ipc", "apache-tvm", "apache-tvm-ffi")


@dataclass(frozen=True)
class Place:
    """What a process is in a session.

    Attributes
    ----------
    node : the number of its node.
    role : "agent"; "hub", the agent's second connection, for its hub; or "worker".
    rank : of a worker, in the session; -1 of others.
    """

    node: int
    role: str
    rank: int = -1

    def __str__(self) -> str:
        return f"{self.role}{f' {self.rank}' if self.rank >= 0 else ''} of node {self.node}"


@dataclass(frozen=True)
class Key:
    """The secret of a session, and the session's name, which is none.

    `text` is for the launcher's channel. It is for no command line, environment, log or file.
    """

    secret: bytes = field(repr=False)
    session: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != 32 or len(self.session) != 16:
            raise IPCError(
                f"the key of a session has a secret of 32 bytes and a name of 16; this one has "
                f"{len(self.secret)} and {len(self.session)}"
            )

    @classmethod
    def new(cls) -> Key:
        """Return the key of a new session."""
        return cls(secrets.token_bytes(32), secrets.token_bytes(16))

    @property
    def text(self) -> str:
        """The key as one word."""
        return (self.secret + self.session).hex()

    @classmethod
    def from_text(cls, text: str) -> Key:
        """Read what `text` gave; an error does not repeat it."""
        try:
            data = bytes.fromhex(text.strip())
        except ValueError:
            data = b""
        if len(data) != 48:
            raise IPCError(
                f"the key of the session is 96 hexadecimal digits; {len(text.strip())} characters "
                "came, which are not: something else wrote to the channel that carries it"
            )
        return cls(data[:32], data[32:])

    def of_joiner(self, *parts: bytes) -> bytes:
        """Return the proof of message 2."""
        return self._proof(b"joiner", parts)

    def of_door(self, *parts: bytes) -> bytes:
        """Return the proof of message 3."""
        return self._proof(b"door", parts)

    def _proof(self, who: bytes, parts: Iterable[bytes]) -> bytes:
        own = hmac.digest(self.secret, b"tvm_ipc join " + who + b"\0" + self.session, "sha256")
        code = hmac.new(own, digestmod=hashlib.sha256)
        for part in parts:  # with their lengths: no two lists of parts are the same bytes
            code.update(struct.pack("!I", len(part)) + part)
        return code.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare proofs in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def versions() -> str:
    """Return what has to be the same on all nodes."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in _COMPARED]
    return ", ".join([*found, f"Python {'.'.join(platform.python_version_tuple()[:2])}"])


def pack_claim(place: Place, runs: str) -> bytes:
    """Return a claim as bytes."""
    role = place.role.encode()
    claim = _CLAIM.pack(place.node, place.rank, len(role)) + role + runs.encode()
    if len(claim) > MOST_BYTES:
        raise IPCError(f"the claim of {place} has {len(claim)} bytes; it may have {MOST_BYTES}")
    return claim


def unpack_claim(claim: bytes) -> tuple[Place, str]:
    """Return the place and the versions of a claim; ValueError if it is none."""
    if len(claim) < _CLAIM.size:
        raise ValueError("too short")
    node, rank, length = _CLAIM.unpack_from(claim)
    role, runs = claim[_CLAIM.size :][:length], claim[_CLAIM.size + length :]
    if len(role) != length:
        raise ValueError("too short")
    return Place(node, role.decode(), rank), runs.decode()


def pack_answer(key: Key, of_claim: Sequence[bytes], reason: str) -> bytes:
    """Return message 3, which lets in if there is no reason not to."""
    told = reason.encode()[:MOST_BYTES]
    head = ANSWER.pack(not reason, len(told))
    return head + told + key.of_door(*of_claim, head, told)


def settle(connection: socket.socket) -> None:
    """Make a connection one whose messages go at once, and whose other end's death is noticed."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENCE * 1000))


class _LostError(Exception):
    """The connection ended before the answer, as it does where strangers crowd the door."""


def enter(
    key: Key,
    place: Place,
    addresses: Sequence[tuple[str, int]],
    timeout: float,
    runs: str | None = None,
) -> socket.socket:
    """Connect to the controller, prove the secret and have it proven; return the connection.

    Parameters
    ----------
    addresses : where the controller may listen: each is tried, in turn.
    timeout : seconds for all of it.
    runs : the versions to claim; those of this process by default.

    Raises
    ------
    IPCError
        The controller refused, what listens does not know the secret, or nothing listens.
    DeadlineError
        None of the addresses led to an answer in time.
    """
    claim = pack_claim(place, versions() if runs is None else runs)
    end = time.monotonic() + timeout
    # An address that swallows packets must leave time for the next one.
    share = max(2.0, timeout / (2 * max(1, len(addresses))))
    while True:
        lost: dict[str, str] = {}
        final: dict[str, str] = {}
        for host, port in addresses:
            try:
                return _enter_at(
                    key, place, claim, (host, port), min(end, time.monotonic() + share)
                )
            except ConnectionRefusedError:
                final[f"{host}:{port}"] = "nothing listens there"
            except _ImpostorError as error:
                final[f"{host}:{port}"] = str(error)
            except (_LostError, OSError) as error:
                lost[f"{host}:{port}"] = str(error) or type(error).__name__
        tried = "; ".join(f"{where}: {what}" for where, what in {**final, **lost}.items())
        if not lost:
            raise IPCError(f"{place} cannot join its session: {tried or 'no address was given'}")
        if time.monotonic() + _RETRY_SECONDS > end:
            raise DeadlineError(f"{place} could not join its session in {timeout:g} s: {tried}")
        time.sleep(_RETRY_SECONDS)


class _ImpostorError(Exception):
    """What listens is not the controller of this session."""


def _enter_at(
    key: Key, place: Place, claim: bytes, address: tuple[str, int], end: float
) -> socket.socket:
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection(address, _left(end)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _read(connection, len(HELLO), end)
        if hello != HELLO:
            raise _ImpostorError(f"what listens there says {hello!r}, and not {HELLO!r}")
        nonces = [_read(connection, NONCE_BYTES, end), secrets.token_bytes(NONCE_BYTES)]
        connection.sendall(
            HEAD.pack(HELLO, nonces[1], len(claim)) + claim + key.of_joiner(*nonces, claim)
        )
        head = _read(connection, ANSWER.size, end)
        let_in, length = ANSWER.unpack(head)
        if length > MOST_BYTES:
            raise _ImpostorError(f"what listens there announces {length} bytes, above {MOST_BYTES}")
        reason = _read(connection, length, end)
        proof = _read(connection, PROOF_BYTES, end)
        if not same(proof, key.of_door(*nonces, claim, head, reason)):
            raise _ImpostorError("what listens there does not know the secret of this session")
        if let_in != 1:
            raise IPCError(f"the controller does not let {place} in: {reason.decode()}")
        settle(connection)
        undo.pop_all()
        return connection


def _read(connection: socket.socket, count: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(end))
        piece = connection.recv(count - len(data))
        if not piece:
            raise _LostError("the connection ended before the answer")
        data += piece
    return bytes(data)


def _left(end: float) -> float:
    return max(0.001, end - time.monotonic())
