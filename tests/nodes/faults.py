# SPDX-License-Identifier: Apache-2.0
"""Disturbs sessions over nodes at random moments, and looks what becomes of them.

    sudo python tests/nodes/faults.py --rounds 100                  # an hour or two
    sudo python tests/nodes/faults.py --kinds worker loss --rounds 5

Nodes are network namespaces. Each round starts a program (`fault_victim.py`), waits a random time
from its first result on, and does one thing to it:

    worker     kills a worker                     agent      kills an agent
    launcher   kills mpiexec                      down       takes a node's link away, for good
    blink      takes it away for a second         loss       drops 5% of all packets
    stop       stops an agent (SIGSTOP)

The program must hear of it by an exception that names the node, in time; nothing may be left on any
node; and the program's next session must work. A link that was away for a second, and loss, may
also have no effect at all. Numbers are never wrong. The last line says how many rounds failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network import Network
from node_processes import MARK, marked

KINDS = ("worker", "agent", "launcher", "down", "blink", "loss", "stop")
TIMEOUT = 10.0
#: Seconds in which an error has to be there: the silence after which a link is lost, the deadline
#: of a wait, and the end of what is left.
PATIENCE = 45.0
#: Those that a session may survive, and how long that is looked at.
BENIGN = {"blink": 6.0, "loss": 4.0}


class WrongError(Exception):
    """What should not be."""


@dataclass
class Victim:
    """The program, and what it says."""

    process: subprocess.Popen[bytes]
    mark: str
    unread: bytes = b""

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

    def find(self, *words: str) -> list[int]:
        """The processes of this program whose command line has the words."""
        found = marked(self.mark)
        return [p for p, line in found.items() if all(word in line for word in words)]


@contextlib.contextmanager
def victim(network: Network, folder: Path, workers: int) -> Iterator[Victim]:
    mark = uuid.uuid4().hex
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
            env={**os.environ, MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield Victim(process, mark)
        finally:
            process.kill()
            process.wait()
            for left in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)


def disturb(kind: str, network: Network, one: Victim, chance: random.Random) -> tuple[str, ...]:
    """Do it; return words of which one has to be in the error."""
    last = network.nodes[-1]
    if kind == "worker":
        workers = one.find("runtime.worker")
        os.kill(chance.choice(workers), signal.SIGKILL)
        return ("node",)
    if kind in ("agent", "stop"):
        agents = [p for p in one.find("-m tvm_ipc.nodes.agent") if not one_launches(p)]
        os.kill(chance.choice(agents), signal.SIGKILL if kind == "agent" else signal.SIGSTOP)
        return ("node",)
    if kind == "launcher":
        launchers = [p for p in one.find() if parent_of(p) == one.process.pid]
        os.kill(max(launchers), signal.SIGKILL)
        return ("launcher", "node")
    if kind in ("down", "blink"):
        last.run("ip", "link", "set", "eth0", "down")
        if kind == "blink":
            time.sleep(1.0)
            last.run("ip", "link", "set", "eth0", "up")
        return (last.name, last.address, "node")
    last.run("nft", "add", "table", "inet", "faults")
    hook = "{ type filter hook input priority 0; }"
    last.run("nft", "add", "chain", "inet", "faults", "input", hook)
    rule = ("iifname", "eth0", "numgen", "random", "mod", "100", "<", "5", "drop")
    last.run("nft", "add", "rule", "inet", "faults", "input", *rule)
    return (last.name, last.address, "node")


def parent_of(process: int) -> int:
    """Return the process that started another one; 0 if that has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def one_launches(process: int) -> bool:
    """Whether a process whose command line names the agent is a launcher or a shell."""
    with contextlib.suppress(OSError):
        return "python" not in str(Path(f"/proc/{process}/exe").readlink())
    return True


def mend(kind: str, network: Network) -> None:
    last = network.nodes[-1]
    if kind == "down":
        last.run("ip", "link", "set", "eth0", "up")
    if kind == "loss":
        last.run("nft", "delete", "table", "inet", "faults")


def play(kind: str, network: Network, folder: Path, workers: int, chance: random.Random) -> str:
    """One round; what came of it."""
    with victim(network, folder, workers) as one:
        one.expect("ready", 120.0)
        time.sleep(chance.random() * 1.5)
        began = time.time()
        words = disturb(kind, network, one, chance)
        try:
            heard = one.hear(BENIGN.get(kind, PATIENCE))
        finally:
            mend(kind, network)
        if heard is None:
            if kind not in BENIGN:
                raise WrongError(f"no error within {PATIENCE:g} s")
            return "no effect"
        if heard["what"] != "error":
            raise WrongError(f"{heard}")
        if "WRONG" in heard["text"] or not any(word in heard["text"] for word in words):
            raise WrongError(f"the error does not say where: {heard}")
        took = heard["at"] - began
        one.expect("closed", 30.0)
        end = time.monotonic() + 15.0
        while left := [p for p in marked(one.mark) if p != one.process.pid]:
            if time.monotonic() > end:
                lines = marked(one.mark)
                raise WrongError(f"left behind: {[lines.get(p) for p in left]}")
            time.sleep(0.05)
        assert one.process.stdin is not None
        one.process.stdin.write(b"again\n")
        one.process.stdin.flush()
        one.expect("ready", 120.0)
        one.expect("ended", 60.0)
        if one.process.wait(30.0) != 0:
            raise WrongError(f"exit code {one.process.returncode}")
        return f"{heard['kind']} in {took:.1f} s: {heard['text'].splitlines()[0][:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for kind in options.kinds:
        for number in range(options.rounds):
            chance = random.Random(f"{kind} {options.seed} {number}")
            with tempfile.TemporaryDirectory() as folder, Network(options.nodes) as network:
                try:
                    found = play(kind, network, Path(folder), options.workers, chance)
                except (WrongError, subprocess.SubprocessError) as error:
                    failed += 1
                    found = f"FAILED: {error}\n{(Path(folder) / 'stderr').read_text()[-2000:]}"
            print(f"{kind} {number}: {found}", flush=True)
    print(f"{failed} rounds failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
