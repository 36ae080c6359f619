# SPDX-License-Identifier: Apache-2.0
"""Check a session over several machines with one worker on each, for `tvm-ipc doctor --hosts`.

The check starts a session as a program would, so it reports problems with ssh, versions, MPI and
the network. Then it times messages from the first machine to each other one and back.
"""

from __future__ import annotations

import ipaddress
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ipc
from tvm_ipc.arguments import counted
from tvm_ipc.errors import IPCError
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.tools.format import error_text

#: Sizes of the timed messages in bytes, and the number of round trips of each.
SMALL: Final = 8
LARGE: Final = 8 << 20
_SMALL_ROUNDS: Final = 200
_LARGE_ROUNDS: Final = 5
_MODULE: Final = "tvm_ipc.tools.doctor.network_probes_in_workers"


def examine_hosts(
    hosts: cli_hosts.HostsArgument, progress: Callable[[str], object] = lambda _: None
) -> dict[str, Any]:
    """Return facts about each machine, in the order of `hosts`; a failure is a `problem`."""
    facts: dict[str, Any] = {"launcher": None, "seconds": None, "nodes": [], "problem": None}
    try:
        facts["launcher"] = str(find_mpi())
        count = cli_hosts.count(hosts)
        start = time.monotonic()
        progress(f"starting {count} nodes")
        with tvm_ipc.Session(count, hosts=hosts) as session:
            facts["seconds"] = time.monotonic() - start
            facts["nodes"] = [dict(node) for node in session.nodes]
            session.import_python_module(_MODULE)
            congestion = session.get_global_func("tvm_ipc.doctor.congestion")()
            for node in range(count):
                facts["nodes"][node]["congestion"] = congestion.debug_get_from_remote(node)
            for node in range(1, count):
                progress(f"timing messages to node {node}")
                ping = session.get_global_func("tvm_ipc.doctor.ping")
                for name, size, rounds in (
                    ("latency", SMALL, _SMALL_ROUNDS),
                    ("rate", LARGE, _LARGE_ROUNDS),
                ):
                    times = session.get(ping(node, size, rounds), 0)
                    one_way = statistics.median(map(float, times)) / 2
                    facts["nodes"][node][name] = one_way if name == "latency" else size / one_way
    except Exception as error:
        facts["problem"] = str(error) if isinstance(error, IPCError) else error_text(error)
    return facts


def render_hosts(facts: dict[str, Any]) -> str:
    """Return a verdict, and the facts as a table."""
    lines = [_verdict(facts), "", f"MPI      {facts['launcher'] or 'not available'}"]
    if facts["seconds"] is not None:
        lines.append(f"started  {len(facts['nodes'])} nodes in {facts['seconds']:.1f} s")
        lines.append("")
        lines.append(f"{'node':<5} {'host':<24} {'address':<16} {'cores':>5} {'latency':>10} rate")
    for number, node in enumerate(facts["nodes"]):
        latency, rate = node.get("latency"), node.get("rate")
        line = f"{number:<5} {node['host']:<24} {node['address']:<16} {node['cores']:>5} "
        line += f"{'' if latency is None else f'{latency * 1e6:.0f} us':>10} "
        line += "" if rate is None else f"{rate * 8 / 1e9:.2f} Gbit/s"
        lines.append(line.rstrip())
    if facts["problem"] is None and len(facts["nodes"]) > 1:
        lines.append("")
        lines.append(
            f"Latency: one way, {SMALL} bytes. Rate: one way, {LARGE >> 20} MB. Both from node 0."
        )
    bbr_nodes = [
        number
        for number, node in enumerate(facts["nodes"])
        if node.get("congestion", "").startswith("bbr")
        and not ipaddress.ip_address(node["address"]).is_loopback  # loopback is not limited
    ]
    if bbr_nodes:
        lines.append(
            f"SLOW     TCP uses BBR on {'node' if len(bbr_nodes) == 1 else 'nodes'} "
            f"{', '.join(map(str, bbr_nodes))}, which limited collectives to a third of a 10 "
            "Gbit/s link; run: sysctl net.ipv4.tcp_congestion_control=cubic"
        )
    return "\n".join(lines)


def _verdict(facts: dict[str, Any]) -> str:
    if facts["problem"] is not None:
        return f"Not ready: {facts['problem']}"
    return f"Ready on {counted(len(facts['nodes']), 'node')}: a worker was tried on each."
