# SPDX-License-Identifier: Apache-2.0
"""Agents that a real MPI starts, as two nodes on this machine, and workers of theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm  # noqa: F401  loads the native library

from tests.nodes.node_processes import SECONDS
from tvm_ipc.errors import DeadlineError, IPCError, WorkerDiedError
from tvm_ipc.nodes import start_and_watch_agents
from tvm_ipc.nodes.find_mpi_installation import OPEN_MPI, Mpi
from tvm_ipc.nodes.handshake import Key
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
from tvm_ipc.nodes.start_and_watch_agents import NodePool
from tvm_ipc.runtime.start_child_process import python_module
from tvm_ipc.runtime.worker_pool_interface import PoolRequest

HOST = "127.0.0.1"
HERE = Path(__file__).parent
REQUEST = PoolRequest((3, 1), "mpi")
Started = Callable[[], dict[int, str]]


def program(workers: int, what: str) -> list[str]:
    given = json.dumps({"workers": workers, "what": what})
    return [sys.executable, str(HERE / "disco_over_nodes.py"), given]


def two_nodes(mpi: Mpi) -> NodePool:
    """Worker 1 on node 0, worker 2 on node 1."""
    return NodePool(NodeAddresses(2), REQUEST, address=HOST, timeout=SECONDS, mpi=mpi)


def until_error(nodes: NodePool) -> IPCError:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            nodes.check()
        except IPCError as error:
            return error
        time.sleep(0.01)
    pytest.fail("nobody hears of the death")


def end_of(nodes: NodePool) -> None:
    nodes.finish()
    nodes.forget()


def test_what_agents_tell_and_nobody_can_read(
    mpi: Mpi, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a worker dies."""
    key = Key.new()
    monkeypatch.setattr(Key, "new", lambda: key)
    nodes = two_nodes(mpi)
    try:
        nodes.check()
        for node in nodes.nodes:
            assert node.facts is not None and node.facts["address"] == HOST
            assert node.shares_memory is True  # nodes by name alone
        for process in started():
            folder = Path(f"/proc/{process}")
            seen = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            assert key.text[:32].encode() not in seen and key.secret not in seen
        processes = nodes.nodes[1].processes
        assert processes is not None and processes[2] in started()
        environment = Path(f"/proc/{processes[2]}/environ").read_bytes().split(b"\0")
        assert not [e for e in environment if e.startswith((b"OMPI_", b"PMI", b"PRTE"))]
        os.kill(processes[2], signal.SIGKILL)
        error = until_error(nodes)
        assert isinstance(error, WorkerDiedError) and error.ranks == (2,)
        assert str(error).startswith("worker 2 of node 1 (") and "died of SIGKILL" in str(error)
    finally:
        end_of(nodes)


@pytest.mark.parametrize("who", ["agent", "launcher"])
def test_a_death_is_told_and_nothing_stays(who: str, mpi: Mpi, started: Started) -> None:
    nodes = two_nodes(mpi)
    try:
        facts = nodes.nodes[1].facts
        assert facts is not None
        agent = who == "agent"
        os.kill(facts["process"] if agent else nodes._launcher.process.pid, signal.SIGKILL)
        error = until_error(nodes)
        if agent:  # and not the other one, which MPI ends too
            assert str(error).startswith("the agent of node 1 ("), error
            assert isinstance(error, WorkerDiedError) and error.ranks == (2,)
        else:
            assert "ended with SIGKILL" in str(error)
    finally:
        end_of(nodes)


def test_the_end_of_the_controller_is_the_end_of_all(mpi: Mpi, started: Started) -> None:
    with subprocess.Popen(program(3, "wait"), stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None and len(json.loads(controller.stdout.readline())) == 2
        assert len(started()) >= 6  # itself, the launcher, agents, workers
        controller.kill()  # `started` sees to it that the others end


def test_disco_over_connections(mpi: Mpi, started: Started) -> None:
    command = program(4, "session")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["ok"]), done.stderr


def test_a_rank_that_is_alone(mpi: Mpi, started: Started) -> None:
    """As all are where the launcher is another MPI's."""
    command = [*start_and_watch_agents._AGENT, *python_module("tvm_ipc.nodes.agent"), "2", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert "rank 0 of 1; expected 2 agents" in done.stderr


def test_an_agent_that_is_cut_off_ends_the_daemon_that_waits_for_the_launcher(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "prted.1"
    (folder / "0").mkdir(parents=True)
    agent = "from tvm_ipc.nodes.agent import end_with_daemon; end_with_daemon()"
    daemon = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {agent!r}]); input()"
    done = subprocess.run(
        [sys.executable, "-c", daemon],
        env={**os.environ, "PMIX_SERVER_TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
    )
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + SECONDS
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


#: It inherits the children of processes that die, as init does, and says how the agent ended.
INHERITING = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
print("ended with", os.waitstatus_to_exitcode(os.wait()[1]))
"""
DYING_DAEMON = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE).stdout.readline()
"""
INHERITED_AGENT = """
import os, time
from tvm_ipc.nodes import agent
daemon = os.getppid()
print("started", flush=True)
while os.getppid() == daemon:
    time.sleep(0.01)
agent.end_with_daemon()
"""


def test_an_agent_whose_daemon_has_died_does_not_kill_who_inherits_it(
    started: Started,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INHERITING, DYING_DAEMON, INHERITED_AGENT],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "ended with 1\n"), done.stderr


def test_errors_of_the_start(mpi: Mpi, started: Started) -> None:
    program = [sys.executable, "-c", "import sys; sys.exit('no agent')"]
    with pytest.raises(IPCError, match=r"ended with exit code 1\n[^~]*It printed:\n[^~]*no agent"):
        NodePool(NodeAddresses(2), REQUEST, address=HOST, timeout=SECONDS, mpi=mpi, program=program)
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(DeadlineError, match=r"within 0\.5 s: agent of node 0, agent of node 1;"):
        NodePool(NodeAddresses(2), REQUEST, address=HOST, timeout=0.5, mpi=mpi, program=program)
    with pytest.raises(IPCError, match=r"on 2 nodes of this machine, over the network nowhere0, "):
        places = NodeAddresses(2, "nowhere0")  # of which Open MPI says "None of the TCP networks"
        NodePool(places, REQUEST, address=HOST, timeout=SECONDS, mpi=mpi)


@pytest.mark.slow
def test_the_start_ends_at_its_deadline_whatever_mpi_does(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI is found late, and its launcher neither starts agents nor ends when it is asked to."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\ntrap '' TERM\nsleep 60 &\nwhile :; do sleep 60; done\n")
    launcher.chmod(0o755)

    def find() -> Mpi:
        time.sleep(2.0)
        return Mpi(OPEN_MPI, launcher, "Open MPI 5")

    monkeypatch.setattr(start_and_watch_agents, "find_mpi", find)
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 3 s: agent of node 0, agent of node 1;"):
        NodePool(NodeAddresses(2), REQUEST, address=HOST, timeout=3.0)
    # Beyond 3 s are what a launcher has to end in (3 s) and to say its last words (2 s).
    assert time.monotonic() - begin < 3.0 + 5.0 + 1.0
    for process in started():
        os.kill(process, signal.SIGKILL)
