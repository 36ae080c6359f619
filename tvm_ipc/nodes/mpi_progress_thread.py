# SPDX-License-Identifier: Apache-2.0
"""The engine of a node: a thread of the agent that moves data to and from other nodes with MPI.

The native library (`csrc/engine/`) calls MPI in that thread, with the handles that mpi4py provides.
Only agents import this module, because it loads MPI.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from mpi4py import MPI

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.session_server_in_node_agent import NodeSessionServer
from tvm_ipc.pip_install_commands import install_extra


class Engine:
    """A thread that moves data between nodes until `close`. Node k is rank k of MPI.

    Parameters
    ----------
    server : the session server of this node.
    world : the communicator of all agents.
    """

    def __init__(self, server: NodeSessionServer, world: Any) -> None:
        import tvm_ffi

        native = tvm_ffi.get_global_func
        self._serve = native("tvm_ipc.node.serve_mpi")
        self._stop = native("tvm_ipc.node.stop")
        self._wire = native("tvm_ipc.node.ring")(server.handle)
        #: The exception that ended the thread.
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(world, server.largest_tag), name="tvm_ipc engine", daemon=True
        )
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """End the thread, and return whether it has ended in time.

        Operations that have started are abandoned. MPI may hang if other nodes cannot be reached;
        the memory that the thread uses must then stay.
        """
        self._stop(self._wire)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, world: Any, largest_tag: int) -> None:
        import tvm_ffi

        try:
            check(world, largest_tag)
            communicators = [world.Dup(), world.Dup()]  # freed when MPI is finalized
            for communicator in communicators:
                communicator.Set_errhandler(MPI.ERRORS_RETURN)
            handles = [
                ctypes.c_int64(MPI._handleof(item)).value for item in (*communicators, MPI.BYTE)
            ]
            sizes = [MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)]
            # The native function releases Python's global interpreter lock.
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
    """Raise if MPI lacks a feature that the engine needs."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise IPCError(
            f"{version()} grants the thread level {MPI.Query_thread()}, and an agent needs "
            f"{MPI.THREAD_SERIALIZED} (serialized), because it calls MPI from a second thread; use "
            f"another MPI, such as that of {install_extra('mpi')}"
        )
    max_tag = world.Get_attr(MPI.TAG_UB)
    if max_tag < largest_tag:
        raise IPCError(
            f"{version()} has tags up to {max_tag}, and messages between nodes need "
            f"{largest_tag}; use another MPI, such as that of {install_extra('mpi')}"
        )


def version() -> str:
    """Return the name and version of the loaded MPI."""
    return str(MPI.Get_library_version()).split(",")[0].strip()
