# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of `tvm-ipc`, and run its commands.

Exit codes: 0 success; 1 failure, no working backend (doctor), or output that cannot be written;
2 invalid options; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Final

import tvm_ipc
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import cli_hosts
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
    if arguments.command in _OWN_OPTIONS:
        traceback = ["--traceback"] * hasattr(arguments, "traceback")
        run, _ = _OWN_OPTIONS[arguments.command]
        return run(rest, traceback)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command is None:
        terminal.print_out(parser.format_help().rstrip("\n"))
        return 0
    if arguments.hosts is not None:
        return _check_hosts(arguments.hosts, arguments.json)
    return _doctor(arguments.json, arguments.verbose)


def _report_interrupt(ends_process: bool) -> int:
    terminal.print_err("tvm-ipc: interrupted")
    if ends_process:
        terminal.discard_output()  # TVM prints warnings about interrupted work
    return 130


def _doctor_parser() -> argparse.ArgumentParser:
    actions = _parser()._actions
    (commands,) = (action.choices for action in actions if isinstance(action.choices, dict))
    parser: argparse.ArgumentParser = commands["doctor"]
    return parser


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
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="report which features work on this machine and why the others do not",
        description="Report which features work on this machine, and what to do for the others. "
        "Every check runs the feature. The verdict comes first, then the details.",
        epilog="Exit code: 0 if a backend works, 1 if none does, 2 invalid options.",
    )
    doctor.add_argument_group("nodes").add_argument(
        "--hosts",
        metavar=cli_hosts.METAVAR,
        type=cli_hosts.hosts,
        help=f"check a session over these nodes instead: {cli_hosts.HELP}",
    )
    output = doctor.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print all facts as JSON")
    output.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="also print paths, all settings, and texts of other libraries as they are",
    )
    # These commands parse their own options and print their own help.
    for name, (_, summary) in _OWN_OPTIONS.items():
        commands.add_parser(
            name, parents=[common], add_help=False, allow_abbrev=False, help=summary
        )
    return parser


def _doctor(as_json: bool, verbose: bool) -> int:
    from tvm_ipc.tools import doctor

    facts = doctor.examine(terminal.progress)
    if as_json:
        terminal.print_out(json.dumps(facts, indent=2))
    else:
        terminal.print_out(doctor.render(facts, terminal.columns(), verbose=verbose))
    return 0 if any(backend["available"] for backend in facts["backends"].values()) else 1


def _check_hosts(hosts: cli_hosts.HostsArgument, as_json: bool) -> int:
    from tvm_ipc.tools import doctor

    facts = doctor.examine_hosts(hosts, terminal.progress)
    terminal.print_out(json.dumps(facts, indent=2) if as_json else doctor.render_hosts(facts))
    return 0 if facts["problem"] is None else 1


def _demo(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.tools.demo import main as run

    return run(arguments)


def _run_model(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.tools.run.generate_text_command import main as run

    return run(arguments)


def _bench(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.tools.bench import main as run

    return run(arguments)


def _explain(arguments: list[str], traceback: list[str]) -> int:
    from tvm_ipc.tools import demo
    from tvm_ipc.tools.explain import main as run

    return run([*arguments, *traceback], demo.default_model)


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


def _node(arguments: list[str], _traceback: list[str]) -> int:
    program = _node_parser().parse_args(arguments).program
    from tvm_ipc.nodes.node_command_under_mpiexec import main as run

    return run(program)


#: Commands that parse their own options: the function that runs them, and their help.
_OWN_OPTIONS: Final[dict[str, tuple[Callable[[list[str], list[str]], int], str]]] = {
    "demo": (
        _demo,
        "run a tensor-parallel model on several workers and compare it with one worker",
    ),
    "explain": (
        _explain,
        "report what the pipeline does to a module: its memory plan and its collectives",
    ),
    "bench": (_bench, "measure communication on this machine, and how much of it overlap hides"),
    "run": (
        _run_model,
        "continue a text with a Hugging Face language model on several workers",
    ),
    "node": (
        _node,
        "run a program on several nodes: mpiexec -n 2 tvm-ipc node -- python main.py",
    ),
}
