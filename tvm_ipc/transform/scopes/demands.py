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
from typing import Final, TypeAlias

from tvm_ipc import arguments, contract
from tvm_ipc.contract import ANY, IPC_MEMORY, RESULT

GLOBAL: Final = "global"

_OPAQUE: Final = (
    "global.texture",
    "global.texture-nhwc",
    "global.texture-weight",
    "global.vtcm",
)

#: The index of an operand, or RESULT.
Operand: TypeAlias = "int | str"


@dataclass
class ScopeRegistry:
    """Memory scopes and demands for them: those of the contract, and those that are added.

    Attributes
    ----------
    scopes : whether code that was compiled for "global" memory works on the scope unchanged
        (transparent), by its name.
    added : the scopes that operators were said to need, by their names and the operands.
    written : the operands that packed functions were said to write, from the end where negative.
    """

    scopes: dict[str, bool] = field(
        default_factory=lambda: {GLOBAL: True, IPC_MEMORY: True, **dict.fromkeys(_OPAQUE, False)}
    )
    added: dict[str, dict[Operand, str]] = field(default_factory=dict)
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def demands(self, name: str, count: int) -> Mapping[Operand, str]:
        """Return the scopes that an operator with so many arguments needs."""
        function, added = contract.find(name), self.added.get(name, {})
        return {**function.demands(count), **added} if function is not None else added

    def writes(self, name: str, count: int) -> frozenset[int] | None:
        """Return which of so many arguments a packed function may write, None: it may write all."""
        function = contract.find(name)
        if function is not None:
            return function.written(count)
        written = self.written.get(name)
        return None if written is None else _from_start(written, count)

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
        self, name: str, scope: str, *, operand: Operand = 0, writes: Iterable[int] | None = None
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
        if not isinstance(operand, str) or operand != RESULT:
            wanted = "the index of an argument, or RESULT"
            operand = arguments.integer("demand_scope: operand", operand, wanted)
        elif scope == ANY:
            raise ValueError("a result is in some scope, not in ANY")
        if writes is not None:
            wanted = "indices of arguments, from the end where negative, or None"
            writes = arguments.integers("demand_scope: writes", writes, wanted, -math.inf)
            writes = tuple(dict.fromkeys(writes))
            self._check_writes(name, writes)
        function = contract.find(name)
        known = {} if function is None else function.demands(len(function.parameters))
        added = self.added.setdefault(name, {})
        first = known.get(operand) or added.setdefault(operand, scope)
        if first != scope:
            raise ValueError(f"{name} already demands {first!r} where it should demand {scope!r}")
        if writes is not None:
            self.written.setdefault(name, writes)

    def _check_writes(self, name: str, writes: tuple[int, ...]) -> None:
        function, known, same = (
            contract.find(name),
            self.written.get(name, writes),
            frozenset(writes),
        )
        if function is not None:
            count = len(function.parameters)
            known, same = function.places(function.writes, count), _from_start(writes, count)
        if set(known) != same:
            raise ValueError(f"{name} is known to write operands {known}, not operands {writes}")

    def known_scopes(self) -> str:
        """Return a sentence that names the scopes, for messages."""
        return f"known are {', '.join(self.scopes)}; register_scope makes others known"


def _from_start(places: Iterable[int], count: int) -> frozenset[int]:
    """Return places that may be told from the end, where negative, as they are from the start."""
    return frozenset(k + count if k < 0 else k for k in places)


#: What passes use that are not given a registry of their own.
DEFAULT_REGISTRY: Final = ScopeRegistry()

register_scope = DEFAULT_REGISTRY.register_scope
demand_scope = DEFAULT_REGISTRY.demand_scope
