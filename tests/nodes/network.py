# SPDX-License-Identifier: Apache-2.0
"""Nodes on one machine that share nothing but a network and the files: namespaces.

Each has a network, a host name and a /dev/shm of its own. With one host name Open MPI takes two
nodes for one and hangs; with one /dev/shm MPICH goes past the network. Wants root, iproute2 and
util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("ip", "tc", "unshare", "nsenter", "mount", "hostname", "taskset")
SUBNET = "10.77.0"
#: What a node is: a process that keeps the namespaces. It ends when its input does.
_KEEP = """
set -e
hostname "$1"
mount -t tmpfs -o size="$2" tmpfs /dev/shm
ip link set lo up
echo "$3" >/proc/sys/net/ipv4/tcp_congestion_control
echo ready
cat >/dev/null
"""


class NoNetworkError(RuntimeError):
    """There can be no namespaces here."""


@dataclass
class Node:
    """A node, and how to run something there."""

    name: str
    address: str
    keeper: subprocess.Popen[str]
    #: Those that all in it keeps to; none if it has all cores.
    cores: tuple[int, ...]

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one in the node, and on its cores."""
        target = ["--target", str(self.keeper.pid)]
        inside = ["nsenter", *target, "--net", "--uts", "--mount", "--"]
        if self.cores:
            inside += ["taskset", "-c", ",".join(map(str, self.cores))]
        return [*inside, *command]

    def run(self, *command: str) -> None:
        """Run something in the node; its failure is an error."""
        subprocess.run(self.inside(command), check=True, capture_output=True)


class Network:
    """Nodes that are joined by a switch.

    Parameters
    ----------
    count : how many nodes.
    rate : the most that each of them may send, such as "1gbit"; None for all that goes.
    memory : the most that each of them may share, as mount takes it.
    own_cores : whether all that runs in a node keeps to cores of its own. They are an even share of
        those of this process. If there are more nodes than cores, nodes take a core each in turn.
    congestion : how TCP finds out what the network bears. BBR, which a machine may have for its own
        connections, takes a share of a link for all that a collective's bursts can have.
    """

    network = f"{SUBNET}.0/24"

    def __init__(
        self,
        count: int,
        rate: str | None = None,
        memory: str = "512m",
        own_cores: bool = False,
        congestion: str = "reno",
    ) -> None:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            raise NoNetworkError(f"namespaces want root, and the commands {', '.join(NEEDED)}")
        self._undo = contextlib.ExitStack()
        self._congestion = congestion
        self.nodes: list[Node] = []
        try:
            switch = self._keeper("switch", memory)
            _ip(switch, "link", "add", "switch", "type", "bridge")
            _ip(switch, "link", "set", "switch", "up")
            for number, cores in enumerate(_shares(count) if own_cores else [()] * count, 1):
                keeper = self._keeper(f"node{number}", memory)
                self.nodes.append(Node(f"node{number}", f"{SUBNET}.{number}", keeper, cores))
                self._join(switch, number, keeper, rate)
        except BaseException:
            self.close()
            raise

    def shell(self, path: Path) -> Path:
        """Write what takes the place of ssh: it is given options, an address and a command."""
        cases = "\n".join(f'{n.address}) inside="{" ".join(n.inside([]))}";;' for n in self.nodes)
        path.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
{cases}
*) echo "there is no machine $1" >&2; exit 255;;
esac
shift
exec $inside sh -c "$*"
""")
        path.chmod(0o755)
        return path

    def close(self) -> None:
        """End the nodes; what runs in them must have ended."""
        self._undo.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keeper(self, name: str, memory: str) -> subprocess.Popen[str]:
        namespaces = ["--net", "--uts", "--mount", "--propagation", "private"]
        keeper = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", _KEEP, "sh", name, memory, self._congestion],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._undo.callback(keeper.communicate)
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            raise NoNetworkError(f"no namespaces here: {keeper.stderr.read().strip()}")
        return keeper

    def _join(
        self,
        switch: subprocess.Popen[str],
        number: int,
        keeper: subprocess.Popen[str],
        rate: str | None,
    ) -> None:
        port = f"port{number}"
        peer = ["peer", "name", "eth0", "netns", str(keeper.pid)]
        _ip(switch, "link", "add", port, "type", "veth", *peer)
        _ip(switch, "link", "set", port, "master", "switch", "up")
        _ip(keeper, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
        _ip(keeper, "link", "set", "eth0", "up")
        if rate is not None:
            limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
            _run(keeper, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)


def _shares(count: int) -> list[tuple[int, ...]]:
    """Return the cores of each node."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // count)
    return [tuple(cores[(k * each + i) % len(cores)] for i in range(each)) for k in range(count)]


def _ip(keeper: subprocess.Popen[str], *words: str) -> None:
    _run(keeper, "ip", *words)


def _run(keeper: subprocess.Popen[str], *command: str) -> None:
    # The network alone: programs lie where they lie.
    done = subprocess.run(
        ["nsenter", "--target", str(keeper.pid), "--net", "--", *command],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
