# SPDX-License-Identifier: Apache-2.0
"""Every option of every `tvm-ipc` command is refused in one line where it is wrong.

The options are found by inspection: one without a line here fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from tvm_ipc.tools.bench.options import overlap_parser
from tvm_ipc.tools.bench.options import parser as bench_parser
from tvm_ipc.tools.command_line import _parser as main_parser
from tvm_ipc.tools.command_line import main
from tvm_ipc.tools.demo.options import parser as demo_parser
from tvm_ipc.tools.doctor.command import parser as doctor_parser
from tvm_ipc.tools.explain.options import parser as explain_parser
from tvm_ipc.tools.run.options import parser as run_parser

SIZES = ["x", "0", "-1", "2.5", ""]
AMOUNTS = ["x", "-1", "nan", "inf", ""]
FILES = ["/no/such/folder/file.json", "/", "."]
HOSTS = ["0", "1", "-2", "", "a", "a,a", "a,", ",", "a,b c", "2.5", "allocation"]
HOSTS += ["a,b:22", "a,b/c", "a,b\x7f"]
#: What is wrong for each option that takes a value; "" stands for a command's own argument.
WRONG = {
    "demo": {
        **dict.fromkeys(
            ("--layers", "--hidden", "--heads", "--kv-heads", "--inner", "--vocabulary"), SIZES
        ),
        **dict.fromkeys(("--context", "--prompt-length", "--tokens"), SIZES),
        "--workers": [*SIZES, "65"],
        "--overlap": [*SIZES, "65", "2"],
        "--seed": ["x", "-1", "2.5", ""],
        "--hosts": [*HOSTS, "5", "a,b,c,d,e"],
        "--dtype": ["float8", "", "FLOAT32"],
        "--device": ["gpu", "", "CUDA"],
        "--strategy": ["fastest", "", "1"],
    },
    "explain": {
        "--module": ["x"],
        "--output": ["/no/such/folder/page.html", "/"],
        "--target": ["x", "", "vulkan"],
        "--world-size": [*SIZES, "65", "3"],
        "--strategy": ["fastest", "", "1"],
        "--overlap": ["0", "65", "-1", "", "x", "/"],
        "--streams": SIZES,
        "--barrier-budget": ["x", "-1", "2.5", ""],
        "--size": ["x", "n", "n=", "=3", "n=x", "n=-1", "no_such_size=3"],
    },
    "bench": {
        **dict.fromkeys(("--workers", "--device", "--bandwidth", "--latency", "--out"), ("", "?")),
        "--json": FILES,
        "--plot": [*FILES, "picture.png", "picture"],
        "--compare": ["/no/such/file.json", "/"],
        "--from": ["/no/such/file.json", "/"],
    },
    "bench --calibrate": {
        "--workers": [*SIZES, "1", "65"],
        "--bandwidth": AMOUNTS,
        "--latency": AMOUNTS,
        "--device": ["gpu", "", "CUDA"],
        "--out": FILES,
        "--json": ["run.json"],
    },
    "bench overlap": {
        **dict.fromkeys(("--rows", "--inner", "--columns", "--rounds"), SIZES),
        "--workers": [*SIZES, "1", "65"],
        "--bandwidth": AMOUNTS,
        "--latency": AMOUNTS,
        "--calibration": ["/no/such/file.json", "/"],
        "--kind": ["gather", "", "1"],
        "--trace": FILES,
    },
    "run": {
        "--workers": [*SIZES, "65"],
        "--max-new-tokens": SIZES,
        "--temperature": AMOUNTS,
        "--top-p": [*AMOUNTS, "0", "1.5"],
        "--top-k": SIZES,
        "--plan": ["/no/such/file.json", "/", "Auto", ""],
        "--seed": ["x", "-1", "2.5", "", "1"],
        "--prompt": [""],
        "--system": ["", "without --chat"],
        "--stop": [""],
        "--tokens": ["x", "", "-1", "1,x"],
        "--dtype": ["float8", "", "FLOAT32"],
        "--hosts": [*HOSTS, "3", "a,b,c"],
    },
    "doctor": {"--hosts": HOSTS},
}
#: What a command wants beside the option that is tried.
STARTS = {
    "explain": ["explain", "--demo"],
    "run": ["run", "folder"],
}


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options that take a value."""
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            yield action.option_strings[0]


def complaints(argv: list[str], capfd: pytest.CaptureFixture[str]) -> Iterator[str]:
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    if code != 2:
        yield f"{argv} ends with {code}"
    if len(err.splitlines()) != 1 or "Traceback" in err or out:
        yield f"{argv} says {err!r} and {out!r}"
    elif argv[-2] not in err and argv[-1] not in err:
        yield f"{argv} does not name the option or its value: {err}"


@pytest.mark.parametrize("command", WRONG)
def test_wrong_options(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = STARTS.get(command, command.split())
    problems = [
        problem
        for option, values in WRONG[command].items()
        for value in values
        for problem in complaints([*start, option, value], capfd)
    ]
    problems += [*complaints([*start, "--no-such-option"], capfd)]
    assert problems == []


@pytest.mark.parametrize(
    ("command", "parser"),
    [
        ("bench", bench_parser()),
        ("bench overlap", overlap_parser()),
        ("demo", demo_parser()),
        ("doctor", doctor_parser()),
        ("explain", explain_parser()),
        ("run", run_parser()),
    ],
)
def test_every_option_has_wrong_values(command: str, parser: argparse.ArgumentParser) -> None:
    known = {option for option in options(parser) if option != "--blas"}
    assert known == set(WRONG[command])
    (commands,) = (one.choices for one in main_parser()._actions if one.choices)
    # Options of `node` are those of a program.
    assert set(commands) == {one.split()[0] for one in WRONG} | {"node"}
