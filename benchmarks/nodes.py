# SPDX-License-Identifier: Apache-2.0
"""How fast is a reduction over several nodes, next to that of the same MPI?

    sudo python benchmarks/nodes.py           # about ten minutes
    sudo python benchmarks/nodes.py --quick   # about two
    sudo python benchmarks/nodes.py --collective reduce_scatter   # or reduce; else an all-reduce

Nodes are network namespaces of this machine (root, iproute2), which share nothing but a network: at
full speed, and limited to 10 and 1 Gbit/s in each direction. Each node has cores of its own, an
even share of this machine's, to which all keeps that runs there, of both sides. With --share-cores
programs float over all cores, and the figures of a whole session depend on which of them meet on
one. Both sides have the same ranks on the same nodes: ours is the packed function, called from
every worker of a session; the peer is a C loop over MPI_Allreduce, MPI_Reduce_scatter or MPI_Reduce
among all ranks, started over the same network. They are alive all the time, are measured one after
another, size by size, in several rounds; what disturbs the machine disturbs both. Figures are
medians over the rounds, a ratio is the median of the ratios within the rounds. Every buffer's first
reduction is compared with a closed form.

A limited link that was at rest lets 256 KB through at once, the time of which short measurements
would not see. TCP's control of congestion is that of any kernel, reno, for both sides: BBR, which
some machines have, gives collectives a third of a link of 10 Gbit/s (--congestion bbr).

Of the largest size at a limited rate the table says which part of the link is used: the bytes that
a node must at least send or receive, by the time and the rate. These are the bytes of a buffer, and
of a reduce-scatter those that the ranks of other nodes want of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean, median

import peers
from allreduce_cpu import Method, Plan, powers, run
from report import Key, Results

from tvm_ipc.tools.format import message_size_text

sys.path.append(str(peers.HERE.parent))
from tests.nodes.network import Network, NoNetworkError

RATES = {"full": None, "10gbit": "10gbit", "1gbit": "1gbit"}
BITS = {"10gbit": 10e9, "1gbit": 1e9}
PEERS = {
    "allreduce": "MPI_Allreduce",
    "reduce_scatter": "MPI_Reduce_scatter",
    "reduce": "MPI_Reduce",
}
OURS = "tvm_ipc"


def peer(options: argparse.Namespace) -> peers.Ranks:
    """A C loop over MPI's function: as many ranks on each node as ours has workers there."""
    from tvm_ipc.nodes.find_mpi_installation import OPEN_MPI, find_mpi

    mpi = find_mpi()
    compiler = mpi.mpiexec.parent / "mpicc"
    program = peers.compiled("peer_mpi.c", str(compiler), "peer_mpi-nodes")
    ranks = options.nodes * options.workers
    if mpi.kind == OPEN_MPI:
        hosts = ",".join(f"{host}:{options.workers}" for host in options.hosts)
        launch = [
            *(str(mpi.mpiexec), "--allow-run-as-root", "--bind-to", "none", "--host", hosts),
            *("--prtemca", "plm_ssh_agent", options.shell),
            *("--prtemca", "prte_if_include", options.interface),
            *("--mca", "btl_tcp_if_include", options.interface),
            # There may be more ranks than cores, which the launcher cannot see: nodes share them.
            *("--mca", "mpi_yield_when_idle", "1"),
        ]
    else:
        launch = [
            *(str(mpi.mpiexec), "-bind-to", "none", "-hosts", ",".join(options.hosts)),
            *("-ppn", str(options.workers), "-iface", options.interface),
            *("-launcher", "ssh", "-launcher-exec", options.shell),
        ]
    launch += ["-n", str(ranks), str(program)]
    words = ["single", options.collective]
    return peers.Ranks(PEERS[options.collective], ranks, lambda path: [[*launch, path, *words]])


class Ours:
    """A session over the nodes; its workers hold ordinary memory."""

    name = OURS

    def __init__(self, options: argparse.Namespace) -> None:
        import ours

        from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses

        hosts = NodeAddresses(tuple(options.hosts), options.interface, Path(options.shell))
        ranks = options.nodes * options.workers
        self._collective = options.collective
        self._workers = ours.Workers(ranks, 10 * options.limit, hosts=hosts)

    def prepare(self, dtype: str, count: int, limit: float) -> str:
        del limit  # the session's deadline
        arguments = (dtype, count, False, False, 3, self._collective)
        return "ok" if all(self._workers.call("prepare", *arguments)) else "bad"

    def run(self, iterations: int, rewriting: bool, limit: float) -> float:
        del rewriting, limit
        return max(self._workers.call("run_packed", iterations))

    def close(self) -> None:
        self._workers.close()


def inside(options: argparse.Namespace) -> None:
    """Measure at one rate, from within the first node, and leave the results as JSON."""
    methods = [Method(PEERS[options.collective], "peer", lambda: peer(options))]
    if not options.peer_alone:
        methods.append(Method(OURS, "ours", lambda: Ours(options)))
    results = Results()
    plan = Plan(
        ranks=options.nodes * options.workers,
        dtypes=(options.dtype,),
        sizes=powers(options.smallest, options.largest, options.factor),
        fresh=(False,),
        rounds=options.rounds,
        seconds=options.seconds,
        limit=options.limit,
        patience=5.0,
        budget=options.budget,
    )
    try:
        run(plan, methods, results)
    finally:
        for method in methods:
            method.leave()
    found = {}
    for method in methods:
        for size in plan.sizes:
            key = Key(plan.ranks, options.dtype, False, size, method.name)
            found[f"{method.name} {size}"] = results.times.get(key) or results.notes.get(key, "-")
    Path(options.json).write_text(json.dumps(found))


def measure(rate: str, options: argparse.Namespace, arguments: list[str]) -> dict[str, object]:
    """Measure at one rate."""
    own_cores, congestion = not options.share_cores, options.congestion
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(options.nodes, RATES[rate], own_cores=own_cores, congestion=congestion) as network,
    ):
        shell = network.shell(Path(folder) / "shell")
        results = Path(folder) / "results.json"
        hosts = [node.address for node in network.nodes]
        program = [sys.executable, str(Path(__file__).resolve()), *arguments, "--json", results]
        program += ["--shell", shell, "--interface", "eth0", "--hosts", *hosts]
        subprocess.run(network.nodes[0].inside([*map(str, program)]), check=True)
        return dict(json.loads(results.read_text()))


def table(
    rate: str, found: dict[str, object], sizes: tuple[int, ...], options: argparse.Namespace
) -> str:
    """Return a table of one rate."""
    peer = PEERS[options.collective]
    share = 1.0 if options.collective != "reduce_scatter" else 1 - 1 / options.nodes
    lines = [f"rate: {rate}", f"{'size':>8} {peer + ' us':>21} {'ours us':>12} {'ratio':>7}"]
    ratios = []
    for size in sizes:
        theirs, mine = found[f"{peer} {size}"], found.get(f"{OURS} {size}")
        if not (isinstance(theirs, list) and isinstance(mine, list)):
            shown = [f"{median(x) * 1e6:.1f}" if isinstance(x, list) else x for x in (theirs, mine)]
            lines.append(f"{message_size_text(size):>8} {shown[0]!s:>21} {shown[1]!s:>12}")
            continue
        ratio = median(their / my for their, my in zip(theirs, mine, strict=False))
        ratios.append(ratio)
        line = (
            f"{message_size_text(size):>8} {median(theirs) * 1e6:21.1f} {median(mine) * 1e6:12.1f}"
        )
        line += f" {ratio:6.2f}x"
        if size == sizes[-1] and rate in BITS:
            for name, times in (("ours", mine), ("MPI", theirs)):
                used = share * size * 8 / median(times) / BITS[rate]
                line += f"  {name}: {used:.0%} of the link"
        lines.append(line)
    if ratios:
        lines.append(f"geometric mean {geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x")
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes and rounds: about two minutes")
    add("--nodes", type=int, default=2)
    add("--workers", type=int, default=2, help="on each node (2)")
    add("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    add("--collective", choices=list(PEERS), default="allreduce")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--smallest", type=int, default=1 << 10, metavar="BYTES")
    add("--largest", type=int, default=64 << 20, metavar="BYTES")
    add("--factor", type=int, choices=[2, 4, 8, 16, 64], help="between sizes (4; quick: 16)")
    add("--congestion", default="reno", help="TCP's control of congestion, such as bbr (reno)")
    add("--rounds", type=int, help="how often everything is measured (5; quick: 3)")
    add("--seconds", type=float, default=0.5, help="how long one measurement takes (0.5)")
    add("--budget", type=float, default=240.0, help="seconds after which no round begins, a rate")
    add("--limit", type=float, default=30.0, help="seconds after which a measurement is given up")
    add("--share-cores", action="store_true", help="let nodes share all cores")
    add("--peer-alone", action="store_true", help="measure MPI alone")
    for name in ("--json", "--shell", "--interface"):
        add(name, help=argparse.SUPPRESS)
    add("--hosts", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.factor = options.factor or (16 if options.quick else 4)
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    peers.OUT.mkdir(exist_ok=True)
    if options.hosts:
        inside(options)
        return 0
    sizes = powers(options.smallest, options.largest, options.factor)
    for rate in options.rates:
        try:
            found = measure(rate, options, arguments)
        except NoNetworkError as error:
            print(f"benchmarks/nodes.py: {error}", file=sys.stderr)
            return 1
        print(table(rate, found, sizes, options), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
