# SPDX-License-Identifier: Apache-2.0
"""The option `--hosts` of commands, which all of them read alike."""

from __future__ import annotations

import argparse
from typing import Final, TypeAlias

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

#: What `Session(hosts=)` takes.
Given: TypeAlias = int | str | list[str]
METAVAR: Final = "A,B"
#: What the option is, in its help.
HELP: Final = (
    "names of machines, this one first, or so many nodes of this machine, which share nothing but "
    "the network; in a program of tvm-ipc node: allocation"
)


def hosts(text: str) -> Given:
    """Read what is given as machines; a type of argparse."""
    from tvm_ipc.nodes.hosts import ALLOCATION, read  # with much that --help need not wait for

    given: Given = text if text == ALLOCATION else text.split(",")
    if text.isascii() and text.isdigit():
        given = int(text[:9])
    try:
        read("hosts", given, count(given))
    except (ValueError, IPCError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return given


def count(given: Given) -> int:
    """Return how many nodes these are."""
    if isinstance(given, int):
        return given
    if isinstance(given, list):
        return len(given)
    found = config.allocation()
    return 0 if found is None else len(found[1])


def refusal(given: Given, workers: int, *, threads: bool) -> str | None:
    """Return what is wrong with nodes for so many workers; None if nothing is."""
    if count(given) > workers:
        said = given if not isinstance(given, list) else ",".join(given)
        return f"--hosts {said} are {count(given)} nodes, which need as many --workers at least"
    if threads:
        return "--threads is for workers of one machine, and --hosts for several"
    return None


def require(given: Given) -> None:
    """Raise what a session would raise when all is compiled.

    There is no MPI, or one within, or a name leads nowhere.
    """
    from tvm_ipc.nodes.hosts import read
    from tvm_ipc.nodes.mpi import find_mpi, refuse_launched

    if given != "allocation":
        refuse_launched()
        find_mpi()
        read("hosts", given, count(given)).address()
