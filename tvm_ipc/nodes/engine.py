# SPDX-License-Identifier: Apache-2.0
"""The engine of a node: moves what its ranks have posted to other nodes, and what comes to them.

It is a thread of the node's agent, in which the native library (`csrc/engine/`) calls MPI: this
finds what MPI is there, and gives its handles. Only agents load this module, for it loads MPI.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from mpi4py import MPI

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.hub import NodeHub

_WORD: Final = 1 << 64


class Engine:
    """A thread that moves messages, from now on until `close`. Node k is rank k of MPI.

    Parameters
    ----------
    hub : of this node.
    world : MPI's, of the agents.
    """

    def __init__(self, hub: NodeHub, world: Any) -> None:
        import tvm_ffi

        native = tvm_ffi.get_global_func
        self._serve = native("tvm_ipc.node.serve_mpi")
        self._stop = native("tvm_ipc.node.stop")
        self._wire = native("tvm_ipc.node.wire")(hub.handle)
        #: What ended the thread; nothing moves any more then.
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(world, hub.largest_tag), name="tvm_ipc engine", daemon=True
        )
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """End the thread; what is under way stays where it is.

        Return whether it has ended in time: in MPI it may hang while other nodes are not reached,
        and what it uses has to stay then.
        """
        self._stop(self._wire)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, world: Any, largest_tag: int) -> None:
        import tvm_ffi

        try:
            check(world, largest_tag)
            communicators = [world.Dup(), world.Dup()]  # they live as long as MPI does
            for one in communicators:
                one.Set_errhandler(MPI.ERRORS_RETURN)
            handles = [signed(MPI._handleof(one)) for one in (*communicators, MPI.BYTE)]
            sizes = [MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)]
            # Python is left to other threads meanwhile.
            self._serve(
                self._wire,
                MPI.__file__,
                tvm_ffi.Shape(handles),
                tvm_ffi.Shape(sizes),
                MPI.ANY_TAG,
            )
        except Exception as error:
            self.error = error


def check(world: Any, largest_tag: int) -> None:
    """Raise if MPI does not have what an engine needs of it."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise IPCError(
            f"{version()} grants the thread level {MPI.Query_thread()}, and an agent needs "
            f"{MPI.THREAD_SERIALIZED} (serialized): it calls MPI from a thread of its own"
        )
    most = world.Get_attr(MPI.TAG_UB)
    if most < largest_tag:
        raise IPCError(
            f"{version()} has tags up to {most}, and messages between nodes need "
            f"{largest_tag}: use another MPI, such as that of pip install 'tvm-ipc[mpi]'"
        )


def version() -> str:
    """Return the name of the MPI that is here."""
    return str(MPI.Get_library_version()).split(",")[0].strip()


def signed(handle: int) -> int:
    """Return the number with these 64 bits that a signed one holds."""
    handle %= _WORD
    return handle - _WORD if handle >= _WORD // 2 else handle
