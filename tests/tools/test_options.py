# SPDX-License-Identifier: Apache-2.0
"""One declaration of an option gives its flag, its help, its default and its check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tvm_ipc.tools.options import (
    OptionError,
    Parser,
    file_option,
    not_empty,
    number,
    option,
    refuse,
    switch,
)


@dataclass(frozen=True)
class Options:
    folder: str | None = option("a folder", flag="folder", nargs="?")
    most_tokens: int = number("number of tokens", 7, group="generation", most=9)
    sizes: tuple[int, ...] = number("some sizes", (1, 2), nargs="+", most=3)
    loud: bool = switch("be loud", flag="--loud -l")
    stop: tuple[str, ...] = option("a text", (), action="append", check=not_empty("leave it out"))
    out: Path = file_option("a file", Path("out.json"))
    explicit: frozenset[str] = frozenset()  # no option


def parser() -> Parser[Options]:
    return Parser(Options, "tool", "A tool.", "The end.")


def test_unspecified_options_have_the_defaults_of_their_fields() -> None:
    assert parser().read([]) == Options()
    assert parser().specified([]) == {"folder": None}
    read = parser().read(["here", "--most-tokens", "9", "-l", "--stop", "a", "--stop", "b"])
    assert read == Options("here", 9, loud=True, stop=["a", "b"])  # type: ignore[arg-type]
    assert parser().specified(["--most-tokens", "7"])["most_tokens"] == 7


def test_help_has_groups_and_defaults() -> None:
    text = " ".join(parser().format_help().split())
    assert "usage: tool [-h] [--most-tokens N] [--sizes N [N ...]] [--loud]" in text
    assert "generation: --most-tokens N number of tokens (default: 7) --sizes" in text
    assert "some sizes (default: 1 2)" in text
    assert "be loud --stop STOP a text --out FILE a file (default: out.json)" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--most-tokens 10", "--most-tokens is 10; it must be 1 to 9"),
        ("--sizes 1 4", "--sizes has 4; it must be 1 to 3"),
        ("--most-tokens x", "argument --most-tokens: invalid int value: 'x'"),
        ("--stop a --stop=", "--stop is ''; leave it out"),
        ("--most 1", "unrecognized arguments: --most"),
    ],
)
def test_wrong_options_name_the_flag_and_the_value(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        parser().read(argv.split())
    assert str(caught.value).startswith(message)
    assert refuse("tool", caught.value) == 2
    assert capsys.readouterr().err == f"tool: {caught.value} (see tool --help)\n"
