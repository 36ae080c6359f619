# SPDX-License-Identifier: Apache-2.0
"""Agents that hang while they start are ended from outside, and who ends them is gone in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.node_processes import SECONDS

Started = Callable[[], dict[int, str]]

#: It says when it is watched, and hangs; a line of input ends that.
AGENT = """
import sys
from tvm_ipc.nodes.agent import watched
with watched(float(sys.argv[1])):
    print("watched", flush=True)
    sys.stdin.readline()
print("joined", flush=True)
sys.stdin.readline()
"""
#: It starts an agent, and stays until a line of input, which the agent does not see.
DAEMON = """
import subprocess, sys
agent = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE)
sys.stdin.readline()
"""


@contextlib.contextmanager
def running(
    *program: str, folder: Path | None = None, inherited: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a program until an agent of it is watched."""
    with subprocess.Popen(
        [sys.executable, "-c", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PMIX_SERVER_TMPDIR": "" if folder is None else str(folder)},
        pass_fds=() if inherited is None else (inherited,),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watched\n"
        yield process


def watchers(started: Started) -> list[int]:
    return [
        process for process, line in started().items() if "nodes/agent_startup_watchdog.py" in line
    ]


def until(condition: Callable[[], bool], started: Started) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, started()
        time.sleep(0.01)


def only_watcher(started: Started) -> int:
    """Wait for the one watchdog: while it starts, its environment cannot be read for a moment."""
    until(lambda: len(watchers(started)) == 1, started)
    return watchers(started)[0]


def until_none(started: Started) -> None:
    until(lambda: not started(), started)


def test_an_agent_that_is_not_in_time_is_ended_with_its_daemon(
    started: Started, tmp_path: Path
) -> None:
    folder = tmp_path / "prted.1"
    (folder / "0").mkdir(parents=True)
    begun = time.monotonic()
    with running(DAEMON, AGENT, "1.5", folder=folder) as daemon:
        assert daemon.wait(SECONDS) == -signal.SIGKILL
        assert time.monotonic() - begun > 1.5
    until_none(started)
    assert not folder.exists()


def test_an_agent_whose_daemon_dies_is_ended(started: Started) -> None:
    with running(DAEMON, AGENT, "600") as daemon:
        daemon.kill()
        until_none(started)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_watches_an_agent_that_has_died(how: signal.Signals, started: Started) -> None:
    with running(AGENT, "600") as agent:
        only_watcher(started)
        agent.send_signal(how)
        until_none(started)


def test_nobody_watches_an_agent_that_has_joined(started: Started) -> None:
    with running(AGENT, "1.5") as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write("\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "joined\n"
        assert watchers(started) == []
        time.sleep(2.0)
        assert agent.communicate("\n") == ("", None) and agent.returncode == 0


def test_who_watches_holds_nothing_that_the_agent_has(started: Started) -> None:
    read, write = os.pipe()
    with running(AGENT, "600", inherited=write) as agent:
        watcher = only_watcher(started)
        held = {path.name: str(path.readlink()) for path in Path(f"/proc/{watcher}/fd").iterdir()}
        assert held.pop("0").startswith("pipe:")
        assert (held.pop("1"), held.pop("2")) == ("/dev/null",) * 2
        assert not [at for at in held.values() if at.startswith(("pipe:", "socket:"))]
        assert Path(f"/proc/{watcher}/cwd").readlink() == Path("/")
        agent.kill()
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
