# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of public functions.

All errors have the form

    get_pipeline: num_groups is a number of groups, 1 or more, not '2'

where `name` is the beginning and `expected` the middle of the sentence. A value of another type
raises a TypeError, and an invalid value of the right type a ValueError. A bool is not a number;
NumPy's numbers are. Imports no other module of tvm_ipc.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: The most characters of a value in a message.
_MAX_QUOTED = 120
_PLURALS = {"axis": "axes", "entry": "entries", "pass": "passes", "process": "processes"}


def quote(value: object) -> str:
    """Return the text of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except Exception:  # an error in the value's __repr__ must not hide ours
        text = object.__repr__(value)
    if "\n" in text or len(text) > _MAX_QUOTED:
        return f"{' '.join(text.split())[:_MAX_QUOTED]}... (a {type(value).__name__})"
    return text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 worker" or "2 workers"."""
    return f"{number} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return _PLURALS.get(noun, f"{noun}s")


def listed(noun: str, names: Sequence[str], most: int = 5) -> str:
    """Return a clause that lists the names of things, for the end of a message.

    Examples
    --------
    >>> from tvm_ipc.arguments import listed
    >>> [listed("input", names) for names in ([], ["x"], ["x", "y"])]
    ['there is no input', "the only input is 'x'", "the inputs are 'x', 'y'"]
    >>> listed("input", ["a", "b", "c", "d"], most=2)
    "the inputs are 'a', 'b' and 2 more"
    """
    if not names:
        return f"there is no {noun}"
    if len(names) == 1:
        return f"the only {noun} is {names[0]!r}"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"the {_plural(noun)} are {', '.join(map(repr, names[:most]))}{more}"


def similar(names: Sequence[str]) -> str:
    """Return a clause that lists one or more names that are similar to a wrong one."""
    quoted = ", ".join(map(repr, names))
    return f"a similar name is {quoted}" if len(names) == 1 else f"similar names are {quoted}"


def ranks_below(number: int) -> str:
    """Return the ranks of a number of workers, such as "0" or "0 to 3"."""
    return "0" if number == 1 else f"0 to {number - 1}"


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Return the error for a value of the wrong type."""
    return TypeError(f"{name} is {expected}, not {quote(value)}")


def wrong_value(name: str, expected: str, value: object) -> ValueError:
    """Return the error for an invalid value of the right type."""
    return ValueError(f"{name} is {expected}, not {quote(value)}")


def integer(
    name: str, value: object, expected: str, least: float = 0, most: float = math.inf
) -> int:
    """Check an integer from a range, and return it."""
    if isinstance(value, (bool, np.bool_, np.ndarray)):
        raise wrong_type(name, expected, value)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, expected, value) from None
    if not least <= number <= most:
        raise wrong_value(name, expected, value)
    return number


def workers(where: str, name: str, count: object, num_groups: object, most: int) -> tuple[int, int]:
    """Check a number of workers, called `name`, and a number of groups, and return both."""
    expected = f"a number of workers, 1 to {most}"
    number = integer(f"{where}: {name}", count, expected, 1, most)
    groups = integer(f"{where}: num_groups", num_groups, "a number of groups, 1 or more", 1)
    if number % groups:
        raise ValueError(
            f"{where}: {name} {number} cannot be divided into num_groups {groups} groups of equal "
            "size"
        )
    return number, groups


def integers(
    name: str, value: object, expected: str, least: float = 0, most: float = math.inf
) -> tuple[int, ...]:
    """Check a sequence of integers from a range, and return it as a tuple."""
    if isinstance(value, (str, bytes, dict, set)) or not isinstance(value, Iterable):
        raise wrong_type(name, expected, value)
    checked = []
    for item in value:
        try:
            checked.append(integer(name, item, expected, least, most))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is {expected}, not {quote(value)}") from None
    return tuple(checked)


def above_zero(name: str, value: object, expected: str) -> float:
    """Check a finite number above 0, and return it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise wrong_type(name, expected, value)
    if not 0 < (number := _as_float(value)) < math.inf:
        raise wrong_value(name, expected, value)
    return number


def not_negative(name: str, value: object, expected: str, most: float = math.inf) -> float:
    """Check a finite number, 0 to `most`, and return it."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise wrong_type(name, expected, value)
    number = _as_float(value)
    if not 0 <= number <= most or math.isinf(number):
        raise wrong_value(name, expected, value)
    return number


def finite(name: str, value: object) -> float:
    """Check a finite number, and return it."""
    expected = "a finite number"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise wrong_type(name, expected, value)
    if not math.isfinite(number := _as_float(value)):
        raise wrong_value(name, expected, value)
    return number


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def flag(name: str, value: object) -> bool:
    """Check a bool, and return it; numbers and texts are errors."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, "True or False", value)
    return bool(value)


def text(name: str, value: object, expected: str = "a name") -> str:
    """Check a text that is not empty, and return it."""
    if not isinstance(value, str):
        raise wrong_type(name, expected, value)
    if not value:
        raise wrong_value(name, expected, value)
    return value


def word(name: str, value: object, expected: str) -> str:
    """Check a text without spaces, and return it."""
    checked = text(name, value, expected)
    if checked.split() != [checked]:
        raise wrong_value(name, f"{expected}, without spaces", value)
    return checked


def optional_text(name: str, value: object, expected: str = "a name or None") -> str | None:
    """Check a text that is not empty, or None, and return it."""
    return None if value is None else text(name, value, expected)


def texts(name: str, value: object, expected: str) -> tuple[str, ...]:
    """Check a collection of texts that are not empty, and return it as a tuple."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise wrong_type(name, expected, value)
    items = tuple(value)
    if not all(isinstance(item, str) for item in items):
        raise wrong_type(name, expected, value)
    if not all(items):
        raise wrong_value(name, expected, value)
    return items


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """Check a text from a list of choices, and return it."""
    choices = tuple(choices)
    expected = f"one of {', '.join(map(repr, choices))}"
    if text(name, value, expected) not in choices:
        raise wrong_value(name, expected, value)
    return str(value)


def instance(name: str, value: object, kind: type[Any], expected: str) -> Any:
    """Check an object of a class, and return it."""
    if not isinstance(value, kind):
        raise wrong_type(name, expected, value)
    return value


def function(name: str, value: object) -> Any:
    """Check a callable, and return it."""
    if not callable(value):
        raise wrong_type(name, "a function", value)
    return value


def path(name: str, value: object, expected: str) -> Path:
    """Check a path, and return it."""
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_type(name, expected, value)
    if not str(value) or "\0" in str(value):
        raise wrong_value(name, expected, value)
    return Path(value)
