# SPDX-License-Identifier: Apache-2.0
"""Which symbol an outlined function gets, and which of them may be one.

`OutlineCompilerFunctions` asks a `GlobalSymbolCache` for the symbol of every function literal that
it has not seen before, and whether a literal may share the function of a structurally equal one.
Three policies are here; a policy of one's own is a subclass with a `symbol` method, which may keep
what it decided and be given to the pass for one module after the other.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError

GLOBAL_SYMBOL = "global_symbol"


@dataclass(frozen=True)
class Site:
    """Where a function literal stands."""

    function: str  #: the module-level function around it
    variable: str  #: the variable that it is bound to
    compiler: str  #: its `Codegen` attribute

    def __str__(self) -> str:
        return f"the {self.compiler!r} function {self.variable!r} in {self.function!r}"


class Names:
    """The names that a module has given away."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def taken(self, name: str) -> bool:
        """Return whether something of the module has this name."""
        return name in self._taken

    def fresh(self, prefix: str) -> str:
        """Return `prefix_0`, or with the next number that is free; a valid C identifier."""
        prefix = re.sub(r"\W", "_", prefix)
        prefix = f"_{prefix}" if prefix[:1].isdigit() else prefix
        number = self._next.get(prefix, 0)
        while f"{prefix}_{number}" in self._taken:
            number += 1
        self._next[prefix] = number
        return f"{prefix}_{number}"

    def take(self, name: str) -> None:
        """Give a name away."""
        self._taken.add(name)


class GlobalSymbolCache(ABC):
    """The policy of `OutlineCompilerFunctions`."""

    @abstractmethod
    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the symbol of a function that is not shared with an earlier one.

        `function` has its free variables among its parameters, and the attributes of the literal.
        A symbol that the module has already is a conflict, which the pass reports.
        """

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether a function may be the equal one that has this symbol already."""
        return True


def _check_otherwise(where: str, otherwise: GlobalSymbolCache | None) -> GlobalSymbolCache | None:
    if otherwise is not None:
        wanted = "a GlobalSymbolCache or None"
        arguments.instance(f"{where}: otherwise", otherwise, GlobalSymbolCache, wanted)
    return otherwise


class FreshGlobalSymbols(GlobalSymbolCache):
    """Fresh names: the prefix, or the names of the function around and of the compiler.

    The function's own `global_symbol` is replaced.
    """

    def __init__(self, prefix: str | None = None) -> None:
        wanted = "a name, or None to derive one"
        self._prefix = arguments.optional_text("FreshGlobalSymbols: prefix", prefix, wanted)

    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the next free name."""
        return names.fresh(self._prefix or f"{site.function}_{site.compiler}")


class ExistingGlobalSymbols(GlobalSymbolCache):
    """The function's own `global_symbol`; two that differ and have the same one are a conflict.

    Functions without one get their names from `otherwise`, or are refused where there is none.
    """

    def __init__(self, otherwise: GlobalSymbolCache | None = None) -> None:
        self._otherwise = _check_otherwise("ExistingGlobalSymbols", otherwise)

    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the function's own symbol."""
        own = own_symbol(function)
        if own is not None:
            return own
        if self._otherwise is None:
            raise TransformError(
                f"ExistingGlobalSymbols: {site} has no attribute {GLOBAL_SYMBOL!r}. Set one, or "
                "give ExistingGlobalSymbols(otherwise=FreshGlobalSymbols())"
            )
        return self._otherwise.symbol(function, site, names)

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether the function does not insist on another symbol."""
        return own_symbol(function) in (None, symbol)


class MappedGlobalSymbols(GlobalSymbolCache):
    """A map from what the function is called to its symbol.

    The keys are the function's own `global_symbol`, or `"function.variable"` of the place where the
    literal stands. Functions that the map lacks get their names from `otherwise`, or are refused.
    """

    def __init__(
        self, symbols: Mapping[str, str], otherwise: GlobalSymbolCache | None = None
    ) -> None:
        name, wanted = "MappedGlobalSymbols: symbols", "a mapping of names to symbols"
        if not isinstance(symbols, Mapping):
            raise arguments.wrong_type(name, wanted, symbols)
        for key, value in symbols.items():
            if not isinstance(key, str) or not isinstance(value, str) or not value:
                raise arguments.wrong_type(name, wanted, {key: value})
        self._symbols = dict(symbols)
        self._otherwise = _check_otherwise("MappedGlobalSymbols", otherwise)

    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Look the symbol up."""
        found = self._look_up(function, site)
        if found is not None:
            return found
        if self._otherwise is None:
            raise TransformError(
                f"MappedGlobalSymbols: no symbol for {site}; the map has no key "
                f"{' or '.join(map(repr, _keys(function, site)))}, only "
                f"{', '.join(map(repr, self._symbols))}"
            )
        return self._otherwise.symbol(function, site, names)

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether the map does not want another symbol for it."""
        return self._look_up(function, site) in (None, symbol)

    def _look_up(self, function: relax.Function, site: Site) -> str | None:
        keys = _keys(function, site)
        return next((self._symbols[key] for key in keys if key in self._symbols), None)


def _keys(function: relax.Function, site: Site) -> list[str]:
    own = own_symbol(function)
    return [*([] if own is None else [own]), f"{site.function}.{site.variable}"]


def own_symbol(function: relax.Function) -> str | None:
    """Return the `global_symbol` of a function, if it has one."""
    symbol = function.attrs.get(GLOBAL_SYMBOL) if function.attrs else None
    return None if symbol is None else str(symbol)
