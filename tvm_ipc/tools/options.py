# SPDX-License-Identifier: Apache-2.0
"""Declare the options of a command once: the flag, the help, the default and the check.

A command's options are a dataclass whose fields are made by `option`:

    @dataclass(frozen=True)
    class Options:
        workers: int = option("number of workers", 2, type=int, metavar="N", check=between(1, 64))

The name of a field is that of its flag. `Parser(Options, ...)` has the flags, and its `read`
returns the object, or raises an `OptionError` with a message that names the flag and the value.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from tvm_ipc.packed_functions import AllReduceStrategy
from tvm_ipc.tools import terminal

#: Checks a value; the first argument is the flag, for the message.
Check = Callable[[str, Any], None]
T = TypeVar("T")
_KEY: Final = "option"
#: The values of `--strategy`.
STRATEGIES: Final = tuple(strategy.name.lower() for strategy in AllReduceStrategy)


class OptionError(Exception):
    """Raised for invalid options, with a message of one line."""


def option(
    text: str,
    default: Any = None,
    *,
    group: str | None = None,
    flag: str | None = None,
    check: Check | None = None,
    **settings: Any,
) -> Any:
    """Return the field of an option.

    Parameters
    ----------
    text : the help. The default is appended, unless there is none or the text mentions it.
    default : the value if the option is not specified.
    group : the group of options in the help that begins here; by default the last one.
    flag : the flag, if it is not the name of the field; an argument has a flag without dashes.
    check : a check of a specified value.
    settings : other arguments of `argparse.ArgumentParser.add_argument`.
    """
    if not (default is None or default is False or default == () or "(default: " in text):
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else f"{default}"
        text = f"{text} (default: {shown})"
    metadata = {"help": text, "group": group, "flag": flag, "check": check, "settings": settings}
    return dataclasses.field(default=default, metadata={_KEY: metadata})


def file_option(text: str, default: Path | None = None, **settings: Any) -> Any:
    """Return the field of an option whose value is the path of a file."""
    return option(text, default, type=Path, metavar="FILE", **settings)


def switch(text: str, **settings: Any) -> Any:
    """Return the field of an option without a value, which is off by default."""
    return option(text, False, action="store_true", **settings)


def number(
    text: str, default: int | None = None, least: int = 1, most: int | None = None, **settings: Any
) -> Any:
    """Return the field of an option whose value is an integer in a range."""
    check = at_least(least) if most is None else between(least, most)
    return option(text, default, **{"type": int, "metavar": "N", "check": check, **settings})


class Parser(terminal.Parser, Generic[T]):
    """The parser of a command whose options are the dataclass `options`."""

    def __init__(self, options: type[T], prog: str, description: str, epilog: str) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)
        self.options = options
        self._checks: dict[str, tuple[str, Check]] = {}
        container: argparse._ActionsContainer = self
        for field in dataclasses.fields(options):  # type: ignore[arg-type]
            if _KEY not in field.metadata:
                continue
            declared = field.metadata[_KEY]
            if declared["group"] is not None:
                container = self.add_argument_group(declared["group"])
            flags = (declared["flag"] or f"--{field.name.replace('_', '-')}").split()
            settings = {**declared["settings"], "help": declared["help"]}
            if flags[0].startswith("-"):
                # An option that is not specified gets the default of its field.
                settings |= {"dest": field.name, "default": argparse.SUPPRESS}
            container.add_argument(*flags, **settings)
            if declared["check"] is not None:
                self._checks[field.name] = (flags[0], declared["check"])

    def read(self, argv: Sequence[str]) -> T:
        """Return the options of a command line; `--help` prints and exits."""
        return self.options(**self.specified(argv))

    def specified(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the options that a command line specifies, by the names of their fields."""
        values = vars(self.parse_args(argv))
        for name, (flag, check) in self._checks.items():
            if name in values:
                check(flag, values[name])
        return values

    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError` instead of exiting."""
        raise OptionError(message)


def refuse(command: str, error: OptionError) -> int:
    """Print why options are wrong, and return the exit code."""
    terminal.print_err(f"{command}: {error} (see {command} --help)")
    return 2


def between(least: int, most: int) -> Check:
    """Check that a number, or each of several, is in a range."""

    def check(flag: str, value: Any) -> None:
        several = isinstance(value, (list, tuple))
        for number in value if several else [value]:
            if not least <= number <= most:
                verb = "has" if several else "is"
                raise OptionError(f"{flag} {verb} {number}; it must be {least} to {most}")

    return check


def at_least(least: int) -> Check:
    """Check that a number is not too small."""

    def check(flag: str, value: Any) -> None:
        if value < least:
            raise OptionError(f"{flag} is {value}; it must be at least {least}")

    return check


def amount(flag: str, value: float) -> None:
    """Check that a number is finite and not negative."""
    if not 0 <= value < math.inf:
        raise OptionError(f"{flag} is {value}; it must be a number, 0 or more")


def existing_file(flag: str, path: Path) -> None:
    """Check that a file exists."""
    if not path.is_file():
        raise OptionError(f"{flag} is {str(path)!r}, which is not a file; specify an existing file")


def writable_file(flag: str, path: Path) -> None:
    """Check that a file can be written, before minutes are spent on its content."""
    folder = path.parent
    if not path.name or path.is_dir():
        raise OptionError(f"{flag} is {str(path)!r}; it must be the name of a file to write")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"{flag} is {str(path)!r}; {folder} is not a writable folder")


def not_empty(remedy: str) -> Check:
    """Check that a text, or each of several, is not empty."""

    def check(flag: str, value: str | list[str]) -> None:
        if "" in (value if isinstance(value, list) else [value]):
            raise OptionError(f"{flag} is ''; {remedy}")

    return check
