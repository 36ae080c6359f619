# SPDX-License-Identifier: Apache-2.0
"""The launcher's command line, what it is told, and how it ends. It is a script here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import MPICH, OPEN_MPI, Mpi
from tvm_ipc.nodes.mpiexec_launcher import Launcher, NodeAddresses, command_line

SECONDS = 20.0


def line(kind: str, places: NodeAddresses) -> str:
    words = command_line(Mpi(kind, Path("/bin/mpiexec"), kind), places, ["program", "2"])
    return " ".join(word for word in words if word != "--allow-run-as-root")


def test_command_lines() -> None:
    shell = Path("/usr/bin/shell")
    assert line(OPEN_MPI, NodeAddresses(2)) == (
        "/bin/mpiexec --bind-to none --host localhost:2 --mca pml ob1 -n 2 program 2"
    )
    assert line(OPEN_MPI, NodeAddresses(("a", "b.example.org"), "10.0.0.0/24", shell)) == (
        "/bin/mpiexec --bind-to none --map-by node --host a:1,b.example.org:1 "
        "--prtemca prte_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24 "
        "--prtemca plm_ssh_agent /usr/bin/shell -n 2 program 2"
    )
    assert line(MPICH, NodeAddresses(3)) == "/bin/mpiexec -bind-to none -n 3 program 2"
    assert line(MPICH, NodeAddresses(("a", "b"), "eth0", shell)) == (
        "/bin/mpiexec -bind-to none -iface eth0 -hosts a,b -ppn 1 -launcher ssh "
        "-launcher-exec /usr/bin/shell -n 2 program 2"
    )
    with pytest.raises(IPCError, match="MPICH takes the name of an interface"):
        line(MPICH, NodeAddresses(("a", "b"), "10.0.0.0/24"))


@pytest.mark.parametrize(
    "host",
    ["", "-x", "a b", "a,b", "a;c", "a\nb", "a:22", "a/b", "a\x7f", "a\0", "\u200ba", "\udcff"],
)
def test_names_that_are_none(host: str) -> None:
    with pytest.raises(IPCError, match="is not a valid name of a machine"):
        NodeAddresses(("a", host))


def test_no_nodes() -> None:
    for hosts in (0, ()):
        with pytest.raises(IPCError, match="at least one node"):
            NodeAddresses(hosts)  # type: ignore[arg-type]


def launch(folder: Path, script: str) -> Launcher:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Launcher(Mpi(OPEN_MPI, path, "Open MPI 5"), NodeAddresses(2), ["program"], "the secret")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_is_told_and_heard(
    tmp_path: Path, started: Callable[[], dict[int, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = launch(tmp_path, 'read -r told; echo "told $told"; echo heard >&2; exec sleep 600')
    until(lambda: "told the secret" in launcher.output and "heard" in launcher.output)
    assert capfd.readouterr() == ("", "")  # until all have joined
    launcher.check()
    assert len(started()) == 1
    launcher.stop(0.0)
    assert started() == {}


def test_what_it_prints_later_is_printed(
    tmp_path: Path, started: Callable[[], dict[int, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.01; done"
    launcher = launch(tmp_path, f"{wait}; echo one; echo two >&2")
    launcher.pass_on()
    gate.touch()
    launcher.stop(SECONDS)
    assert capfd.readouterr() == ("one\n", "two\n")


def test_what_the_launcher_leaves_behind_goes(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 'touch "$PRTE_MCA_prte_local_tmpdir_base/left"; echo there; cat')
    until(lambda: "there" in launcher.output)
    folder = launcher._folder.path()
    assert [path.name for path in folder.iterdir()] == ["left"]
    launcher.stop(0.0)
    assert not folder.exists()


def test_daemons_look_whether_links_are_there_as_the_user_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRTE_MCA_oob_tcp_keepalive_time", "60")
    launcher = launch(tmp_path, "env | grep keepalive | sort; echo there; cat")
    until(lambda: "there" in launcher.output)
    launcher.stop(0.0)
    assert launcher.output.split()[:3] == [
        "PRTE_MCA_oob_tcp_keepalive_intvl=5",
        "PRTE_MCA_oob_tcp_keepalive_probes=4",
        "PRTE_MCA_oob_tcp_keepalive_time=60",
    ]


def test_its_end_is_an_error_with_what_it_said(
    tmp_path: Path, started: Callable[[], dict[int, str]]
) -> None:
    launcher = launch(tmp_path, "echo no such host >&2; yes filler | head -c 20000; exit 7")
    until(lambda: launcher.process.poll() is not None)
    with pytest.raises(IPCError, match=r"Open MPI 5\), ended with exit code 7[^~]*no such host"):
        launcher.check()
    assert len(launcher.output) <= 8192
    launcher.stop(0.0)
    launcher = launch(tmp_path, "kill -9 $$")
    until(lambda: launcher.process.poll() is not None)
    asked = r"It was asked to start program on 2 nodes of this machine, over the network one that "
    with pytest.raises(IPCError, match=rf"ended with SIGKILL\n{asked}MPI chooses, with temporary"):
        launcher.check()
    launcher.pass_on()  # all agents are there, so that is no error of the start
    with pytest.raises(IPCError, match=r"ended with SIGKILL$"):
        launcher.check()
    launcher.stop(0.0)


def test_a_launcher_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(IPCError, match=r"Open MPI 5\), does not start: .*No such file"):
        Launcher(Mpi(OPEN_MPI, tmp_path / "none", "Open MPI 5"), NodeAddresses(2), ["program"], "x")
