# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc` understands, and which part does it.

Exit codes: 0 done, 1 an error of ours (or a doctor that found no working backend, or an output
that takes no more), 2 a command line that was not understood, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Final

import tvm_ipc
from tvm_ipc import terminal
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import option


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    traceback = False
    of_process = argv is None
    try:
        with terminal.command(of_process=of_process):
            parser = _parser()
            arguments, rest = parser.parse_known_args(argv)
            traceback = hasattr(arguments, "traceback")
            return _run(parser, arguments, rest)
    except terminal.OutputError as error:
        if str(error):
            terminal.complain(f"tvm-ipc: {error}")
        return 1
    except KeyboardInterrupt:
        return _interrupted(of_process)
    except Exception as error:
        if terminal.was_interrupted():
            return _interrupted(of_process)
        if traceback:
            raise
        text = str(error) if isinstance(error, IPCError) else f"{type(error).__name__}: {error}"
        head, *more = text.splitlines() or [type(error).__name__]
        hint = " (more with --traceback)" if more or not isinstance(error, IPCError) else ""
        terminal.complain(f"tvm-ipc: {head}{hint}")
        return 1
    finally:
        terminal.forget_interruption()


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.command in _OWN_OPTIONS:
        traceback = ["--traceback"] * hasattr(arguments, "traceback")
        run, _ = _OWN_OPTIONS[arguments.command]
        return run(rest, traceback)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command is None:
        terminal.say(parser.format_help().rstrip("\n"))
        return 0
    if arguments.hosts is not None:
        return _doctor_of_hosts(arguments.hosts, arguments.json)
    return _doctor(arguments.json)


def _interrupted(of_process: bool) -> int:
    terminal.complain("tvm-ipc: interrupted")
    if of_process:
        terminal.hush()  # TVM warns of what it was in the middle of
    return 130


def _doctor_parser() -> argparse.ArgumentParser:
    (commands,) = (one.choices for one in _parser()._actions if isinstance(one.choices, dict))
    parser: argparse.ArgumentParser = commands["doctor"]
    return parser


def _parser() -> argparse.ArgumentParser:
    common = terminal.Parser(add_help=False)
    common.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show where an error came from instead of one line",
    )
    parser = terminal.Parser(
        "tvm-ipc",
        description="A multi-worker engine for apache-tvm.",
        parents=[common],
        allow_abbrev=False,  # `--trace` is an option of a command, and no `--traceback`
    )
    parser.add_argument("--version", action="version", version=f"tvm-ipc {tvm_ipc.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="what works on this machine, what does not, and why",
        description="Say what works on this machine, what does not, and why: tries all of it.",
        epilog="Exit code: 0 where a backend works, 1 where none does, 2 wrong options.",
    )
    doctor.add_argument("--json", action="store_true", help="print the same facts as JSON")
    doctor.add_argument(
        "--hosts",
        metavar=option.METAVAR,
        type=option.hosts,
        help=f"try these machines instead: {option.HELP}",
    )
    # These read their own options, so their --help is their own too.
    for name, (_, summary) in _OWN_OPTIONS.items():
        commands.add_parser(
            name, parents=[common], add_help=False, allow_abbrev=False, help=summary
        )
    return parser


def _doctor(as_json: bool) -> int:
    from tvm_ipc import doctor

    facts = doctor.examine(terminal.progress)
    width = terminal.columns()
    terminal.say(json.dumps(facts, indent=2) if as_json else doctor.render(facts, width))
    return 0 if any(backend["available"] for backend in facts["backends"].values()) else 1


def _doctor_of_hosts(hosts: option.Given, as_json: bool) -> int:
    from tvm_ipc import doctor

    facts = doctor.examine_hosts(hosts, terminal.progress)
    terminal.say(json.dumps(facts, indent=2) if as_json else doctor.render_hosts(facts))
    return 0 if facts["problem"] is None else 1


def _demo(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.demo import main as run

    return run(arguments)


def _run_model(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.hf.command import main as run

    return run(arguments)


def _bench(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.bench import main as run

    return run(arguments)


def _explain(arguments: list[str], traceback: list[str]) -> int:
    from tvm_ipc import demo
    from tvm_ipc.explain import main as run

    return run([*arguments, *traceback], demo.default_model)


def _node_parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        "tvm-ipc node",
        description="Be a node of a program that a launcher of MPI starts on several machines: "
        'mpiexec -n 2 tvm-ipc node -- python main.py. In the program, hosts="allocation" is all '
        "nodes.",
        epilog="Exit code: that of the program.",
        allow_abbrev=False,
    )
    parser.add_argument("program", nargs="+", help="what the node of rank 0 runs, behind --")
    return parser


def _node(arguments: list[str], _traceback: list[str]) -> int:
    program = _node_parser().parse_args(arguments).program
    from tvm_ipc.nodes.allocation import main as run

    return run(program)


#: Commands that read their own options: what runs them, and what they do.
_OWN_OPTIONS: Final[dict[str, tuple[Callable[[list[str], list[str]], int], str]]] = {
    "demo": (_demo, "run a tensor-parallel model on two workers and compare it with one"),
    "explain": (
        _explain,
        "show what the pipeline does to a module: its memory plan and its collectives",
    ),
    "bench": (_bench, "measure what communication costs here, and how much of it overlap hides"),
    "run": (
        _run_model,
        "continue a text with a language model of transformers on several workers",
    ),
    "node": (
        _node,
        "be a node of a program: mpiexec -n 2 tvm-ipc node -- python main.py",
    ),
}
