# SPDX-License-Identifier: Apache-2.0
"""Which address of this machine other machines reach, to listen there and nowhere else."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from tvm_ipc.errors import IPCError

LOOPBACK = "127.0.0.1"
_PORT = 9  # nothing is sent there


def address_towards(hosts: Sequence[str]) -> str:
    """Return the numeric address of the interface by which this machine reaches all hosts.

    A host that is this machine, which many systems resolve to a loopback address, is reached by
    any interface. IPv4 comes before IPv6.

    Raises
    ------
    IPCError
        A name leads nowhere, or no one interface leads to all of the hosts; both are named.
    """
    found: dict[str, dict[int, str]] = {}
    for host in hosts:
        ways = {family: way for family in (4, 6) if (way := _way(host, family)) is not None}
        if not ways:
            raise IPCError(
                f"{host!r} leads nowhere from this machine: no such name, or no route to it"
            )
        found[host] = ways
    for family in (4, 6):
        ways_of = {host: ways.get(family) for host, ways in found.items()}
        away = {host: way for host, way in ways_of.items() if way is None or not _loops(way)}
        if None not in away.values() and len(set(away.values())) <= 1:
            return next(iter(away.values()), None) or (LOOPBACK if family == 4 else "::1")
    told = "; ".join(f"{host}: from {', '.join(way.values())}" for host, way in found.items())
    raise IPCError(
        f"no one interface of this machine leads to all hosts; give its address ({told})"
    )


def _way(host: str, family: int) -> str | None:
    """Return the address that packets to a host are sent from."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    try:
        to = socket.getaddrinfo(host, _PORT, kind, socket.SOCK_DGRAM)[0][4]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(to)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # of a name that no name server could have
        return None


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
