# SPDX-License-Identifier: Apache-2.0
"""Disturbs sessions over nodes at random moments, and looks what becomes of them.

    sudo python -m tests.nodes.faults --rounds 100                  # two hours
    sudo python -m tests.nodes.faults --kinds worker loss --rounds 5
    sudo python -m tests.nodes.faults --kinds agent --start         # while the session starts

Nodes are network namespaces. A program (`fault_victim.py`) opens one session after the other. In
each round one thing is done to its session, at a random moment:

    worker     kills a worker                     agent      kills an agent
    launcher   kills mpiexec                      down       takes a node's link away, for good
    blink      takes it away for a second         loss       drops 5% of all packets of a node
    stop       stops an agent (SIGSTOP)

The program must hear of it by an exception that names the node that was hit, in time; nothing may
be left on any node; and the program's next session, which is the next round's, must work. A link
that was away for a second, and loss, may also have no effect: then collectives go on for longer
than the silence after which a node is lost. Numbers are never wrong. The last line says how many
rounds failed. Loss wants nftables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.nodes.network import Network, Node
from tests.nodes.node_processes import MARK, marked

KINDS = ("worker", "agent", "launcher", "down", "blink", "loss", "stop")
#: Those that a session may survive.
BENIGN = ("blink", "loss")
#: The deadline of the sessions' waits.
TIMEOUT = 10.0
#: After so much silence a node is lost.
SILENCE = 10.0
#: Seconds in which an error has to be there: silence, the deadline of a wait, and what both cost.
PATIENCE = 45.0
#: Seconds in which a session has started, or says who is missing: its own 120, and some.
START = 150.0


class WrongError(Exception):
    """What should not be."""


@dataclass
class Victim:
    """The program, and what it says."""

    process: subprocess.Popen[bytes]
    mark: str
    network: Network
    temporary: Path
    unread: bytes = b""
    #: Temporary files that were there after the round before.
    files: set[str] = field(default_factory=set)

    def tell(self) -> None:
        """Let it begin a session, or end the one that it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return its next line; None if there is none in time."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self.unread:
            left = max(0.0, end - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise WrongError(f"the program ended with exit code {self.process.wait()}")
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return dict(json.loads(line))

    def expect(self, what: str, seconds: float) -> dict[str, Any]:
        heard = self.hear(seconds)
        if heard is None:
            raise WrongError(f"no {what!r} within {seconds:g} s")
        if heard["what"] != what:
            raise WrongError(f"{heard} instead of {what!r}")
        return heard

    def find(self, kind: str) -> list[int]:
        """Return its workers, agents or launchers."""
        return [process for process, line in marked(self.mark).items() if kind_of(line) == kind]

    def node_of(self, process: int) -> Node:
        """Return the node in which a process runs."""
        where = network_of(process)
        return next(n for n in self.network.nodes if network_of(n.keeper.pid) == where)

    def wait_until_alone(self, seconds: float = 15.0) -> None:
        """Raise if anything that it has started does not end in time."""
        end = time.monotonic() + seconds
        while left := {p: what for p, what in marked(self.mark).items() if p != self.process.pid}:
            if time.monotonic() > end:
                raise WrongError(f"left behind: {left}")
            time.sleep(0.05)
        for node in self.network.nodes:
            shown = subprocess.run(
                node.inside(["ls", "/dev/shm"]), check=True, capture_output=True, text=True
            )
            if shown.stdout:
                raise WrongError(f"left in /dev/shm of {node.name}: {shown.stdout.split()}")
        # Those of an agent that was killed are there until the next session. A folder of a node,
        # ompi.HOST.USER, which Open MPI makes once, stays.
        files = {path.name for path in self.temporary.glob("*") if path.name.count(".") < 2}
        if stale := files & self.files:
            raise WrongError(f"left of temporary files: {sorted(stale)}")
        self.files = files


def kind_of(line: str) -> str:
    """Return what a process is, by its command line."""
    first, *words = line.split() or [""]
    if Path(first).name.startswith("python"):
        if "runtime.worker" in line:
            return "worker"
        return "agent" if "tvm_ipc.nodes.agent" in words else ""
    return "launcher" if Path(first).name in ("mpiexec", "mpirun", "prterun") else ""


def network_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{process}/ns/net").readlink())
    return ""


@contextlib.contextmanager
def victim(network: Network, folder: Path, workers: int) -> Iterator[Victim]:
    mark = uuid.uuid4().hex
    temporary = folder / "temporary"
    temporary.mkdir()
    given = {
        "hosts": [node.address for node in network.nodes],
        "network": "eth0",
        "shell": str(network.shell(folder / "shell")),
        "workers": workers,
        "timeout": TIMEOUT,
    }
    program = [sys.executable, str(Path(__file__).parent / "fault_victim.py"), json.dumps(given)]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            network.nodes[0].inside(program),
            env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield Victim(process, mark, network, temporary)
        finally:
            process.kill()
            process.wait()
            for left in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)


def disturb(kind: str, one: Victim, starting: bool, chance: random.Random) -> tuple[str, ...]:
    """Do it; return words of which one has to be in the error. None: there was nothing yet."""
    last = one.network.nodes[-1]
    # Before an agent has joined only the launcher knows of it, and one that is stopped while MPI
    # starts keeps all of them from joining. MPI does not always get over a link that was
    # away for a second: then nobody joins, or no rank answers.
    late = ("nodes did not start",)
    of_kinds = {"agent": ("mpiexec",), "stop": late, "down": ("mpiexec", *late)}
    of_kinds["blink"] = (*of_kinds["down"], "did not answer within")
    unjoined = of_kinds.get(kind, ()) if starting else ()
    if kind in ("worker", "agent", "stop", "launcher"):
        found = one.find("agent" if kind == "stop" else kind)
        if not found:
            return ()
        chosen = chance.choice(sorted(found))
        node = one.node_of(chosen)
        os.kill(chosen, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        named = ("mpiexec",) if kind == "launcher" else names(node, one.network)
        return named + unjoined
    if kind in ("down", "blink"):
        last.run("ip", "link", "set", "eth0", "down")
        if kind == "blink":
            time.sleep(1.0)
            last.run("ip", "link", "set", "eth0", "up")
    if kind == "loss":
        last.run("nft", "add", "table", "inet", "faults")
        hook = "{ type filter hook input priority 0; }"
        last.run("nft", "add", "chain", "inet", "faults", "input", hook)
        rule = ("iifname", "eth0", "numgen", "random", "mod", "100", "<", "5", "drop")
        last.run("nft", "add", "rule", "inet", "faults", "input", *rule)
    return names(last, one.network) + unjoined


def names(node: Node, network: Network) -> tuple[str, ...]:
    """How an error may name a node."""
    return (f"node {network.nodes.index(node)} ", node.name, node.address)


def mend(kind: str, network: Network) -> None:
    last = network.nodes[-1]
    if kind == "down":
        last.run("ip", "link", "set", "eth0", "up")
    if kind == "loss":
        last.run("nft", "delete", "table", "inet", "faults")


def play(kind: str, one: Victim, starting: bool, chance: random.Random) -> str:
    """One round; what came of it."""
    one.tell()
    if starting:
        time.sleep(chance.random() * 4.0)
    else:
        one.expect("ready", START)
        time.sleep(chance.random() * 1.5)
    began = time.time()
    words = disturb(kind, one, starting, chance)
    try:
        return what_came(kind, one, starting, words, began)
    finally:
        mend(kind, one.network)


def what_came(kind: str, one: Victim, starting: bool, words: tuple[str, ...], began: float) -> str:
    """What came of a disturbance: an error with one of the words, or nothing where it may be."""
    survives = kind in BENIGN or not words
    patience = SILENCE + 5.0 if survives else PATIENCE
    heard = one.hear(START if starting else patience)
    if heard is not None and heard["what"] == "ready":  # it has started after all
        heard = one.hear(patience)
    if heard is None:
        if not survives:
            raise WrongError("no error in time")
        one.tell()
        rounds = one.expect("ended", PATIENCE)["rounds"]
        one.expect("closed", 30.0)
        one.wait_until_alone()
        return f"no effect on {rounds} rounds of collectives"
    if heard["what"] != "error":
        raise WrongError(f"{heard}")
    if "WRONG" in heard["text"] or not any(word in heard["text"] for word in words):
        raise WrongError(f"not one of {words} is in the error: {heard}")
    took = heard["at"] - began
    closed = one.expect("closed", 30.0)["at"] - began
    # A node that is cut off before its agent has joined ends when it should have started.
    one.wait_until_alone(START if starting and kind == "down" else 15.0)
    ended = time.time() - began
    line = heard["text"].splitlines()[0][:120]
    return (
        f"{heard['kind']} after {took:.1f} s, closed after {closed:.1f} s, all ended after "
        f"{ended:.1f} s: {line}"
    )


def series(kind: str, options: argparse.Namespace) -> int:
    """Play some rounds with one program, and another one after a failure; how many failed."""
    failed = number = 0
    while number < options.rounds:
        with (
            tempfile.TemporaryDirectory() as folder,
            Network(options.nodes) as network,
            victim(network, Path(folder), options.workers) as one,
        ):
            found = ""
            while number < options.rounds and not found.startswith("FAILED"):
                seed = options.seed + number
                number += 1
                try:
                    found = play(kind, one, options.start, random.Random(f"{kind} {seed}"))
                except (WrongError, OSError, subprocess.SubprocessError) as error:
                    failed += 1
                    said = (Path(folder) / "stderr").read_text()[-2000:]
                    found = f"FAILED: {error}\n{said}"
                print(f"{kind}, seed {seed}: {found}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the first round (0)")
    parser.add_argument("--start", action="store_true", help="while the session starts")
    options = parser.parse_args()
    if "loss" in options.kinds and shutil.which("nft") is None:
        parser.error("loss wants the command nft: apt-get install nftables")
    failed = sum(series(kind, options) for kind in options.kinds)
    print(f"{failed} rounds failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
