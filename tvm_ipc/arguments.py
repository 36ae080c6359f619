# SPDX-License-Identifier: Apache-2.0
"""Checks of what callers pass. All of them say the same sentence:

    get_pipeline: num_groups is a number of groups, 1 or more, not '2'

`name` is the beginning of that sentence, `wanted` its middle. A value of another type is a
TypeError, one of the right type that cannot be meant a ValueError. A bool is no number; NumPy's
numbers are numbers. This module imports nothing of ours.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

#: Characters of a value in a message.
_SHOWN = 120


def show(value: object) -> str:
    """Return a value as messages show it."""
    try:
        text = repr(value)
    except Exception:  # somebody else's repr; what is wrong here is another thing
        text = object.__repr__(value)
    if "\n" in text or len(text) > _SHOWN:
        return f"{' '.join(text.split())[:_SHOWN]}... (a {type(value).__name__})"
    return text


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Return the error that a value has the wrong type."""
    return TypeError(f"{name} is {wanted}, not {show(value)}")


def wrong_value(name: str, wanted: str, value: object) -> ValueError:
    """Return the error that a value of the right type cannot be meant."""
    return ValueError(f"{name} is {wanted}, not {show(value)}")


def integer(name: str, value: object, wanted: str, least: float = 0, most: float = math.inf) -> int:
    """Return an integer from a range."""
    if isinstance(value, (bool, np.bool_, np.ndarray)):
        raise wrong_type(name, wanted, value)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, wanted, value) from None
    if not least <= number <= most:
        raise wrong_value(name, wanted, value)
    return number


def workers(where: str, name: str, count: object, num_groups: object, most: int) -> tuple[int, int]:
    """Return a number of workers, called `name`, and that of the groups they are divided into."""
    wanted = f"a number of workers, 1 to {most}"
    number = integer(f"{where}: {name}", count, wanted, 1, most)
    groups = integer(f"{where}: num_groups", num_groups, "a number of groups, 1 or more", 1)
    if number % groups:
        raise ValueError(
            f"{where}: {name} {number} cannot be divided into num_groups {groups} groups of equal "
            "size"
        )
    return number, groups


def integers(
    name: str, value: object, wanted: str, least: float = 0, most: float = math.inf
) -> tuple[int, ...]:
    """Return a sequence of integers from a range."""
    if isinstance(value, (str, bytes, dict, set)) or not isinstance(value, Iterable):
        raise wrong_type(name, wanted, value)
    found = []
    for one in value:
        try:
            found.append(integer(name, one, wanted, least, most))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is {wanted}, not {show(value)}") from None
    return tuple(found)


def above_zero(name: str, value: object, wanted: str) -> float:
    """Return a finite number above 0."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise wrong_type(name, wanted, value)
    if not 0 < (number := _as_float(value)) < math.inf:
        raise wrong_value(name, wanted, value)
    return number


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def flag(name: str, value: object) -> bool:
    """Return True or False, which numbers and texts are not."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, "True or False", value)
    return bool(value)


def text(name: str, value: object, wanted: str = "a name") -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str):
        raise wrong_type(name, wanted, value)
    if not value:
        raise wrong_value(name, wanted, value)
    return value


def word(name: str, value: object, wanted: str) -> str:
    """Return a text without spaces."""
    found = text(name, value, wanted)
    if found.split() != [found]:
        raise wrong_value(name, f"{wanted}, without spaces", value)
    return found


def optional_text(name: str, value: object, wanted: str = "a name or None") -> str | None:
    """Return a text that is not empty, or None."""
    return None if value is None else text(name, value, wanted)


def texts(name: str, value: object, wanted: str) -> tuple[str, ...]:
    """Return a collection of texts that are not empty."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise wrong_type(name, wanted, value)
    found = tuple(value)
    if not all(isinstance(one, str) for one in found):
        raise wrong_type(name, wanted, value)
    if not all(found):
        raise wrong_value(name, wanted, value)
    return found


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """Return one of some texts."""
    choices = tuple(choices)
    wanted = f"one of {', '.join(map(repr, choices))}"
    if text(name, value, wanted) not in choices:
        raise wrong_value(name, wanted, value)
    return str(value)


def instance(name: str, value: object, kind: type[Any], wanted: str) -> Any:
    """Return an object of a class."""
    if not isinstance(value, kind):
        raise wrong_type(name, wanted, value)
    return value


def function(name: str, value: object) -> Any:
    """Return what can be called."""
    if not callable(value):
        raise wrong_type(name, "a function", value)
    return value


def path(name: str, value: object, wanted: str) -> Path:
    """Return a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_type(name, wanted, value)
    if not str(value) or "\0" in str(value):
        raise wrong_value(name, wanted, value)
    return Path(value)
