# SPDX-License-Identifier: Apache-2.0
"""Read the argument `hosts=` of a session: its nodes, and the ranks that each node has."""

from __future__ import annotations

import numbers
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.listen_address import address_towards
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
from tvm_ipc.nodes.node_command_under_mpiexec import names_of_nodes
from tvm_ipc.nodes.session_server_in_node_agent import ranks_of_nodes
from tvm_ipc.runtime.worker_pool_interface import START_SECONDS, PoolRequest

if TYPE_CHECKING:
    from tvm_ipc.nodes.start_and_watch_agents import NodePool

#: The value for the nodes that the user's own launcher has started.
ALLOCATION: Final = "allocation"
_WANTED: Final = (
    "a list of the names of two or more machines, this one first, or a number of nodes on this "
    "machine, 2 or more"
)


def read(where: str, hosts: Any, num_workers: int) -> Hosts:
    """Check the argument `hosts=`, and return its nodes; `where` begins error messages."""
    if isinstance(hosts, str) and hosts == ALLOCATION:
        names = names_of_nodes()
        if names is None:
            raise IPCError(
                f"{where}: {hosts!r} is for programs that a launcher starts through tvm-ipc node; "
                "start this program with one, such as mpiexec -n 2 tvm-ipc node -- python main.py"
            )
        addresses = NodeAddresses(names, allocated=True)
    elif isinstance(hosts, NodeAddresses):  # with options for tests and unusual networks
        addresses = hosts
    elif isinstance(hosts, numbers.Number):
        addresses = NodeAddresses(arguments.integer(where, hosts, _WANTED, 2))
    elif isinstance(hosts, (Mapping, Set)):  # these have no order, and this machine must be first
        raise arguments.wrong_type(where, _WANTED, hosts)
    else:
        names = arguments.texts(where, hosts, _WANTED)
        if len(names) < 2 or len(set(names)) < len(names):
            raise arguments.wrong_value(where, _WANTED, hosts)
        try:
            addresses = NodeAddresses(names)
        except IPCError as error:
            raise ValueError(f"{where}: {error}; hosts is {arguments.quote(hosts)}") from None
    if addresses.count > num_workers:
        raise ValueError(
            f"{where} has {addresses.count} nodes, and num_workers is {num_workers}; each node "
            "needs at least one worker"
        )
    return Hosts(addresses)


@dataclass(frozen=True)
class Hosts:
    """The nodes of a session."""

    addresses: NodeAddresses

    def __str__(self) -> str:
        """Return the machines as messages name them."""
        if isinstance(self.addresses.hosts, int):
            return f"{self.addresses.count} nodes of this machine"
        return ", ".join(self.addresses.hosts)

    def machines(self, num_workers: int) -> list[int]:
        """Return the machine of each worker, as the number of the machine's first node."""
        names = self.addresses.hosts
        if isinstance(names, int):
            return [0] * num_workers
        machines = [0]
        for name, ranks in zip(names, ranks_of_nodes(num_workers, len(names)), strict=True):
            machines += [names.index(name)] * len(ranks)
        return machines

    def address(self) -> str:
        """Return the address of this machine that the other machines can reach.

        Raises
        ------
        IPCError
            A machine cannot be reached, or no single interface reaches all machines.
        """
        names = () if isinstance(self.addresses.hosts, int) else self.addresses.hosts
        others = dict.fromkeys(name for name in names[1:] if name != names[0])
        return address_towards([*others])

    def start(self, request: PoolRequest) -> NodePool:
        """Start agents and workers.

        Raises
        ------
        IPCError
            There is no MPI, or an agent failed or runs other versions.
        DeadlineError
            A process did not join in time.
        """
        # It needs the native library.
        from tvm_ipc.nodes.start_and_watch_agents import NodePool

        end = time.monotonic() + START_SECONDS
        address = self.address()
        timeout = round(end - time.monotonic(), 1)
        return NodePool(self.addresses, request, address=address, timeout=timeout)
