# SPDX-License-Identifier: Apache-2.0
"""Policies that choose the symbols of outlined functions, and which functions are shared.

`OutlineCompilerFunctions` asks a `GlobalSymbolCache` for the symbol of every new function literal,
and whether a literal may share the function of a structurally equal one. This module has three
policies. For a policy of your own, write a subclass with a `symbol` method; an instance may keep
state and may be used for several modules.
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
    """The location of a function literal."""

    function: str  #: the enclosing module-level function
    variable: str  #: the variable to which the literal is bound
    compiler: str  #: its `Codegen` attribute

    def __str__(self) -> str:
        """Return the text that names the function in messages."""
        return f"the {self.compiler!r} function {self.variable!r} in {self.function!r}"


class Names:
    """The names that are in use in a module."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def taken(self, name: str) -> bool:
        """Return whether a name is in use."""
        return name in self._taken

    def fresh(self, prefix: str) -> str:
        """Return `prefix_0`, or the prefix with the next free number, as a valid C identifier."""
        prefix = re.sub(r"\W", "_", prefix)
        prefix = f"_{prefix}" if prefix[:1].isdigit() else prefix
        number = self._next.get(prefix, 0)
        while f"{prefix}_{number}" in self._taken:
            number += 1
        self._next[prefix] = number
        return f"{prefix}_{number}"

    def take(self, name: str) -> None:
        """Mark a name as in use."""
        self._taken.add(name)


class GlobalSymbolCache(ABC):
    """The base class of policies for `OutlineCompilerFunctions`.

    Examples
    --------
    A policy of your own is a subclass:

    >>> import tvm
    >>> from tvm_ipc.transform import GlobalSymbolCache, OutlineCompilerFunctions
    >>> class Numbered(GlobalSymbolCache):
    ...     def symbol(self, function, site, names):
    ...         return names.fresh(f"kernel_{site.compiler}")
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor(("n", 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor(("n", 4), "float32")):
    ...             R.func_attr({"Codegen": "cc"})
    ...             return R.nn.relu(a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> outlined = OutlineCompilerFunctions(cache=Numbered())(mod)
    >>> sorted(var.name_hint for var in outlined.get_global_vars())
    ['kernel_cc_0', 'main']
    """

    @abstractmethod
    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the symbol of a function that is not shared with an earlier one.

        The pass raises an error if the symbol is already in use.

        Parameters
        ----------
        function : the function, with its free variables as parameters and the attributes of the
            literal.
        site : the location of the literal.
        names : the names that are in use.

        Returns
        -------
        str
            The symbol.
        """

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether a function may share the equal function that has this symbol.

        Parameters
        ----------
        symbol : the symbol of the other function.
        function : the function.
        site : the location of its literal.

        Returns
        -------
        bool
            True, unless a subclass decides otherwise.
        """
        return True


def _check_otherwise(where: str, otherwise: GlobalSymbolCache | None) -> GlobalSymbolCache | None:
    if otherwise is not None:
        wanted = "a GlobalSymbolCache or None"
        arguments.instance(f"{where}: otherwise", otherwise, GlobalSymbolCache, wanted)
    return otherwise


class FreshGlobalSymbols(GlobalSymbolCache):
    """Policy that numbers functions, replacing their own `global_symbol`.

    Parameters
    ----------
    prefix : the beginning of the names; None for the names of the enclosing function and of the
        compiler.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import FreshGlobalSymbols, OutlineCompilerFunctions
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor(("n", 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor(("n", 4), "float32")):
    ...             R.func_attr({"Codegen": "cc"})
    ...             return R.nn.relu(a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> outlined = OutlineCompilerFunctions(cache=FreshGlobalSymbols("kernel"))(mod)
    >>> sorted(var.name_hint for var in outlined.get_global_vars())
    ['kernel_0', 'main']
    """

    def __init__(self, prefix: str | None = None) -> None:
        wanted = "a name, or None to derive one"
        self._prefix = arguments.optional_text("FreshGlobalSymbols: prefix", prefix, wanted)

    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the next free name.

        Parameters
        ----------
        function : the function, with its free variables as parameters and the attributes of the
            literal.
        site : the location of the literal.
        names : the names that are in use.

        Returns
        -------
        str
            The symbol.
        """
        return names.fresh(self._prefix or f"{site.function}_{site.compiler}")


class ExistingGlobalSymbols(GlobalSymbolCache):
    """Policy that keeps the function's own `global_symbol`.

    Different functions with the same symbol are an error.

    Parameters
    ----------
    otherwise : the policy for functions without a `global_symbol`; None makes them an error.

    Examples
    --------
    The function of this program has no symbol, so it gets a new one:

    >>> import tvm
    >>> from tvm_ipc.transform import (
    ...     ExistingGlobalSymbols, FreshGlobalSymbols, OutlineCompilerFunctions
    ... )
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor(("n", 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor(("n", 4), "float32")):
    ...             R.func_attr({"Codegen": "cc"})
    ...             return R.nn.relu(a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> cache = ExistingGlobalSymbols(otherwise=FreshGlobalSymbols("kernel"))
    >>> outlined = OutlineCompilerFunctions(cache=cache)(mod)
    >>> sorted(var.name_hint for var in outlined.get_global_vars())
    ['kernel_0', 'main']
    """

    def __init__(self, otherwise: GlobalSymbolCache | None = None) -> None:
        self._otherwise = _check_otherwise("ExistingGlobalSymbols", otherwise)

    def symbol(self, function: relax.Function, site: Site, names: Names) -> str:
        """Return the function's own symbol.

        Parameters
        ----------
        function : the function, with its free variables as parameters and the attributes of the
            literal.
        site : the location of the literal.
        names : the names that are in use.

        Returns
        -------
        str
            The symbol.

        Raises
        ------
        TransformError
            The function has none, and `otherwise` is None.
        """
        own = own_symbol(function)
        if own is not None:
            return own
        if self._otherwise is None:
            raise TransformError(
                f"ExistingGlobalSymbols: {site} has no attribute {GLOBAL_SYMBOL!r}; set it, or "
                "pass ExistingGlobalSymbols(otherwise=FreshGlobalSymbols())"
            )
        return self._otherwise.symbol(function, site, names)

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether the function has this symbol or none.

        Parameters
        ----------
        symbol : the symbol of the other function.
        function : the function.
        site : the location of its literal.

        Returns
        -------
        bool
            Whether the functions may be one.
        """
        return own_symbol(function) in (None, symbol)


class MappedGlobalSymbols(GlobalSymbolCache):
    """Policy that looks symbols up in a mapping.

    Parameters
    ----------
    symbols : the symbol by the function's own `global_symbol`, or by `"function.variable"` of the
        literal's location.
    otherwise : the policy for functions that the mapping lacks; None makes them an error.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import MappedGlobalSymbols, OutlineCompilerFunctions
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor(("n", 4), "float32")):
    ...         @R.function
    ...         def inner(a: R.Tensor(("n", 4), "float32")):
    ...             R.func_attr({"Codegen": "cc"})
    ...             return R.nn.relu(a)
    ...         y = inner(x)
    ...         return y
    ... ''')
    >>> cache = MappedGlobalSymbols({"main.inner": "my_relu"})
    >>> outlined = OutlineCompilerFunctions(cache=cache)(mod)
    >>> sorted(var.name_hint for var in outlined.get_global_vars())
    ['main', 'my_relu']
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
        """Return the symbol in the mapping.

        Parameters
        ----------
        function : the function, with its free variables as parameters and the attributes of the
            literal.
        site : the location of the literal.
        names : the names that are in use.

        Returns
        -------
        str
            The symbol.

        Raises
        ------
        TransformError
            The function has none, and `otherwise` is None.
        """
        symbol = self._look_up(function, site)
        if symbol is not None:
            return symbol
        if self._otherwise is None:
            raise TransformError(
                f"MappedGlobalSymbols: there is no symbol for {site}; expected a key "
                f"{' or '.join(map(repr, _keys(function, site)))}, found "
                f"{', '.join(map(repr, self._symbols))}"
            )
        return self._otherwise.symbol(function, site, names)

    def shares(self, symbol: str, function: relax.Function, site: Site) -> bool:
        """Return whether the mapping has this symbol for the function or none.

        Parameters
        ----------
        symbol : the symbol of the other function.
        function : the function.
        site : the location of its literal.

        Returns
        -------
        bool
            Whether the functions may be one.
        """
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
