# SPDX-License-Identifier: Apache-2.0
"""The hub of a node, which its workers join: shared memory of theirs, and a link to the controller.

The native library has it, and runs it in a thread of its own (`csrc/core/hub.h`).
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
    """What all hubs of a session are opened with.

    Attributes
    ----------
    names : what errors call the nodes.
    ranks : how many ranks each node has, in the order of the ranks.
    backend : what moves data between the workers.
    timeout : seconds after which a wait for a worker ends in an error.
    arena_limit : the most bytes of shared memory of one worker; 0 leaves it to the library.
    instruction_set : of the reductions; "auto" is the best of each machine.
    flat : whether sums across nodes have one machine's bits.
    """

    names: Sequence[str]
    ranks: Sequence[int]
    backend: str
    timeout: float
    arena_limit: int
    instruction_set: str
    flat: bool

    @property
    def told(self) -> dict[str, Any]:
        """All of it, as it goes to agents."""
        return asdict(self)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Self:
        """Return what `told` said."""
        return cls(**{field.name: told[field.name] for field in fields(cls)})


class NodeHub:
    """The hub of this node, which has to be loaded: it takes a second.

    Parameters
    ----------
    link : the connection to the controller's hub, which is the hub's from now on.
    """

    def __init__(self, settings: Settings, node: int, link: socket.socket) -> None:
        from tvm_ipc.runtime.importing import without_torch

        with without_torch():
            import tvm_ffi
        from tvm_ipc import runtime

        runtime.ready()
        native = tvm_ffi.get_global_func
        self._close = native("tvm_ipc.node.close")
        #: What the engine has to be able to tell apart.
        self.largest_tag = int(native("tvm_ipc.node.largest_tag")())
        #: What the functions `tvm_ipc.node.*` want.
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
        #: What workers join it with.
        self.invitation = bytes(native("tvm_ipc.node.invitation")(self.handle))

    def close(self) -> None:
        """Close it: no worker is left."""
        self._close(self.handle)
