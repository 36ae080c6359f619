# SPDX-License-Identifier: Apache-2.0
"""Admit the expected processes to a session, each once, and no others.

A connection is pending until its proof of the secret has arrived. Each gets `PENDING_SECONDS` in
total, and at most `MOST_PENDING` are open at once: a new connection replaces the oldest one. A
process whose connection was replaced tries again (`enter`). Connections without the secret can
therefore not keep out processes that know it. The rules that it shares with the native listener for
workers of one machine (`core/admit_workers_to_session.h`) are in `docs/internals.md`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tvm_ipc.errors import DeadlineError, IPCError
from tvm_ipc.nodes.handshake import (
    ANSWER,
    HEAD,
    HELLO,
    MOST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Key,
    PeerIdentity,
    pack_answer,
    same,
    settle,
    unpack_claim,
    versions,
)

if TYPE_CHECKING:
    from typing_extensions import Self

PENDING_SECONDS: Final = 10.0
MOST_PENDING: Final = 256
#: The most new connections to accept before the pending ones are read again.
_MAX_ACCEPTED_AT_ONCE: Final = 32
_log: Final = logging.getLogger("tvm_ipc.nodes")


@dataclass(eq=False)
class _PendingPeer:
    """A connection whose proof has not arrived yet, with the received bytes of message 2."""

    connection: socket.socket
    address: str
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    received: bytearray = field(default_factory=bytearray)

    def missing_bytes(self) -> int:
        """Return how many bytes to read next: 0 if message 2 is complete, and never beyond it.

        Bytes that the joiner sends after its proof stay in the connection.
        """
        if len(self.received) < HEAD.size:
            return HEAD.size - len(self.received)
        length: int = HEAD.unpack_from(self.received)[2]
        if length > MOST_BYTES:
            raise ValueError(f"announces {length} bytes, above {MOST_BYTES}")
        return HEAD.size + length + PROOF_BYTES - len(self.received)

    def split(self) -> tuple[bytes, bytes, bytes]:
        """Return the nonce, the claim and the proof of a complete message 2."""
        _, nonce, _ = HEAD.unpack_from(self.received)
        claim, proof = self.received[HEAD.size : -PROOF_BYTES], self.received[-PROOF_BYTES:]
        return nonce, bytes(claim), bytes(proof)


class Admission:
    """Listens on one address until all expected processes have joined.

    There is no thread: `poll` and `wait` do the work in the thread that calls them.

    Parameters
    ----------
    expected : the identities of the processes that may join.
    host : the numeric address of the interface to listen on; an address that stands for all
        interfaces is an error.
    runs : the versions that joiners must run; those of this process by default.
    """

    def __init__(
        self, key: Key, expected: Iterable[PeerIdentity], host: str, runs: str | None = None
    ) -> None:
        self._key = key
        self._runs = versions() if runs is None else runs
        self._expected = frozenset(expected)
        self.admitted: dict[PeerIdentity, socket.socket] = {}
        #: Processes that know the secret and were refused, mostly for other versions.
        self.refused: dict[PeerIdentity, str] = {}
        #: The number of connections that ended without a proof of the secret.
        self.pending = 0
        self._waiting: dict[_PendingPeer, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = _listen(host)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        _log.debug("listens on %s:%d for %d processes", *self.address, len(self._expected))

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has work, for another selector."""
        return int(self._selector.fileno())

    @property
    def missing(self) -> tuple[PeerIdentity, ...]:
        """The expected processes that have not joined."""
        missing = self._expected - self.admitted.keys()
        return tuple(sorted(missing, key=lambda peer: (peer.node, peer.role, peer.rank)))

    def poll(self, seconds: float = 0.0) -> dict[PeerIdentity, socket.socket]:
        """Serve connections for at most some seconds, and return those that joined meanwhile."""
        if self._listener is None:
            return {}
        before = set(self.admitted)
        for selected, _ in self._selector.select(self._pause(seconds)):
            if selected.data is None:
                self._accept()
            elif selected.data in self._waiting:  # `_accept` may have just closed it
                self._receive(selected.data)
        now = time.monotonic()
        for peer in [peer for peer in self._waiting if peer.deadline < now]:
            self._dismiss(peer, "took too long")
        if not self.missing:
            self.close()
        return {peer: c for peer, c in self.admitted.items() if peer not in before}

    def wait(self, timeout: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all processes have joined; `check` is called repeatedly, and may raise.

        Raises
        ------
        IPCError
            A process that knows the secret was refused, mostly because it runs other versions.
        DeadlineError
            A process did not join in time.
        """
        end = time.monotonic() + timeout
        while self.missing:
            self.poll(min(0.1, max(0.0, end - time.monotonic())))
            check()
            if self.refused:
                raise IPCError(describe_refused(self))
            if self.missing and time.monotonic() >= end:
                missing = ", ".join(map(str, self.missing))
                raise DeadlineError(
                    f"these processes did not join within {timeout:g} s: {missing}. "
                    f"{len(self.admitted)} of {len(self._expected)} joined at "
                    f"{self.address[0]}:{self.address[1]}; {self.pending} connections came "
                    "without the secret"
                )

    def close(self) -> None:
        """Stop listening, and close pending connections. Processes that have joined stay."""
        if self._listener is None:
            return
        for peer in list(self._waiting):
            self._dismiss(peer, "came too late")
        self._listener.close()
        self._listener = None
        self._selector.close()

    def __enter__(self) -> Self:
        """Return the listener, which already listens."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the listener and the connections that it has not admitted."""
        self.close()

    def _pause(self, seconds: float) -> float:
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return seconds
        return max(0.0, min(seconds, oldest.deadline - time.monotonic()))

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Without descriptors or memory, the oldest connection is closed, and the new one
                # is accepted in the next round. After other errors the new connection is gone.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if not self._waiting:
                        raise IPCError(f"no process can join at {self.address}: {error}") from error
                    self._dismiss(next(iter(self._waiting)), "was replaced by a new connection")
                continue
            if len(self._waiting) >= MOST_PENDING:
                self._dismiss(next(iter(self._waiting)), "was replaced by a new connection")
            deadline = time.monotonic() + PENDING_SECONDS
            peer = _PendingPeer(connection, f"{address[0]}:{address[1]}", deadline)
            connection.setblocking(False)
            self._waiting[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # The empty send buffer of a new connection has space for it.
                connection.send(HELLO + peer.nonce, socket.MSG_NOSIGNAL)
            except OSError as error:
                self._dismiss(peer, str(error))

    def _receive(self, peer: _PendingPeer) -> None:
        """Read what has arrived of message 2, and answer the message if it is complete."""
        try:
            while missing := peer.missing_bytes():
                data = peer.connection.recv(missing)
                if not data:
                    self._dismiss(peer, "disconnected")
                    return
                peer.received += data
                if not HELLO.startswith(peer.received[: len(HELLO)]):
                    self._dismiss(peer, "uses another protocol")
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._dismiss(peer, str(error))
            return
        self._answer(peer)

    def _answer(self, peer: _PendingPeer) -> None:
        """Admit a process whose proof is right, or refuse it."""
        nonce, claim, proof = peer.split()
        if not same(proof, self._key.of_joiner(peer.nonce, nonce, claim)):
            # The answer proves nothing to a process without the secret.
            answer = ANSWER.pack(0, 0) + bytes(PROOF_BYTES)
            self._dismiss(peer, "does not know the secret", answer)
            return
        try:
            identity, runs = unpack_claim(claim)
        except ValueError as error:  # the peer knows the secret, so this is a bug of this package
            self._dismiss(peer, f"sent a claim that cannot be read: {error}")
            return
        reason = self._reason_to_refuse(identity, runs)
        answer = pack_answer(self._key, (peer.nonce, nonce, claim), reason)
        if reason:
            _log.warning("refuses %s at %s: %s", identity, peer.address, reason)
            if identity in self.missing:
                self.refused[identity] = f"at {peer.address}: {reason}"
            self._dismiss(peer, reason, answer, knows_secret=True)
            return
        self._forget(peer)
        try:
            peer.connection.send(answer, socket.MSG_NOSIGNAL)
            settle(peer.connection)
        except OSError as error:
            peer.connection.close()
            _log.info("%s at %s left while it was admitted: %s", identity, peer.address, error)
            return
        self.admitted[identity] = peer.connection
        _log.debug("%s has joined from %s", identity, peer.address)

    def _reason_to_refuse(self, identity: PeerIdentity, runs: str) -> str:
        if runs != self._runs:
            reason = (
                f"it runs {runs}, and the controller {self._runs}; install the same on all nodes"
            )
            self.refused[identity] = reason
            return reason
        if identity not in self._expected:
            return "the session expects no such process"
        if identity in self.admitted:
            return "another process has joined under this identity"
        return ""

    def _dismiss(
        self, peer: _PendingPeer, reason: str, answer: bytes = b"", *, knows_secret: bool = False
    ) -> None:
        self._forget(peer)
        self.pending += not knows_secret
        with contextlib.suppress(OSError):
            if answer:
                peer.connection.send(answer, socket.MSG_NOSIGNAL)
                peer.connection.shutdown(socket.SHUT_WR)
        peer.connection.close()
        if not knows_secret:
            _log.info("dismisses the connection from %s, which %s", peer.address, reason)

    def _forget(self, peer: _PendingPeer) -> None:
        self._selector.unregister(peer.connection)
        del self._waiting[peer]


def describe_refused(admission: Admission) -> str:
    """Return a sentence for each process that was refused."""
    return "; ".join(f"{identity} {reason}" for identity, reason in admission.refused.items())


def _listen(host: str) -> socket.socket:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise IPCError(
            f"the controller cannot listen on {host!r}: pass the numeric address of one interface"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise IPCError(
            f"the controller cannot listen on {host}: pass the numeric address of one interface"
        )
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise IPCError(f"the controller cannot listen on {host}: {error}") from error
    return listener
