# SPDX-License-Identifier: Apache-2.0
"""What packed functions do to memory, by name. What is not listed may do anything.

Collectives are known by Disco's names, with and without the name of a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from tvm_ipc.contract import AllReduceStrategy, CollectiveFlag


@dataclass(frozen=True)
class Collective:
    """A call in which ranks exchange data."""

    send: int | None  #: the place of what is read
    recv: int | None  #: the place of what is written
    in_group: int | None = None  #: the place of the flag; None: all workers
    #: Whether no rank returns before every rank has entered.
    meets: bool = False
    strategy: int | None = None  #: place; such a collective reads `send` where peers wrote it
    flags: int | None = None  #: place

    def team(self, args: Any) -> bool | None:
        """Whether it is within groups; None where that is not known."""
        if self.in_group is None:
            return False
        value = constant(args[self.in_group])
        return None if value is None else bool(value)

    def leaves_pending(self, args: Any, assume_no_exit_barrier: bool) -> bool:
        """Whether peers may still read `send` when it returns."""
        if self.strategy is None:
            return False
        if self.flags is not None:
            flags = constant(args[self.flags])
            if flags is None or flags & CollectiveFlag.NO_EXIT_BARRIER:
                return True
        # Upstream's kernels wait for nobody at their end; a ring is not theirs.
        return assume_no_exit_barrier and constant(args[self.strategy]) != AllReduceStrategy.RING


def constant(expr: Any) -> int | None:
    """Return an integer argument, None where it is not a constant."""
    return int(expr.value) if isinstance(expr, (tvm.ir.GenericConst, tirx.IntImm)) else None


_DISCO = {
    "allreduce": Collective(send=0, in_group=2, recv=3, meets=True),
    "allgather": Collective(send=0, in_group=1, recv=2, meets=True),
    "broadcast_from_worker0": Collective(send=0, in_group=1, recv=2),
    "scatter_from_worker0": Collective(send=0, in_group=1, recv=2),
    "gather_to_worker0": Collective(send=0, in_group=1, recv=2),
    "send_to_next_group": Collective(send=0, recv=None),
    "send_to_worker": Collective(send=0, recv=None),
    "recv_from_worker0": Collective(send=None, recv=0),
    "recv_from_prev_group": Collective(send=None, recv=0),
    "recv_from_worker": Collective(send=None, recv=0),
}

_COLLECTIVES = {
    "runtime.disco.cuda_ipc.custom_allreduce": Collective(send=0, recv=2, meets=True, strategy=1),
    "tvm_ipc.allreduce": Collective(send=0, in_group=2, recv=5, meets=True, strategy=3, flags=4),
}


def find_collective(name: str) -> Collective | None:
    """Return what a packed function does, if it is a collective."""
    if name in _COLLECTIVES:
        return _COLLECTIVES[name]
    if not name.startswith("runtime.disco."):
        return None
    parts = name.split(".")[2:]
    return _DISCO.get(parts[-1]) if len(parts) <= 2 else None


#: Functions whose result is, or may be, their first argument in another shape.
VIEWS = frozenset({"vm.builtin.reshape", "vm.builtin.copy", "vm.builtin.to_device"})

#: Functions that only read, and give no memory that they were given.
READERS = frozenset(
    {
        "vm.builtin.match_shape",
        "vm.builtin.match_prim_value",
        "vm.builtin.check_tensor_info",
        "vm.builtin.check_shape_info",
        "vm.builtin.check_prim_value_info",
        "vm.builtin.check_tuple_info",
        "vm.builtin.check_func_info",
        "vm.builtin.shape_of",
        "vm.builtin.tensor_to_shape",
        "vm.builtin.make_shape",
        "vm.builtin.make_prim_value",
        "vm.builtin.alloc_shape_heap",
        "vm.builtin.read_if_cond",
        "vm.builtin.assert",
        "vm.builtin.print",
        "vm.builtin.null_value",
        "tvm_ipc.arena_offset",
        "runtime.disco.worker_id",
        "runtime.disco.worker_rank",
    }
)

#: Operators whose result is, or may be, their first argument.
VIEW_OPERATORS = frozenset(
    {
        "relax.reshape",
        "relax.memory.view",
        "relax.memory.ensure_zero_offset",
        "relax.builtin.stop_lift_params",
        "relax.to_vdevice",
        "relax.hint_on_device",
    }
)

#: Operators that may do anything to what they are given.
UNKNOWN_OPERATORS = frozenset(
    {
        "relax.invoke_closure",
        "relax.invoke_pure_closure",
        "relax.call_inplace_packed",
        "relax.call_py_func",
        "relax.run_backend",
        "relax.vm.invoke_closure",
    }
)
