# SPDX-License-Identifier: Apache-2.0
"""The command `tvm-ipc`.

Exit codes: 0 done, 1 an error of ours (or a doctor that found no working backend), 2 a command
line that was not understood.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import tvm_ipc
from tvm_ipc.errors import IPCError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    own_options = {"demo": _demo, "explain": _explain}
    if rest and arguments.command not in own_options:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command in own_options:
            traceback = ["--traceback"] * hasattr(arguments, "traceback")
            return own_options[arguments.command](rest, traceback)
        return _doctor(arguments.json)
    except IPCError as error:
        if hasattr(arguments, "traceback"):
            raise
        head, *more = str(error).splitlines()
        print(f"tvm-ipc: {head}", "(more with --traceback)" if more else "", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show where an error came from instead of one line",
    )
    parser = argparse.ArgumentParser(
        "tvm-ipc", description="A multi-worker engine for apache-tvm.", parents=[common]
    )
    parser.add_argument("--version", action="version", version=f"tvm-ipc {tvm_ipc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor", parents=[common], help="what works on this machine, what does not, and why"
    )
    doctor.add_argument("--json", action="store_true", help="print the same facts as JSON")
    # These read their own options, so their --help is their own too.
    commands.add_parser(
        "demo",
        parents=[common],
        add_help=False,
        help="run a tensor-parallel model on two workers and compare it with one",
    )
    commands.add_parser(
        "explain",
        parents=[common],
        add_help=False,
        help="show what the pipeline does to a module: its memory plan and its collectives",
    )
    return parser


def _doctor(as_json: bool) -> int:
    from tvm_ipc.runtime import doctor

    facts = doctor.examine()
    print(json.dumps(facts, indent=2) if as_json else doctor.render(facts))
    return 0 if facts["backends"]["shm"]["available"] else 1


def _demo(arguments: list[str], _traceback: list[str]) -> int:
    from tvm_ipc.demo import main as run

    return run(arguments)


def _explain(arguments: list[str], traceback: list[str]) -> int:
    from tvm_ipc.explain import main as run

    return run([*arguments, *traceback])


if __name__ == "__main__":
    sys.exit(main())
