# SPDX-License-Identifier: Apache-2.0
"""Where the controller lets in the processes that it expects, each once, and nobody else.

Who connects is a stranger until its proof is there. Strangers get `STRANGER_SECONDS` in all,
however they use them, and there are `MOST_STRANGERS` at once: the one that has been there the
longest goes when another comes. Whom that hits tries again (`enter`). So those who know the secret
get in at once, whatever others send, and however many they are.
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
    Place,
    pack_answer,
    same,
    settle,
    unpack_claim,
    versions,
)

if TYPE_CHECKING:
    from typing_extensions import Self

STRANGER_SECONDS: Final = 10.0
MOST_STRANGERS: Final = 256
#: New connections taken at a time, before those that are there are heard again.
_AT_A_TIME: Final = 32
_log: Final = logging.getLogger("tvm_ipc.nodes")


@dataclass(eq=False)
class _Stranger:
    """Somebody who has connected, and what came of message 2."""

    connection: socket.socket
    where: str
    until: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    heard: bytearray = field(default_factory=bytearray)

    def wanted(self) -> int:
        """How many bytes of message 2 are missing, as far as is known; never more than that.

        What the joiner sends after its proof stays in the connection.
        """
        if len(self.heard) < HEAD.size:
            return HEAD.size - len(self.heard)
        length: int = HEAD.unpack_from(self.heard)[2]
        if length > MOST_BYTES:
            raise ValueError(f"announces {length} bytes, above {MOST_BYTES}")
        return HEAD.size + length + PROOF_BYTES - len(self.heard)

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Return nonce, claim and proof of message 2, which is whole."""
        _, nonce, _ = HEAD.unpack_from(self.heard)
        return nonce, bytes(self.heard[HEAD.size : -PROOF_BYTES]), bytes(self.heard[-PROOF_BYTES:])


class Door:
    """Listens on one address until all that are expected have joined.

    Nothing runs by itself: `poll` and `wait` do the work, in the thread that calls them.

    Parameters
    ----------
    expected : the places that may be taken.
    host : the address of the interface to listen on; one of all interfaces is refused.
    runs : what joiners must run; that of this process by default.
    """

    def __init__(
        self, key: Key, expected: Iterable[Place], host: str, runs: str | None = None
    ) -> None:
        self._key = key
        self._runs = versions() if runs is None else runs
        self._expected = frozenset(expected)
        self.joined: dict[Place, socket.socket] = {}
        #: Proven, but let in nowhere: other versions above all.
        self.refused: dict[Place, str] = {}
        #: How many came without the secret, or left before they had shown it.
        self.strangers = 0
        self._waiting: dict[_Stranger, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = _listen(host)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        _log.debug("listens on %s:%d for %d places", *self.address, len(self._expected))

    def fileno(self) -> int:
        """Return what a selector of others may wait on: it is readable when `poll` has work."""
        return int(self._selector.fileno())

    @property
    def missing(self) -> tuple[Place, ...]:
        """The places that nobody has taken."""
        left = self._expected - self.joined.keys()
        return tuple(sorted(left, key=lambda place: (place.node, place.role, place.rank)))

    def poll(self, seconds: float = 0.0) -> dict[Place, socket.socket]:
        """Hear who is there, for at most so long; return who has joined since the last call."""
        if self._listener is None:
            return {}
        before = set(self.joined)
        for selected, _ in self._selector.select(self._pause(seconds)):
            if selected.data is None:
                self._accept()
            elif selected.data in self._waiting:  # `_accept` may just have sent it away
                self._hear(selected.data)
        now = time.monotonic()
        for stranger in [one for one in self._waiting if one.until < now]:
            self._dismiss(stranger, "took too long")
        if not self.missing:
            self.close()
        return {place: c for place, c in self.joined.items() if place not in before}

    def wait(self, timeout: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all have joined; `check` is called now and then, and may raise.

        Raises
        ------
        IPCError
            Somebody proved the secret and runs other versions.
        DeadlineError
            Somebody has not come in time.
        """
        end = time.monotonic() + timeout
        while self.missing:
            self.poll(min(0.1, max(0.0, end - time.monotonic())))
            check()
            if self.refused:
                raise IPCError("; ".join(f"{who} {why}" for who, why in self.refused.items()))
            if self.missing and time.monotonic() >= end:
                missing = ", ".join(map(str, self.missing))
                raise DeadlineError(
                    f"did not join within {timeout:g} s: {missing}. {len(self.joined)} of "
                    f"{len(self._expected)} did, at {self.address[0]}:{self.address[1]}; "
                    f"{self.strangers} connections came without the secret"
                )

    def close(self) -> None:
        """Stop listening and send strangers away; those that have joined stay."""
        if self._listener is None:
            return
        for stranger in list(self._waiting):
            self._dismiss(stranger, "came when all had joined, or too late")
        self._listener.close()
        self._listener = None
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pause(self, seconds: float) -> float:
        first = next(iter(self._waiting), None)  # the others came later
        if first is None:
            return seconds
        return max(0.0, min(seconds, first.until - time.monotonic()))

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_AT_A_TIME):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Without descriptors or memory the oldest goes, and the new one waits for the next
                # round; other errors are those of a connection that has gone again.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if not self._waiting:
                        raise IPCError(f"nobody can join at {self.address}: {error}") from error
                    self._dismiss(next(iter(self._waiting)), "made room for another")
                continue
            if len(self._waiting) >= MOST_STRANGERS:
                self._dismiss(next(iter(self._waiting)), "made room for another")
            until = time.monotonic() + STRANGER_SECONDS
            stranger = _Stranger(connection, f"{address[0]}:{address[1]}", until)
            connection.setblocking(False)
            self._waiting[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.send(HELLO + stranger.nonce)  # the buffer of a new connection takes it
            except OSError as error:
                self._dismiss(stranger, str(error))

    def _hear(self, stranger: _Stranger) -> None:
        try:
            while wanted := stranger.wanted():
                piece = stranger.connection.recv(wanted)
                if not piece:
                    self._dismiss(stranger, "left")
                    return
                stranger.heard += piece
                if not HELLO.startswith(stranger.heard[: len(HELLO)]):
                    self._dismiss(stranger, "speaks something else")
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._dismiss(stranger, str(error))
            return
        self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        nonce, claim, proof = stranger.parts()
        if not same(proof, self._key.of_joiner(stranger.nonce, nonce, claim)):
            # It hears that it was wrong, from somebody who proves nothing to it.
            told = ANSWER.pack(0, 0) + bytes(PROOF_BYTES)
            self._dismiss(stranger, "does not know the secret", told)
            return
        try:
            place, runs = unpack_claim(claim)
        except ValueError as error:  # with the secret: a mistake of ours
            self._dismiss(stranger, f"claims what is no place: {error}")
            return
        reason = self._reason_against(place, runs)
        answer = pack_answer(self._key, (stranger.nonce, nonce, claim), reason)
        if reason:
            _log.warning("refuses %s at %s: %s", place, stranger.where, reason)
            if place in self.missing:
                self.refused[place] = f"at {stranger.where}: {reason}"
            self._dismiss(stranger, reason, answer, known=True)
            return
        self._forget(stranger)
        try:
            stranger.connection.send(answer)
            settle(stranger.connection)
        except OSError as error:
            stranger.connection.close()
            _log.info("%s at %s left as it was let in: %s", place, stranger.where, error)
            return
        self.joined[place] = stranger.connection
        _log.debug("%s has joined from %s", place, stranger.where)

    def _reason_against(self, place: Place, runs: str) -> str:
        if runs != self._runs:
            reason = (
                f"it runs {runs}, and the controller {self._runs}; install the same on all nodes"
            )
            self.refused[place] = reason
            return reason
        if place not in self._expected:
            return "the session has no such place"
        if place in self.joined:
            return "somebody else has joined as that already"
        return ""

    def _dismiss(
        self, stranger: _Stranger, why: str, told: bytes = b"", *, known: bool = False
    ) -> None:
        self._forget(stranger)
        self.strangers += not known
        with contextlib.suppress(OSError):
            if told:
                stranger.connection.send(told)
                stranger.connection.shutdown(socket.SHUT_WR)
        stranger.connection.close()
        if not known:
            _log.info("a stranger at %s: %s", stranger.where, why)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._waiting[stranger]


def _listen(host: str) -> socket.socket:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise IPCError(
            f"the controller listens on the numeric address of one interface; {host!r} is none"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise IPCError(f"the controller listens on one interface; {host} is not the address of one")
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise IPCError(f"the controller cannot listen on {host}: {error}") from error
    return listener
