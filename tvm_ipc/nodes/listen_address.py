# SPDX-License-Identifier: Apache-2.0
"""Find the address of this machine that other machines can reach, to listen on it only."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from tvm_ipc.errors import IPCError

LOOPBACK = "127.0.0.1"
_PORT = 9  # any port: nothing is sent


def address_towards(hosts: Sequence[str]) -> str:
    """Return the numeric address of the interface that reaches all hosts, IPv4 before IPv6.

    A host that resolves to a loopback address is this machine, which any interface reaches.

    Raises
    ------
    IPCError
        A host cannot be reached, or no single interface reaches all hosts.
    """
    sources: dict[str, dict[int, str]] = {}
    for host in hosts:
        by_family = {
            family: source
            for family in (4, 6)
            if (source := _source_address(host, family)) is not None
        }
        if not by_family:
            raise IPCError(
                f"{host!r} cannot be reached from this machine: the name does not exist, or there "
                "is no route to it"
            )
        sources[host] = by_family
    for family in (4, 6):
        of_family = [by_family.get(family) for by_family in sources.values()]
        remote = {source for source in of_family if source is None or not _is_loopback(source)}
        if None not in remote and len(remote) <= 1:
            return next(iter(remote), None) or (LOOPBACK if family == 4 else "::1")
    listing = "; ".join(
        f"{host}: from {', '.join(by_family.values())}" for host, by_family in sources.items()
    )
    raise IPCError(
        f"no one interface of this machine reaches all hosts ({listing}); name the hosts by "
        "addresses of one network"
    )


def _source_address(host: str, family: int) -> str | None:
    """Return the address that packets to a host are sent from; None if it cannot be reached."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    try:
        target = socket.getaddrinfo(host, _PORT, kind, socket.SOCK_DGRAM)[0][4]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
