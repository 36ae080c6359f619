# SPDX-License-Identifier: Apache-2.0
"""The session server of a node.

It has the shared memory that the node's workers join, and a link to the controller's session
server.

The native library runs it in a thread (`csrc/core/session_server.h`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Settings:
    """The settings that all session servers of a session are opened with.

    Attributes
    ----------
    names : the names of the nodes, for error messages.
    ranks : the number of ranks of each node, in the order of the ranks.
    backend : the backend that moves data between the workers.
    timeout : the seconds after which waiting for a worker is an error.
    arena_limit : the most bytes of shared memory of one worker; 0 for the library's default.
    instruction_set : the instruction set of reductions; "auto" for the best of each machine.
    flat : whether sums across nodes have the same bits as on one machine.
    """

    names: Sequence[str]
    ranks: Sequence[int]
    backend: str
    timeout: float
    arena_limit: int
    instruction_set: str
    flat: bool

    @property
    def to_message(self) -> dict[str, Any]:
        """The settings as a JSON object for a message to an agent."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Return the settings of a `to_message`."""
        return cls(**{field.name: message[field.name] for field in fields(cls)})


def ranks_of_nodes(num_workers: int, count: int) -> list[list[int]]:
    """Return the ranks of each node's worker processes.

    Each node has consecutive ranks, and the first nodes have one more if needed. Rank 0 is left
    out, because it is a thread of the controller.
    """
    each, more = divmod(num_workers, count)
    ends = [node * each + min(node, more) for node in range(count + 1)]
    return [list(range(max(1, ends[node]), ends[node + 1])) for node in range(count)]


class NodeSessionServer:
    """The session server of this node. Creating it loads the native library, which takes a second.

    Parameters
    ----------
    settings : the settings of the session.
    node : the number of this node.
    link : the connection to the controller's session server. This one takes ownership of it.
    """

    def __init__(self, settings: Settings, node: int, link: socket.socket) -> None:
        from tvm_ipc.runtime.import_tvm_without_compiler import without_torch

        with without_torch():
            import tvm_ffi
        from tvm_ipc import runtime

        runtime.ready()
        native = tvm_ffi.get_global_func
        self._close = native("tvm_ipc.node.close")
        #: The largest MPI tag that the engine needs.
        self.largest_tag = int(native("tvm_ipc.node.largest_tag")())
        #: The argument that identifies this session server to the functions `tvm_ipc.node.*`.
        self.handle: Any = native("tvm_ipc.node.open")(
            settings.backend,
            list(settings.names),
            tvm_ffi.Shape(settings.ranks),
            node,
            settings.timeout,
            settings.arena_limit,
            settings.instruction_set,
            settings.flat,
        )
        native("tvm_ipc.node.attach")(self.handle, link.detach())
        #: The bytes that workers need to join the session server.
        self.invitation = bytes(native("tvm_ipc.node.invitation")(self.handle))

    def close(self) -> None:
        """Close the session server, after its workers have ended."""
        self._close(self.handle)
