# SPDX-License-Identifier: Apache-2.0
"""Which memory scopes there are, and which operators demand one of an operand or result.

    demand_scope("mylib.peer_read", "ipc_memory", operand=1, writes=(2,))
    demand_scope("mylib.receive", "ipc_memory", operand=RESULT)

A name is that of a packed function or of a Relax operator ("relax.nn.conv2d"). What is said here
is about programs; it is the same whether or not the function exists on the machine that compiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.contract import IPC_MEMORY

GLOBAL: Final = "global"

#: Stands for the result in the place of an operand's index.
RESULT: Final = -1

#: Stands for a scope where an operand may be in every one, opaque ones too.
ANY: Final = "*"

_OPAQUE: Final = (
    "global.texture",
    "global.texture-nhwc",
    "global.texture-weight",
    "global.vtcm",
)

#: Operands that packed functions of Disco and of ours write, from the end where negative. Others
#: may write all they are given.
_WRITES: Final[Mapping[str, tuple[int, ...]]] = {
    "runtime.disco.allreduce": (3,),
    "runtime.disco.cuda_ipc.custom_allreduce": (2,),
    "tvm_ipc.allreduce": (5,),
    "runtime.disco.allgather": (2,),
    "runtime.disco.broadcast_from_worker0": (2,),
    "runtime.disco.scatter_from_worker0": (2,),
    "runtime.disco.gather_to_worker0": (2,),
    "runtime.disco.recv_from_worker0": (0,),
    "runtime.disco.send_to_next_group": (),
    "runtime.disco.recv_from_prev_group": (0,),
    "runtime.disco.send_to_worker": (),
    "runtime.disco.recv_from_worker": (0,),
    "tvm_ipc.copy": (1,),
    "tvm_ipc.blas.matmul": (-1,),
}


@dataclass
class ScopeRegistry:
    """Memory scopes and demands for them.

    Attributes
    ----------
    scopes : whether code that was compiled for "global" memory works on the scope unchanged
        (transparent), by its name.
    demands : the scope that an operator needs, by its name and the operand's index.
    writes : the operands that a packed function may write, where that is known.
    """

    scopes: dict[str, bool] = field(
        default_factory=lambda: {GLOBAL: True, IPC_MEMORY: True, **dict.fromkeys(_OPAQUE, False)}
    )
    demands: dict[str, dict[int, str]] = field(
        default_factory=lambda: {
            "runtime.disco.cuda_ipc.custom_allreduce": {0: IPC_MEMORY},
            "tvm_ipc.allreduce": {0: IPC_MEMORY},
            "tvm_ipc.copy": {0: ANY, 1: ANY},
        }
    )
    writes: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(_WRITES))

    def register_scope(self, scope: str, *, transparent: bool = False) -> None:
        """Make a scope known; transparent says that code for "global" memory works on it."""
        scope = arguments.word("register_scope: scope", scope, "the name of a memory scope")
        transparent = arguments.flag("register_scope: transparent", transparent)
        known = self.scopes.setdefault(scope, transparent)
        if known != transparent:
            raise ValueError(
                f"memory scope {scope!r} is known already, and {'' if known else 'not '}transparent"
            )

    def demand_scope(
        self, name: str, scope: str, *, operand: int = 0, writes: Iterable[int] | None = None
    ) -> None:
        """Say that an operator or packed function needs an operand, or its result, in a scope.

        Parameters
        ----------
        name : of a packed function, or of a Relax operator, which starts with "relax.".
        scope : a scope that is known, see `register_scope`; or ANY. An operand that nothing is said
            of must be in "global" memory, or in a scope that code for it works on.
        operand : its index among the arguments, or RESULT.
        writes : indices of all operands that the function may write, from the end where negative.
            Without it a packed function is taken to write everything that it is given.
        """
        wanted = "the name of a packed function or of a Relax operator"
        name = arguments.word("demand_scope: name", name, wanted)
        scope = arguments.text("demand_scope: scope", scope, "the name of a memory scope, or ANY")
        if scope not in self.scopes and scope != ANY:
            raise ValueError(f"unknown memory scope {scope!r}; {self.known_scopes()}")
        wanted = "the index of an argument, or RESULT"
        operand = arguments.integer("demand_scope: operand", operand, wanted, RESULT)
        if writes is not None:
            wanted = "indices of arguments, from the end where negative, or None"
            writes = arguments.integers("demand_scope: writes", writes, wanted, -math.inf)
            writes = tuple(dict.fromkeys(writes))
            if set(known := self.writes.get(name, writes)) != set(writes):
                raise ValueError(
                    f"{name} is known to write operands {known}, not operands {writes}"
                )
        if operand == RESULT and scope == ANY:
            raise ValueError("a result is in some scope, not in ANY")
        demands = self.demands.setdefault(name, {})
        if demands.setdefault(operand, scope) != scope:
            raise ValueError(
                f"{name} already demands {demands[operand]!r} where it should demand {scope!r}"
            )
        if writes is not None:
            self.writes.setdefault(name, tuple(writes))

    def known_scopes(self) -> str:
        """Return a sentence that names the scopes, for messages."""
        return f"known are {', '.join(self.scopes)}; register_scope makes others known"


#: What passes use that are not given a registry of their own.
DEFAULT_REGISTRY: Final = ScopeRegistry()

register_scope = DEFAULT_REGISTRY.register_scope
demand_scope = DEFAULT_REGISTRY.demand_scope
