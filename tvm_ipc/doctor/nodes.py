# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc doctor --hosts`: a session over machines, with one worker on each, tried and timed.

It finds out what a program would: whether ssh gets there, whether versions and MPI agree, whether
messages arrive, and how long they take from the first machine to each of the others and back.
"""

from __future__ import annotations

import ipaddress
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import tvm_ipc
from tvm_ipc.nodes import option
from tvm_ipc.nodes.mpi import find_mpi

#: Bytes of the messages that are timed, and how often they go and come back.
SMALL: Final = 8
LARGE: Final = 8 << 20
_SMALL_ROUNDS: Final = 200
_LARGE_ROUNDS: Final = 5
_MODULE: Final = "tvm_ipc.doctor.ping"


def examine_hosts(
    hosts: option.Given, progress: Callable[[str], object] = lambda _: None
) -> dict[str, Any]:
    """Return what there is to know of machines, in the order of `hosts`; problems are answers."""
    facts: dict[str, Any] = {"launcher": None, "seconds": None, "nodes": [], "problem": None}
    try:
        facts["launcher"] = str(find_mpi())
        count = option.count(hosts)
        start = time.monotonic()
        progress(f"starting {count} nodes")
        with tvm_ipc.Session(count, hosts=hosts) as session:
            facts["seconds"] = time.monotonic() - start
            facts["nodes"] = [dict(node) for node in session.nodes]
            session.import_python_module(_MODULE)
            control = session.get_global_func("tvm_ipc.doctor.congestion")()
            for node in range(count):
                facts["nodes"][node]["congestion"] = control.debug_get_from_remote(node)
            for node in range(1, count):
                progress(f"messages to node {node}")
                ping = session.get_global_func("tvm_ipc.doctor.ping")
                for name, size, rounds in (
                    ("latency", SMALL, _SMALL_ROUNDS),
                    ("rate", LARGE, _LARGE_ROUNDS),
                ):
                    times = session.get(ping(node, size, rounds), 0)
                    one_way = statistics.median(map(float, times)) / 2
                    facts["nodes"][node][name] = one_way if name == "latency" else size / one_way
    except Exception as error:
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def render_hosts(facts: dict[str, Any]) -> str:
    """Set the facts as a table for people."""
    lines = [f"MPI      {facts['launcher'] or 'not available'}"]
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
    if facts["problem"] is not None:
        lines.append(f"PROBLEM  {facts['problem']}")
    elif len(facts["nodes"]) > 1:
        lines.append("")
        lines.append(
            f"One way, from worker to worker: messages of {SMALL} bytes, and of {LARGE >> 20} MB."
        )
    paced = [
        number
        for number, node in enumerate(facts["nodes"])
        if node.get("congestion", "").startswith("bbr")
        and not ipaddress.ip_address(node["address"]).is_loopback  # which has no limit to find
    ]
    if paced:
        lines.append(
            f"SLOW     TCP uses BBR on {'node' if len(paced) == 1 else 'nodes'} "
            f"{', '.join(map(str, paced))}, with which collectives got a third of a link of "
            "10 Gbit/s: sysctl net.ipv4.tcp_congestion_control=cubic"
        )
    return "\n".join(lines)
