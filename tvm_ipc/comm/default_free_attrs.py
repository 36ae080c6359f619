# SPDX-License-Identifier: Apache-2.0
"""Attributes of operators that are absent where they have their defaults.

TVM prints every field of a class of attributes, but of a dictionary only the entries that exist. So
calls have a dictionary, and a dataclass declares the names, types and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import tvm

from tvm_ipc import arguments

_Attributes = TypeVar("_Attributes")


def without_defaults(attributes: Any, also_without: Collection[str] = ()) -> tvm.ir.DictAttrs:
    """Return the attributes of a call: those of a dataclass that differ from their defaults."""
    entries = {
        field.name: value
        for field in fields(attributes)
        if not _is_default(value := getattr(attributes, field.name), field.default)
        and field.name not in also_without
    }
    return tvm.ir.make_node("ir.DictAttrs", **entries)


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def attributes_of(
    cls: Callable[..., _Attributes], operator: str, attributes: tvm.ir.DictAttrs
) -> _Attributes:
    """Return all attributes of a call as an object of the dataclass `cls`.

    `operator` begins the message of the error that is raised if they do not fit the dataclass.
    """
    types = _types(cls)
    if not isinstance(attributes, tvm.ir.DictAttrs):
        raise TypeError(
            f"{operator}: the call has attributes of the type {type(attributes).__name__}; "
            f"expected tvm.ir.DictAttrs with {', '.join(types)}"
        )
    entries = {str(name): _plain(value) for name, value in attributes.items()}
    for name, value in entries.items():
        if name not in types:
            raise ValueError(
                f"{operator}: the call has the attribute {name!r}; "
                f"{arguments.listed('attribute', list(types), len(types))}"
            )
        if types[name] and type(value) not in types[name]:
            wanted = " or ".join(
                "None" if kind is NoneType else kind.__name__ for kind in types[name]
            )
            raise arguments.wrong_type(f"{operator}: {name}", wanted, value)
    for name in _required(cls):
        if name not in entries:
            raise ValueError(f"{operator}: the call has no attribute {name!r}; add it")
    return cls(**entries)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


@cache
def _types(cls: Any) -> dict[str, tuple[type, ...]]:
    """Return the types of each field, none for a field of any type."""
    hints = get_type_hints(cls)
    return {
        field.name: () if hints[field.name] is Any else get_args(hints[field.name]) or (hint,)
        for field in fields(cls)
        if (hint := hints[field.name])
    }


@cache
def _required(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.default is MISSING)
