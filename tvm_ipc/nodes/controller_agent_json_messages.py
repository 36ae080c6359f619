# SPDX-License-Identifier: Apache-2.0
"""Messages between the controller and an agent, after the handshake.

A message is a JSON object on one line of at most `MOST_BYTES`, with a field "kind".
"""

from __future__ import annotations

import errno
import json
import socket
from typing import Any, Final

from tvm_ipc.errors import IPCError

MOST_BYTES: Final = 1 << 16
#: Errors of a connection to a machine that cannot be reached any more.
_UNREACHABLE: Final = {
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN),
}


def pack(kind: str, **fields: Any) -> bytes:
    """Encode a message as a line."""
    line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
    if len(line) > MOST_BYTES:
        raise IPCError(f"a message {kind!r} has {len(line)} bytes; it may have {MOST_BYTES}")
    return line


def unpack(line: bytes) -> dict[str, Any]:
    """Decode the message of a line; raise IPCError if it is malformed."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise IPCError(f"a message is not valid JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise IPCError("a message is not valid: it must be a JSON object with a text 'kind'")
    return message


class Messages:
    """Sends and receives messages on a connection, which stays in blocking mode."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        #: Whether the other end has closed the connection, or is dead.
        self.ended = False
        #: Whether the other end cannot be reached any more, although it may still run.
        self.cut_off = False

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. If the other end is gone, `ended` is set, and nothing is raised."""
        try:
            self.connection.sendall(pack(kind, **fields), socket.MSG_NOSIGNAL)
        except OSError as error:
            self._end(error)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without waiting."""
        while not self.ended:
            try:
                data = self.connection.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._end(error)
                break
            self.ended = not data
            self._received += data
            if len(self._received) > MOST_BYTES:
                break
        *lines, rest = bytes(self._received).split(b"\n")
        if len(rest) >= MOST_BYTES:
            raise IPCError(f"a message has more than {MOST_BYTES} bytes")
        self._received[:] = rest
        return [unpack(line) for line in lines]

    def _end(self, error: OSError) -> None:
        self.ended = True
        self.cut_off = self.cut_off or error.errno in _UNREACHABLE
