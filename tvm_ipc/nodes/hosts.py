# SPDX-License-Identifier: Apache-2.0
"""What callers give as `hosts`: the nodes of a session, and which ranks each has."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.allocation import names_of_nodes
from tvm_ipc.nodes.controller import Nodes, Workers
from tvm_ipc.nodes.interface import address_towards
from tvm_ipc.nodes.launcher import Places
from tvm_ipc.runtime.pools import Wanted

if TYPE_CHECKING:
    from tvm_ipc.nodes.pool import NodePool

#: The nodes that a launcher of the user's has started.
ALLOCATION: Final = "allocation"
_WANTED: Final = (
    "a list of the names of two or more machines, this one first, or a number of nodes on this "
    "machine, 2 or more"
)
#: Seconds that agents and workers have to join.
_START_SECONDS: Final = 120.0


def read(where: str, hosts: Any, num_workers: int) -> Hosts:
    """Return the nodes that a caller asks for; `where` begins the sentence of errors."""
    if isinstance(hosts, str) and hosts == ALLOCATION:
        names = names_of_nodes()
        if names is None:
            raise IPCError(
                f"{where}: {hosts!r} is for programs that a launcher starts through tvm-ipc node, "
                "such as mpiexec -n 2 tvm-ipc node -- python main.py"
            )
        places = Places(names, allocated=True)
    elif isinstance(hosts, Places):  # with what only tests and unusual networks need
        places = hosts
    elif isinstance(hosts, numbers.Number):
        places = Places(arguments.integer(where, hosts, _WANTED, 2))
    elif isinstance(hosts, (Mapping, Set)):  # which has no order, and one is to be the first
        raise arguments.wrong_type(where, _WANTED, hosts)
    else:
        names = arguments.texts(where, hosts, _WANTED)
        if len(names) < 2 or len(set(names)) < len(names):
            raise arguments.wrong_value(where, _WANTED, hosts)
        try:
            places = Places(names)
        except IPCError as error:
            raise ValueError(f"{where}: {error}; hosts is {arguments.show(hosts)}") from None
    if places.count > num_workers:
        raise ValueError(
            f"{where} are {places.count} nodes, and each has a worker at least; num_workers is "
            f"{num_workers}"
        )
    return Hosts(places)


@dataclass(frozen=True)
class Hosts:
    """The nodes of a session."""

    places: Places

    def __str__(self) -> str:
        if isinstance(self.places.hosts, int):
            return f"{self.places.count} nodes of this machine"
        return ", ".join(self.places.hosts)

    def machines(self, num_workers: int) -> list[int]:
        """Return the machine of each worker, by the first of its nodes; this one is 0."""
        names = self.places.hosts
        if isinstance(names, int):
            return [0] * num_workers
        machines = [0]
        for name, ranks in zip(names, ranks_of_nodes(num_workers, len(names)), strict=True):
            machines += [names.index(name)] * len(ranks)
        return machines

    def address(self) -> str:
        """Return the address of this machine that the others reach.

        Raises
        ------
        IPCError
            A name leads nowhere, or no one interface leads to all of the machines.
        """
        names = () if isinstance(self.places.hosts, int) else self.places.hosts
        away = dict.fromkeys(name for name in names[1:] if name != names[0])
        return address_towards([*away])

    def start(self, wanted: Wanted) -> NodePool:
        """Start agents and workers.

        Raises
        ------
        IPCError
            There is no MPI, an agent failed, or runs other versions.
        DeadlineError
            Somebody did not join in time; it names who.
        """
        from tvm_ipc.nodes.pool import NodePool  # wants the native library

        num_workers, num_groups = wanted.shape
        settings = wanted.settings
        workers = Workers(
            ranks_of_nodes(num_workers, self.places.count),
            num_workers,
            num_groups,
            wanted.compiler,
            wanted.backend,
            settings.timeout,
            settings.arena_limit or 0,
            settings.instruction_set,
            wanted.flat,
        )
        address = self.address()
        nodes = Nodes(
            self.places, workers, address=address, timeout=_START_SECONDS, check=wanted.check
        )
        return NodePool(nodes)


def ranks_of_nodes(num_workers: int, count: int) -> list[list[int]]:
    """Return the ranks of each node's processes: all are neighbours, the first nodes have more.

    Rank 0 is none of them.
    """
    each, more = divmod(num_workers, count)
    ends = [node * each + min(node, more) for node in range(count + 1)]
    return [list(range(max(1, ends[node]), ends[node + 1])) for node in range(count)]
