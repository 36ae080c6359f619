# SPDX-License-Identifier: Apache-2.0
"""What does it cost to start, command and lose many agents? A simulation on one machine.

    python benchmarks/control_plane.py --agents 2 16 64 256

The controller and the agents are processes that speak over TCP of this machine, with the package's
own door, proof and messages; what MPI's launcher takes to start them, and networks, are not in it.
Figures are medians over `--rounds`:

    join       from the first agent's connection until the last one has proven itself
    send       the controller's own part of a command to every agent, one by one
    each       the same until all have answered
    tree F     a command that agents pass on to F others each, and whose answers are gathered the
               same way; the tree's own connections are proven in the same manner
    death      from SIGKILL of an agent until the controller has told all others, and they answered

More agents than cores share these cores: machines of their own answer sooner.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from tvm_ipc.nodes.admission import Admission
from tvm_ipc.nodes.controller_agent_json_messages import Messages
from tvm_ipc.nodes.handshake import Key, PeerIdentity, enter
from tvm_ipc.nodes.listen_address import LOOPBACK

SECONDS = 120.0
COMMAND = "x" * 200  # a call of Disco's has about so many bytes


def children(node: int, agents: int, degree: int) -> range:
    """Return whom a node of the tree passes on to; the controller is node -1."""
    first = (node + 1) * degree
    return range(min(first, agents), min(first + degree, agents))


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that names its question."""
    return {"round": message["round"]}


class Below:
    """Those that a node passes on to, and what they have answered."""

    def __init__(self, links: list[Messages]) -> None:
        self.links = links

    def ask(self, message: dict[str, Any]) -> float:
        """Pass a message on and return when all have answered: the seconds that sending took."""
        start = time.perf_counter()
        for link in self.links:
            link.send(**message)
        took = time.perf_counter() - start
        waited = {link.connection: link for link in self.links}
        while waited:
            for ready in select.select(list(waited), [], [])[0]:
                link = waited[ready]
                if link.receive() or link.ended:
                    del waited[ready]
        return took


def agent(node: int, key: Key, address: tuple[str, int], agents: int, degree: int) -> None:
    """What an agent does until the controller hangs up."""
    controller = Messages(enter(key, PeerIdentity(node, "agent"), [address], SECONDS))
    below = children(node, agents, degree)
    door = (
        Admission(key, [PeerIdentity(child, "agent") for child in below], LOOPBACK)
        if below
        else None
    )
    controller.send("facts", address=door.address if door else None)
    up, rest = controller, Below([])
    links = [controller]
    while True:
        for ready in select.select([link.connection for link in links], [], [])[0]:
            link = next(one for one in links if one.connection is ready)
            for message in link.receive():
                if message["what"] == "tree":
                    if message["parent"] is not None:
                        place = PeerIdentity(node, "agent")
                        up = Messages(enter(key, place, [tuple(message["parent"])], SECONDS))
                        links.append(up)
                    if door is not None:
                        door.wait(SECONDS)
                        rest = Below([Messages(door.admitted[p]) for p in sorted_places(door)])
                    controller.send("in the tree")
                elif message["what"] == "passed on":
                    rest.ask(message)
                    link.send("done", **answer(message))
                else:
                    link.send("done", **answer(message))
            if controller.ended:
                return


def sorted_places(door: Admission) -> list[PeerIdentity]:
    return sorted(door.admitted, key=lambda place: place.node)


@dataclass
class Times:
    """Seconds of one round."""

    join: float
    send: float
    each: float
    tree: float
    death: float


def simulate(agents: int, degree: int, commands: int) -> Times:
    """Start agents, command them, and lose one."""
    key = Key.new()
    with Admission(key, [PeerIdentity(node, "agent") for node in range(agents)], LOOPBACK) as door:
        processes = []
        for node in range(agents):
            process = os.fork()
            if process == 0:
                code = 1
                try:
                    agent(node, key, door.address, agents, degree)
                    code = 0
                finally:
                    os._exit(code)
            processes.append(process)
        try:
            while not door.admitted:
                door.poll(1.0)
            start = time.perf_counter()
            door.wait(SECONDS)
            join = time.perf_counter() - start
            links = [Messages(door.admitted[place]) for place in sorted_places(door)]
            return Times(join, *_command(links, degree, commands, processes))
        finally:
            for connection in door.admitted.values():
                connection.close()
            for process in processes:
                os.waitpid(process, 0)


def _command(
    links: list[Messages], degree: int, commands: int, processes: list[int]
) -> tuple[float, float, float, float]:
    addresses = [_next(link)["address"] for link in links]
    parents: dict[int, Any] = {}
    for node, address in enumerate(addresses):
        parents.update(dict.fromkeys(children(node, len(links), degree), address))
    for node, link in enumerate(links):
        link.send("tree", parent=parents.get(node))
    for link in links:
        _next(link)
    all_ = Below(links)
    top = Below([links[node] for node in children(-1, len(links), degree)])
    send, each, tree = [], [], []
    for number in range(commands):
        start = time.perf_counter()
        send.append(all_.ask({"what": "direct", "round": number, "command": COMMAND}))
        middle = time.perf_counter()
        top.ask({"what": "passed on", "round": number, "command": COMMAND})
        each.append(middle - start)
        tree.append(time.perf_counter() - middle)
    # The last one has nobody below it.
    start = time.perf_counter()
    os.kill(processes[-1], signal.SIGKILL)
    select.select([links[-1].connection], [], [])
    Below(links[:-1]).ask({"what": "abort", "round": -1})
    return median(send), median(each), median(tree), time.perf_counter() - start


def _next(link: Messages) -> dict[str, Any]:
    while not (heard := link.receive()):
        if link.ended:
            sys.exit("an agent has ended")
        select.select([link.connection], [], [])
    return heard[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 16, 64, 256])
    parser.add_argument("--degrees", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    trees = [f"tree {degree} ms" for degree in options.degrees]
    heads = ["agents", "join ms", "send ms", "each ms", *trees, "death ms"]
    print("".join(f"{head:>12}" for head in heads))
    for agents in options.agents:
        times = {
            degree: [simulate(agents, degree, options.commands) for _ in range(options.rounds)]
            for degree in options.degrees
        }
        every = [one for some in times.values() for one in some]
        figures = [median(t.join for t in every), median(t.send for t in every)]
        figures.append(median(t.each for t in every))
        figures += [median(t.tree for t in some) for some in times.values()]
        figures.append(median(t.death for t in every))
        print(f"{agents:12}" + "".join(f"{1e3 * x:12.2f}" for x in figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
