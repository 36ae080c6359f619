# SPDX-License-Identifier: Apache-2.0
"""What the controller and an agent say to each other, once they have proven who they are.

A message is one line of JSON, an object with at most `MOST_BYTES` and a field "what".
"""

from __future__ import annotations

import errno
import json
import socket
from typing import Any, Final

from tvm_ipc.errors import IPCError

MOST_BYTES: Final = 1 << 16
#: Errors of a connection to a machine that is not reached any more.
_NO_WAY: Final = {
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN),
}


def pack(what: str, **fields: Any) -> bytes:
    """Return a message as a line."""
    line = json.dumps({"what": what, **fields}).encode() + b"\n"
    if len(line) > MOST_BYTES:
        raise IPCError(f"a message {what!r} has {len(line)} bytes; it may have {MOST_BYTES}")
    return line


def unpack(line: bytes) -> dict[str, Any]:
    """Return the message of a line; IPCError if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise IPCError(f"a message is no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("what"), str):
        raise IPCError("a message is no object that says what it is")
    return message


class Messages:
    """The messages of a connection, which stays one that waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._heard = bytearray()
        #: The other end has closed it, or is gone.
        self.ended = False
        #: The other end is not reached any more; it may go on.
        self.cut_off = False

    def send(self, what: str, **fields: Any) -> None:
        """Send a message; whether the other end is there, the next `hear` tells."""
        try:
            self.connection.sendall(pack(what, **fields))
        except OSError as error:
            self._end(error)

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages that are there, without waiting."""
        while not self.ended:
            try:
                data = self.connection.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._end(error)
                break
            self.ended = not data
            self._heard += data
            if len(self._heard) > MOST_BYTES:
                break
        *lines, rest = bytes(self._heard).split(b"\n")
        if len(rest) >= MOST_BYTES:
            raise IPCError(f"a message has more than {MOST_BYTES} bytes")
        self._heard[:] = rest
        return [unpack(line) for line in lines]

    def _end(self, error: OSError) -> None:
        self.ended = True
        self.cut_off = self.cut_off or error.errno in _NO_WAY
