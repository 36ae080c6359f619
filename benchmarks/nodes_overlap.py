# SPDX-License-Identifier: Apache-2.0
"""How much of an all-gather between nodes hides behind the matmul that follows it?

    sudo python benchmarks/nodes_overlap.py                 # under a minute
    sudo python benchmarks/nodes_overlap.py --rate 10gbit

Nodes are network namespaces of this machine (root, iproute2), which share nothing but a network of
a limited rate. Each node has cores of its own, an even share of this machine's, to which all keeps
that runs there; with --share-cores programs float over all cores. Each worker has some rows, which
all of them gather and multiply, with its share of the cores, one at least. Measured are the
all-gather alone, the matmul of all rows alone, both one after the other, and what
`OverlapCommunication` makes of them in some numbers of chunks. All take turns in rounds; times are
those of the slower worker, figures are medians over the rounds.

    hidden = (all-gather + matmul - overlapped) / the smaller one of the two
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve()
sys.path.append(str(HERE.parent.parent))
from tests.nodes.network import Network, NoNetworkError  # noqa: E402

#: Rows of a worker, inner extent, columns: twice more to send, with less and more of both; as much
#: matmul; and more of it, which leaves the network no core where workers have them all.
SHAPES = ((1024, 1024, 320), (2048, 1024, 512), (1024, 1024, 640), (1024, 1024, 1280))


def inside(options: argparse.Namespace) -> None:
    """Measure from within the first node."""
    from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
    from tvm_ipc.packed_functions import CollectiveFlag, Team
    from tvm_ipc.packed_functions.collective_declarations import ALLGATHER
    from tvm_ipc.tools.bench import overlap, overlap_programs
    from tvm_ipc.tools.bench.timing_session import TimingSession
    from tvm_ipc.transform.overlap.cost_model import Workload

    given = json.loads(options.inside)
    hosts = NodeAddresses(tuple(given["hosts"]), "eth0", Path(given["shell"]))
    workers = options.nodes * options.workers
    print(f"{workers} workers on {options.nodes} nodes, {options.rate}; times in ms")
    head = f"{'rows x inner x columns':24}{'gather':>9}{'matmul':>9}{'without':>9}"
    print(head + "".join(f"{f'{n} chunks':>17}" for n in options.chunks), flush=True)
    with TimingSession(workers, hosts=hosts) as stage:
        for rows, inner, columns in options.shapes:
            work = Workload("allgather", workers, rows, inner, columns, 4, True)
            made = overlap.Programs(stage, work, options.chunks)
            turns = made.interleaved()
            x, whole = (
                turns[overlap_programs.PLAIN][1][0],
                turns[overlap_programs.MATMUL][1][0],
            )
            gather = stage.function(ALLGATHER.name)
            turns["gather"] = (gather, [x, int(Team.WORLD), int(CollectiveFlag.NONE), whole])
            times = stage.interleaved(turns, options.rounds)
            middle = {name: median(one) for name, one in times.items()}
            alone = middle["gather"], middle[overlap_programs.MATMUL]
            line = f"{f'{rows} x {inner} x {columns}':24}"
            line += "".join(f"{1e3 * one:9.1f}" for one in (*alone, middle[overlap_programs.PLAIN]))
            for count in options.chunks:
                both = middle[overlap_programs.overlapped(count)]
                hidden = (sum(alone) - both) / min(alone)
                line += f"{1e3 * both:9.1f} ({hidden:4.0%})"
            print(line, flush=True)


def shape(text: str) -> tuple[int, ...]:
    rows, inner, columns = map(int, text.split("x"))
    return rows, inner, columns


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--nodes", type=int, default=2)
    add("--workers", type=int, default=1, help="on each node (1)")
    add("--rate", default="1gbit", help="of the network, in each direction (1gbit)")
    add("--chunks", type=int, nargs="+", default=[2, 4, 8])
    add("--rounds", type=int, default=5, help="how often everything is measured (5)")
    add("--shapes", type=shape, nargs="+", default=SHAPES, metavar="ROWSxINNERxCOLUMNS")
    add("--share-cores", action="store_true", help="let nodes share all cores")
    add("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(options)
        return 0
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Network(options.nodes, options.rate, own_cores=not options.share_cores) as network,
        ):
            told = {
                "hosts": [node.address for node in network.nodes],
                "shell": str(network.shell(Path(folder) / "shell")),
            }
            program = [sys.executable, str(HERE), *arguments, "--inside", json.dumps(told)]
            # What is right for nodes with cores of their own is right for nodes that share them,
            # which do not know it.
            cores = len(os.sched_getaffinity(0)) // (options.nodes * options.workers)
            settings = {**os.environ, "TVM_NUM_THREADS": str(max(1, cores))}
            inner = network.nodes[0].inside(program)
            return subprocess.run(inner, env=settings).returncode
    except NoNetworkError as error:
        print(f"benchmarks/nodes_overlap.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
