# SPDX-License-Identifier: Apache-2.0
"""Storages, the buffers that lie in them, and values.

A value of the program is what memory it may reach: a frozen set of storages and buffers for
whatever is no tuple, a tuple of values for a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm_ipc.transform.ir.polynomials import Number
from tvm_ipc.transform.safety.extents import Given


@dataclass(eq=False)
class Storage:
    """Memory that is allocated and freed as one."""

    name: str
    scope: str | None  #: None: unknown
    size: Number | None = None
    #: Memory of the caller, or memory that nothing is known of: it may be the same as another
    #: one that is external, and it is not freed here.
    external: bool = False


@dataclass(eq=False)
class Buffer:
    """Bytes of a storage that tensors lie in. Views and copies of the variable are the same."""

    name: str
    storage: Storage
    begin: Number | None = 0  #: None: unknown
    end: Number | None = None  #: None: unknown
    #: Whether a value only may be this buffer, as the result of an unknown call may be an argument.
    weak: bool = False
    #: The buffer that this one continues under another name after an `if`.
    origin: Buffer | None = None
    given: Given = ()  #: what is not negative, since the tensor is there


Leaf = frozenset[Storage | Buffer]
Value = Leaf | tuple[Any, ...]
NOTHING: Leaf = frozenset()


def objects(value: Value) -> Iterator[Storage | Buffer]:
    """Every storage and buffer that the value may reach."""
    if isinstance(value, frozenset):
        yield from value
    else:
        for part in value:
            yield from objects(part)


def storage_of(thing: Storage | Buffer) -> Storage:
    """Return the storage that a buffer lies in."""
    return thing if isinstance(thing, Storage) else thing.storage
