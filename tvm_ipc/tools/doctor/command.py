# SPDX-License-Identifier: Apache-2.0
"""Declare the options of `tvm-ipc doctor`, and run the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ipc.nodes import cli_hosts
from tvm_ipc.tools import terminal
from tvm_ipc.tools.options import OptionError, Parser, option, refuse, switch


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    traceback: bool = switch("print the traceback of an error instead of one line")
    hosts: cli_hosts.HostsArgument | None = option(
        f"check a session over these nodes instead: {cli_hosts.HELP}",
        group="nodes",
        metavar=cli_hosts.METAVAR,
        type=cli_hosts.hosts,
    )
    json: bool = switch("print all facts as JSON", group="output")
    verbose: bool = switch(
        "also print paths, all settings, and texts of other libraries as they are",
        flag="--verbose -v",
    )


def parser() -> Parser[Options]:
    """Return the parser of the command line."""
    return Parser(
        Options,
        "tvm-ipc doctor",
        description="Report which features work on this machine, and what to do for the others. "
        "Every check runs the feature. The verdict comes first, then the details.",
        epilog="Exit code: 0 if a backend works, 1 if none does, 2 invalid options.",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        options = parser().read(argv)
    except OptionError as error:
        return refuse("tvm-ipc doctor", error)
    from tvm_ipc.tools.doctor import facts as checks
    from tvm_ipc.tools.doctor import format_facts_as_text, multi_node_check

    if options.hosts is not None:
        facts = multi_node_check.examine_hosts(options.hosts, terminal.progress)
        text, works = multi_node_check.render_hosts(facts), facts["problem"] is None
    else:
        facts = checks.examine(terminal.progress)
        width = terminal.columns()
        text = format_facts_as_text.render(facts, width, verbose=options.verbose)
        works = any(backend["available"] for backend in facts["backends"].values())
    terminal.print_out(json.dumps(facts, indent=2) if options.json else text)
    return 0 if works else 1
