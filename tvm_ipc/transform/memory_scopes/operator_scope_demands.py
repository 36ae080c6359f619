# SPDX-License-Identifier: Apache-2.0
"""The registry of memory scopes, and of the scopes that operators demand.

    demand_scope("mylib.peer_read", "ipc_memory", operand=1, writes=(2,))
    demand_scope("mylib.receive", "ipc_memory", operand=RESULT)

A demand names a packed function or a Relax operator ("relax.nn.conv2d"). The function does not
have to exist on the machine that compiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tvm_ipc import arguments, packed_functions
from tvm_ipc.packed_functions import ANY, IPC_MEMORY, RESULT

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
    """Memory scopes and the demands for them: those of `packed_functions`, and registered ones.

    Attributes
    ----------
    scopes : by name, whether the scope is transparent: code that was compiled for "global" memory
        can access it unchanged.
    added : by operator and operand, the registered demands.
    written : by packed function, the registered operands that it writes; negative indices count
        from the end.

    Examples
    --------
    Demands for one pipeline, without a change of those of the process:

    >>> from tvm_ipc.transform import PlanMemoryScopes, ScopeRegistry
    >>> registry = ScopeRegistry()
    >>> registry.demand_scope("mylib.peer_read", "ipc_memory", operand=1, writes=(2,))
    >>> plan = PlanMemoryScopes(registry=registry)
    """

    scopes: dict[str, bool] = field(
        default_factory=lambda: {GLOBAL: True, IPC_MEMORY: True, **dict.fromkeys(_OPAQUE, False)}
    )
    added: dict[str, dict[Operand, str]] = field(default_factory=dict)
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def demands(self, name: str, count: int) -> Mapping[Operand, str]:
        """Return the scopes that an operator demands when called with `count` arguments.

        Parameters
        ----------
        name : the name of the operator or packed function.
        count : the number of arguments of the call.

        Returns
        -------
        mapping
            The scope by the index of the argument, or by RESULT.
        """
        function, added = packed_functions.find(name), self.added.get(name, {})
        return {**function.demands(count), **added} if function is not None else added

    def writes(self, name: str, count: int) -> frozenset[int] | None:
        """Return which of `count` arguments a packed function may write; None if unknown.

        Parameters
        ----------
        name : the name of the operator or packed function.
        count : the number of arguments of the call.

        Returns
        -------
        frozenset of int or None
            The indices of the arguments; None if the function is not known.
        """
        function = packed_functions.find(name)
        if function is not None:
            return function.written(count)
        written = self.written.get(name)
        return None if written is None else _from_start(written, count)

    def register_scope(self, scope: str, *, transparent: bool = False) -> None:
        """Register a memory scope.

        Parameters
        ----------
        scope : its name.
        transparent : whether code that was compiled for "global" memory can access it unchanged.

        Raises
        ------
        ValueError
            The scope is registered already, and `transparent` differs.

        Examples
        --------
        >>> from tvm_ipc.transform import ScopeRegistry
        >>> registry = ScopeRegistry()
        >>> registry.register_scope("mylib.pinned", transparent=True)
        >>> registry.scopes["mylib.pinned"]
        True
        """
        scope = arguments.word("register_scope: scope", scope, "the name of a memory scope")
        transparent = arguments.flag("register_scope: transparent", transparent)
        registered = self.scopes.setdefault(scope, transparent)
        if registered != transparent:
            raise ValueError(
                f"register_scope: memory scope {scope!r} is already registered as "
                f"{'transparent' if registered else 'not transparent'}; pass "
                f"transparent={registered}, or choose another name"
            )

    def demand_scope(
        self, name: str, scope: str, *, operand: Operand = 0, writes: Iterable[int] | None = None
    ) -> None:
        """Declare that an operator or packed function needs an operand or its result in a scope.

        Parameters
        ----------
        name : the name of a packed function, or of a Relax operator, which starts with "relax.".
        scope : a registered scope (see `register_scope`), or ANY. An operand without a demand must
            be in "global" memory or in a transparent scope.
        operand : the index of an argument, or RESULT.
        writes : the indices of all operands that the function may write; negative ones count from
            the end. None: a packed function is assumed to write all of its operands.

        Raises
        ------
        ValueError
            The scope is unknown, or the demand contradicts another one of the same operand.

        Examples
        --------
        >>> from tvm_ipc.transform import ScopeRegistry
        >>> registry = ScopeRegistry()
        >>> registry.demand_scope("mylib.peer_read", "ipc_memory", operand=1, writes=(2,))
        >>> registry.demands("mylib.peer_read", 3)
        {1: 'ipc_memory'}
        """
        wanted = "the name of a packed function or of a Relax operator"
        name = arguments.word("demand_scope: name", name, wanted)
        scope = arguments.text("demand_scope: scope", scope, "the name of a memory scope, or ANY")
        if scope not in self.scopes and scope != ANY:
            raise ValueError(
                f"demand_scope: scope names the unknown memory scope {scope!r}; "
                f"{self.known_scopes()}"
            )
        if not isinstance(operand, str) or operand != RESULT:
            wanted = "the index of an argument, or RESULT"
            operand = arguments.integer("demand_scope: operand", operand, wanted)
        elif scope == ANY:
            raise ValueError("demand_scope: a result cannot be in ANY; pass the name of a scope")
        if writes is not None:
            wanted = "indices of arguments, from the end where negative, or None"
            writes = arguments.integers("demand_scope: writes", writes, wanted, -math.inf)
            writes = tuple(dict.fromkeys(writes))
            self._check_writes(name, writes)
        function = packed_functions.find(name)
        builtin = {} if function is None else function.demands(len(function.parameters))
        added = self.added.setdefault(name, {})
        existing = builtin.get(operand) or added.setdefault(operand, scope)
        if existing != scope:
            raise ValueError(
                f"demand_scope: {name} already demands {existing!r} for operand {operand!r}, so it "
                f"cannot demand {scope!r}; remove one of the demands"
            )
        if writes is not None:
            self.written.setdefault(name, writes)

    def _check_writes(self, name: str, writes: tuple[int, ...]) -> None:
        """Raise a ValueError if a function is already declared to write other operands."""
        function = packed_functions.find(name)
        existing = self.written.get(name, writes)
        normalized = frozenset(writes)
        if function is not None:
            count = len(function.parameters)
            existing = function.positions(function.writes, count)
            normalized = _from_start(writes, count)
        if set(existing) != normalized:
            raise ValueError(
                f"demand_scope: {name} is already declared to write operands {existing}, but "
                f"writes is {writes}; pass the same operands, or leave writes out"
            )

    def known_scopes(self) -> str:
        """Return the end of a message about an unknown scope, with the registered ones.

        Returns
        -------
        str
            The text.
        """
        return f"expected one of {', '.join(self.scopes)}; register others with register_scope"


def _from_start(indices: Iterable[int], count: int) -> frozenset[int]:
    """Return indices with negative ones, which count from the end, made positive."""
    return frozenset(k + count if k < 0 else k for k in indices)


#: The registry of passes that are created without one.
DEFAULT_REGISTRY: Final = ScopeRegistry()

register_scope = DEFAULT_REGISTRY.register_scope
demand_scope = DEFAULT_REGISTRY.demand_scope
