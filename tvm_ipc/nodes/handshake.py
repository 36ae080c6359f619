# SPDX-License-Identifier: Apache-2.0
"""Mutual authentication over TCP: two processes prove that they know the secret of a session.

The controller listens (`Admission`), and an agent or a worker connects (`enter`). There are three
messages, with numbers in network byte order:

1. controller: `HELLO`, nonce
2. joiner: `HELLO`, nonce, length of the claim, claim, proof of all of this
3. controller: 0 or 1 (admitted), length of the reason, reason, proof of all of this

A claim has the identity of the joiner (node, rank, role) and the versions that it runs
(`versions`). A proof is the HMAC-SHA256 of both nonces and the message, with a different key for
each direction. The nonces are new for each connection, so a recorded proof is invalid in another
connection and in the other direction. Nothing is used before its proof is verified, no length is
above `MOST_BYTES`, and nothing is unpickled or evaluated. No message contains the secret.

Data after the three messages is neither encrypted nor authenticated. On networks where others can
change packets, use a tunnel.

The three messages must not change: they let different versions of this package refuse each other
with a clear error.
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

HELLO = b"tvm_ipc join 1\r\n\0\xff"  # not valid in any text protocol
NONCE_BYTES = 32
PROOF_BYTES = 32
#: The most bytes of a claim, and of a reason.
MOST_BYTES = 1024
#: Message 2 up to the claim.
HEAD = struct.Struct(f"!{len(HELLO)}s{NONCE_BYTES}sH")
#: Message 3 up to the reason.
ANSWER = struct.Struct("!BH")
_CLAIM = struct.Struct("!IiB")
#: Seconds after which a peer that acknowledges nothing counts as dead.
_SILENCE = 20.0
_RETRY_SECONDS = 0.05
_COMPARED = ("tvm-ipc", "apache-tvm", "apache-tvm-ffi")


@dataclass(frozen=True)
class PeerIdentity:
    """The identity of a connection in a session.

    Attributes
    ----------
    node : the number of the node.
    role : "agent"; "server", for the connection of its session server; or "worker".
    rank : the rank of a worker in the session; -1 for other roles.
    """

    node: int
    role: str
    rank: int = -1

    def __str__(self) -> str:
        """Return the text that names the process in messages, such as "worker 3 of node 1"."""
        return f"{self.role}{f' {self.rank}' if self.rank >= 0 else ''} of node {self.node}"


@dataclass(frozen=True)
class Key:
    """The secret of a session, and the session's name, which is not secret.

    Send `text` only through the launcher's channel: never put it on a command line, or into an
    environment variable, a log or a file.
    """

    secret: bytes = field(repr=False)
    session: bytes

    def __post_init__(self) -> None:
        """Check the lengths of the secret and of the name."""
        if len(self.secret) != 32 or len(self.session) != 16:
            raise IPCError(
                f"the key has a secret of {len(self.secret)} bytes and a name of "
                f"{len(self.session)}; expected 32 and 16"
            )

    @classmethod
    def new(cls) -> Key:
        """Return the key of a new session."""
        return cls(secrets.token_bytes(32), secrets.token_bytes(16))

    @property
    def text(self) -> str:
        """The key as hexadecimal digits."""
        return (self.secret + self.session).hex()

    @classmethod
    def from_text(cls, text: str) -> Key:
        """Return the key for a `text`. The error does not contain the text."""
        try:
            data = bytes.fromhex(text.strip())
        except ValueError:
            data = b""
        if len(data) != 48:
            raise IPCError(
                f"the key of the session has {len(text.strip())} characters that are not a key; "
                "expected 96 hexadecimal digits: another program may have written to the "
                "launcher's standard input"
            )
        return cls(data[:32], data[32:])

    def of_joiner(self, *fields: bytes) -> bytes:
        """Return the proof of message 2."""
        return self._proof(b"joiner", fields)

    def of_listener(self, *fields: bytes) -> bytes:
        """Return the proof of message 3."""
        return self._proof(b"door", fields)

    def _proof(self, sender: bytes, fields: Iterable[bytes]) -> bytes:
        label = b"tvm_ipc join " + sender + b"\0" + self.session
        direction_key = hmac.digest(self.secret, label, "sha256")
        code = hmac.new(direction_key, digestmod=hashlib.sha256)
        for data in fields:  # with lengths, so different lists of fields have different bytes
            code.update(struct.pack("!I", len(data)) + data)
        return code.digest()


def same(proof: bytes, expected: bytes) -> bool:
    """Compare proofs in constant time."""
    return hmac.compare_digest(proof, expected)


def versions() -> str:
    """Return the versions that must be the same on all nodes."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in _COMPARED]
    return ", ".join([*packages, f"Python {'.'.join(platform.python_version_tuple()[:2])}"])


def pack_claim(identity: PeerIdentity, runs: str) -> bytes:
    """Encode a claim."""
    role = identity.role.encode()
    claim = _CLAIM.pack(identity.node, identity.rank, len(role)) + role + runs.encode()
    if len(claim) > MOST_BYTES:
        raise IPCError(
            f"the claim of {identity} has {len(claim)} bytes; it may have at most {MOST_BYTES}"
        )
    return claim


def unpack_claim(claim: bytes) -> tuple[PeerIdentity, str]:
    """Return the identity and the versions of a claim; raise ValueError if it is malformed."""
    if len(claim) < _CLAIM.size:
        raise ValueError("too short")
    node, rank, length = _CLAIM.unpack_from(claim)
    role, runs = claim[_CLAIM.size :][:length], claim[_CLAIM.size + length :]
    if len(role) != length:
        raise ValueError("too short")
    return PeerIdentity(node, role.decode(), rank), runs.decode()


def pack_answer(key: Key, nonces_and_claim: Sequence[bytes], reason: str) -> bytes:
    """Encode message 3, which admits the joiner if the reason to refuse it is empty."""
    text = reason.encode()[:MOST_BYTES]
    head = ANSWER.pack(not reason, len(text))
    return head + text + key.of_listener(*nonces_and_claim, head, text)


def settle(connection: socket.socket) -> None:
    """Make a connection send without delay, and detect a dead peer."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENCE * 1000))


class _LostError(Exception):
    """The connection ended before the answer, as it does if too many others are pending."""


def enter(
    key: Key,
    identity: PeerIdentity,
    addresses: Sequence[tuple[str, int]],
    timeout: float,
    runs: str | None = None,
) -> socket.socket:
    """Connect to the controller, authenticate both sides, and return the connection.

    Parameters
    ----------
    addresses : the addresses that the controller may listen on. Each is tried, in turn.
    timeout : the seconds for all attempts together.
    runs : the versions to claim; those of this process by default.

    Raises
    ------
    IPCError
        The controller refused, the listener does not know the secret, or nothing listens.
    DeadlineError
        No address answered in time.
    """
    claim = pack_claim(identity, versions() if runs is None else runs)
    end = time.monotonic() + timeout
    # An address whose packets are dropped must leave time for the next one.
    share = max(2.0, timeout / (2 * max(1, len(addresses))))
    while True:
        lost: dict[str, str] = {}
        final: dict[str, str] = {}
        for host, port in addresses:
            try:
                return _enter_at(
                    key, identity, claim, (host, port), min(end, time.monotonic() + share)
                )
            except ConnectionRefusedError:
                final[f"{host}:{port}"] = "nothing listens there"
            except _ImpostorError as error:
                final[f"{host}:{port}"] = str(error)
            except (_LostError, OSError) as error:
                lost[f"{host}:{port}"] = str(error) or type(error).__name__
        attempts = "; ".join(f"{where}: {why}" for where, why in {**final, **lost}.items())
        if not lost:
            raise IPCError(
                f"{identity} cannot join its session: {attempts or 'no address was given'}"
            )
        if time.monotonic() + _RETRY_SECONDS > end:
            raise DeadlineError(
                f"{identity} could not join its session in {timeout:g} s: {attempts}"
            )
        time.sleep(_RETRY_SECONDS)


class _ImpostorError(Exception):
    """The listener is not the controller of this session."""


def _enter_at(
    key: Key, identity: PeerIdentity, claim: bytes, address: tuple[str, int], end: float
) -> socket.socket:
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection(address, _left(end)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _read(connection, len(HELLO), end)
        if hello != HELLO:
            raise _ImpostorError(f"the listener sends {hello!r}; expected {HELLO!r}")
        nonces = [_read(connection, NONCE_BYTES, end), secrets.token_bytes(NONCE_BYTES)]
        connection.sendall(
            HEAD.pack(HELLO, nonces[1], len(claim)) + claim + key.of_joiner(*nonces, claim),
            socket.MSG_NOSIGNAL,
        )
        head = _read(connection, ANSWER.size, end)
        admitted, length = ANSWER.unpack(head)
        if length > MOST_BYTES:
            raise _ImpostorError(f"the listener announces {length} bytes, above {MOST_BYTES}")
        reason = _read(connection, length, end)
        proof = _read(connection, PROOF_BYTES, end)
        if not same(proof, key.of_listener(*nonces, claim, head, reason)):
            raise _ImpostorError("the listener does not know the secret of this session")
        if admitted != 1:
            raise IPCError(f"the controller refuses {identity}: {reason.decode()}")
        settle(connection)
        undo.pop_all()
        return connection


def _read(connection: socket.socket, count: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(end))
        received = connection.recv(count - len(data))
        if not received:
            raise _LostError("the connection ended before the answer")
        data += received
    return bytes(data)


def _left(end: float) -> float:
    return max(0.001, end - time.monotonic())
