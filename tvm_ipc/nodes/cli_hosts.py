# SPDX-License-Identifier: Apache-2.0
"""The option `--hosts`, which all commands share: its help, its parser and its checks."""

from __future__ import annotations

import argparse
from typing import Final, TypeAlias

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

#: A value for `Session(hosts=)`.
HostsArgument: TypeAlias = int | str | list[str]
METAVAR: Final = "A,B"
#: The help text of the option.
HELP: Final = (
    "names of machines, this one first, or a number N of simulated nodes on this machine; in a "
    "program that tvm-ipc node runs: allocation"
)


def hosts(text: str) -> HostsArgument:
    """Parse the value of the option; a `type` for argparse."""
    from tvm_ipc.nodes.session_hosts_argument import (  # slow to import
        ALLOCATION,
        read,
    )

    argument: HostsArgument = text if text == ALLOCATION else text.split(",")
    if text.isascii() and text.isdigit():
        argument = int(text[:9])
    try:
        read("hosts", argument, count(argument))
    except (ValueError, IPCError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return argument


def count(argument: HostsArgument) -> int:
    """Return the number of nodes."""
    if isinstance(argument, int):
        return argument
    if isinstance(argument, list):
        return len(argument)
    allocation = config.allocation()
    return 0 if allocation is None else len(allocation[1])


def refusal(argument: HostsArgument, workers: int, *, threads: bool) -> str | None:
    """Return why nodes cannot be used with the other options; None if they can."""
    if count(argument) > workers:
        text = ",".join(argument) if isinstance(argument, list) else argument
        return (
            f"--hosts {text} has {count(argument)} nodes, and --workers is {workers}; give at "
            "least one worker for each node"
        )
    if threads:
        return "--threads is for workers of one machine, and --hosts for several; give one of them"
    return None


def require(argument: HostsArgument) -> None:
    """Raise early the errors that a session would raise only after everything is compiled.

    These are: there is no MPI, the program itself runs under MPI, or a host cannot be reached.
    """
    from tvm_ipc.nodes.find_mpi_installation import find_mpi, refuse_launched
    from tvm_ipc.nodes.session_hosts_argument import read

    if argument != "allocation":
        refuse_launched()
        find_mpi()
        read("hosts", argument, count(argument)).address()
