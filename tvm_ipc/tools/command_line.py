# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of `tvm-ipc`, and run its commands.

Exit codes: 0 success; 1 failure, no working backend (doctor), or output that cannot be written;
2 invalid options; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Final

import tvm_ipc
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.tools import terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    traceback = False
    ends_process = argv is None
    try:
        with terminal.command(ends_process=ends_process):
            parser = _parser()
            arguments, rest = parser.parse_known_args(argv)
            traceback = hasattr(arguments, "traceback")
            return _dispatch(parser, arguments, rest)
    except terminal.OutputError as error:
        if str(error):
            terminal.print_err(f"tvm-ipc: {error}")
        return 1
    except KeyboardInterrupt:
        return _report_interrupt(ends_process)
    except Exception as error:
        if terminal.was_interrupted():
            return _report_interrupt(ends_process)
        if traceback:
            raise
        text = str(error) if isinstance(error, IPCError) else f"{type(error).__name__}: {error}"
        head, *more = text.splitlines() or [type(error).__name__]
        hint = " (more with --traceback)" if more or not isinstance(error, IPCError) else ""
        terminal.print_err(f"tvm-ipc: {head}{hint}")
        return 1
    finally:
        terminal.forget_interruption()


def _dispatch(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: list[str]
) -> int:
    for message in config.unknown_variables():
        terminal.print_err(f"tvm-ipc: warning: {message}")
    if arguments.command is None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        terminal.print_out(parser.format_help().rstrip("\n"))
        return 0
    if arguments.command == "node":
        return _node(rest)
    if arguments.command == "explain":  # it prints more errors than the other commands
        rest = [*rest, *["--traceback"] * hasattr(arguments, "traceback")]
    module, _ = _COMMANDS[arguments.command]
    return int(importlib.import_module(module).main(rest))


def _report_interrupt(ends_process: bool) -> int:
    terminal.print_err("tvm-ipc: interrupted")
    if ends_process:
        terminal.discard_output()  # TVM prints warnings about interrupted work
    return 130


def _parser() -> argparse.ArgumentParser:
    common = terminal.Parser(add_help=False)
    common.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the traceback of an error instead of one line",
    )
    parser = terminal.Parser(
        "tvm-ipc",
        description="A multi-worker engine for apache-tvm.",
        parents=[common],
        allow_abbrev=False,  # `--trace` is an option of a command, not short for `--traceback`
    )
    parser.add_argument("--version", action="version", version=f"tvm-ipc {tvm_ipc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    # Commands parse their own options and print their own help.
    for name, (_, summary) in _COMMANDS.items():
        commands.add_parser(
            name, parents=[common], add_help=False, allow_abbrev=False, help=summary
        )
    return parser


def _node_parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        "tvm-ipc node",
        description="Run a program as one of several nodes that an MPI launcher starts: "
        'mpiexec -n 2 tvm-ipc node -- python main.py. In the program, hosts="allocation" selects '
        "all nodes.",
        epilog="Exit code: the exit code of the program.",
        allow_abbrev=False,
    )
    parser.add_argument("program", nargs="+", help="program that the node of rank 0 runs, after --")
    return parser


def _node(arguments: list[str]) -> int:
    program = _node_parser().parse_args(arguments).program
    from tvm_ipc.nodes.node_command_under_mpiexec import main as run

    return run(program)


#: The module whose `main` runs a command, and the help of the command.
_COMMANDS: Final = {
    "doctor": (
        "tvm_ipc.tools.doctor.command",
        "report which features work on this machine and why the others do not",
    ),
    "demo": (
        "tvm_ipc.tools.demo",
        "run a tensor-parallel model on several workers and compare it with one worker",
    ),
    "explain": (
        "tvm_ipc.tools.explain.command",
        "report what the pipeline does to a module: its memory plan and its collectives",
    ),
    "bench": (
        "tvm_ipc.tools.bench",
        "measure communication on this machine, and how much of it overlap hides",
    ),
    "run": (
        "tvm_ipc.tools.run.generate_text_command",
        "continue a text with a Hugging Face language model on several workers",
    ),
    "node": (
        "",
        "run a program on several nodes: mpiexec -n 2 tvm-ipc node -- python main.py",
    ),
}
