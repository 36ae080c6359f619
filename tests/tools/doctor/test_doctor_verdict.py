# SPDX-License-Identifier: Apache-2.0
"""The verdict at the start of `tvm-ipc doctor`, on machines with and without each feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tvm_ipc
from tvm_ipc.__main__ import main
from tvm_ipc.errors import IPCError
from tvm_ipc.gpu import discovery
from tvm_ipc.gpu.discovery import Gpu, Gpus
from tvm_ipc.nodes.find_mpi_installation import Mpi
from tvm_ipc.pip_install_commands import install_extra
from tvm_ipc.runtime import repair_disco_import, shared_libraries
from tvm_ipc.tools.doctor import facts, feature_readiness_and_advice

H200 = Gpu(0, "NVIDIA H200", "9.0", 150_000_000_000, "sm_90", "")
WORKS = (True, "two workers ran an all-reduce")
#: Texts of the system's loader and of the BLAS about itself.
RAW = ("cannot open shared object file", "MAX_THREADS", "DYNAMIC_ARCH", "/libtvm_ipc.so")

Trial = Callable[[str, list[int]], tuple[bool, str]]


@pytest.fixture
def machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str], str]]:
    """Run the doctor on a fake machine: its exit code, its verdict and its details."""

    def run(
        *options: str, gpus: Gpus | None = None, mpi: bool = True, trial: Trial | None = None
    ) -> tuple[int, list[str], str]:
        def find() -> Mpi:
            if not mpi:
                raise IPCError("there is no mpiexec in /some/where")
            return Mpi("Open MPI", Path("/bin/mpiexec"), "Open MPI 5.0.11")

        monkeypatch.setattr(facts, "find_launcher", lambda: Path("/bin/mpiexec") if mpi else None)
        monkeypatch.setattr(facts, "find_mpi", find)
        if trial is not None:
            monkeypatch.setattr(facts, "_try", trial)
        if gpus is not None:
            monkeypatch.setattr(shared_libraries, "has_nvidia_driver", lambda: True)
            monkeypatch.setattr(discovery, "find", lambda: gpus)
            monkeypatch.setattr(discovery, "ask", lambda *_: None)
        code = main(["doctor", *options])
        head, _, details = capsys.readouterr().out.partition("\n\n")
        return code, head.splitlines(), details

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return run


def test_all_is_fine(machine: Any) -> None:
    gpus = Gpus("13.0", "", (H200, H200), ("sm_90",))
    code, head, details = machine(gpus=gpus, trial=lambda *_: WORKS)
    assert code == 0
    assert head == [
        "Ready on CPUs: 2 workers tried.",
        "Several machines: Open MPI works.",
        "GPUs: 2 x NVIDIA H200 ready, 2 workers tried.",
    ]
    assert "GPU 0                NVIDIA H200" in details


def test_patched_defects_are_details(machine: Any) -> None:
    assert "tvm.runtime.disco._ffi_api was empty" in repair_disco_import.patch_disco().patched
    _, head, details = machine(trial=lambda *_: WORKS)
    assert not any("disco" in line.lower() for line in head)
    assert "tvm.runtime.disco._ffi_api was empty: patched" in details


def test_defects_that_are_left_are_in_the_verdict(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = repair_disco_import.DiscoPatch(
        found=("a was empty", "b is not registered"), patched=("a",)
    )
    monkeypatch.setattr(repair_disco_import, "patch_disco", lambda: left)
    _, head, details = machine(trial=lambda *_: WORKS)
    (line,) = (line for line in head if line.startswith("Disco: incomplete"))
    assert "b is not registered. Run: pip install --force-reinstall apache-tvm==" in line
    assert "b is not registered: not patched" in details


def test_without_mpi_it_says_what_to_install(machine: Any) -> None:
    reason = "there is no mpiexec in /some/where"
    _, head, details = machine(mpi=False, trial=lambda name, _: (name == "shm", reason))
    assert head[1] == (
        f"Several machines: no MPI. To use them, run {install_extra('mpi')}, or install the "
        "system's Open MPI or MPICH."
    )
    assert "mpi                  not available: no MPI is installed" in details
    _, _, details = machine("-v", mpi=False, trial=lambda name, _: (name == "shm", reason))
    assert reason in details


def test_mpi_that_fails_is_reported_with_the_reason(machine: Any) -> None:
    def trial(name: str, _: list[int]) -> tuple[bool, str]:
        return WORKS if name == "shm" else (False, "ssh is missing; install it")

    assert machine(trial=trial)[1][1] == "Several machines: not ready: ssh is missing; install it."


@pytest.mark.skipif(shared_libraries.has_nvidia_driver(), reason="this machine has a driver")
def test_without_a_driver_the_details_are_short(machine: Any) -> None:
    code, head, details = machine(trial=lambda *_: WORKS)
    assert code == 0
    assert head[2] == (
        "GPUs: no NVIDIA driver. To use a GPU, install the driver, or start the container with it."
    )
    assert "\nGPUs\n  driver               not installed\n\n" in details
    assert "sm_90" not in details
    assert not [raw for raw in RAW if raw in details]
    _, verbose_head, verbose = machine("-v", trial=lambda *_: WORKS)
    assert verbose_head == head
    assert not [raw for raw in RAW if raw not in verbose]


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (
            Gpus("", "NVIDIA's driver does not start: restart the machine", (), ("sm_90",)),
            "GPUs: not ready: NVIDIA's driver does not start: restart the machine.",
        ),
        (Gpus("13.0", "", (), ("sm_90",)), "GPUs: not ready: NVIDIA's driver finds no GPU."),
        (
            Gpus("13.0", "", (H200,), ()),
            "GPUs: not ready: tvm_ipc was built without GPU kernels. Build it without "
            "TVM_IPC_CUDA=OFF.",
        ),
        (Gpus("13.0", "", (H200,), ("sm_90",)), "GPUs: not ready: out of memory."),
    ],
)
def test_with_a_driver_it_says_what_is_wrong(machine: Any, gpus: Gpus, text: str) -> None:
    def trial(name: str, _: list[int]) -> tuple[bool, str]:
        return WORKS if name == "shm" else (False, "out of memory")

    code, head, _ = machine(gpus=gpus, trial=trial)
    assert code == 0
    assert head[2:] == [text]


def test_hidden_gpus_are_said_to_be(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, head, _ = machine(gpus=Gpus("13.0", "", (), ("sm_90",)), trial=lambda *_: WORKS)
    assert head[2] == "GPUs: not ready: NVIDIA's driver finds no GPU (CUDA_VISIBLE_DEVICES is '')."


def test_nccl_matters_with_two_gpus(machine: Any) -> None:
    def trial(name: str, _: list[int]) -> tuple[bool, str]:
        return (False, "no NCCL") if name == "nccl" else WORKS

    gpus = Gpus("13.0", "", (H200, H200), ("sm_90",))
    assert machine(gpus=gpus, trial=trial)[1][3] == (
        "NCCL: not ready, so GPUs of several machines cannot be used: no NCCL."
    )
    one = Gpus("13.0", "", (H200,), ("sm_90",))
    assert machine(gpus=one, trial=trial)[1][2:] == [
        "GPUs: 1 x NVIDIA H200 ready, 2 workers tried."
    ]


def test_a_trial_of_workers_that_fails(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: Any, **__: Any) -> None:
        raise IPCError("worker 1 died with SIGILL")

    monkeypatch.setattr(tvm_ipc, "Session", session)
    code, head, details = machine()
    assert code == 1
    assert head[0] == (
        "Not ready on CPUs: 2 workers failed: worker 1 died with SIGILL. If that does not help, "
        "run again with TVM_IPC_LOG=debug, which prints each step of a session."
    )
    assert "shm                  not available: worker 1 died with SIGILL" in details
    assert main(["doctor", "--json"]) == 1


def test_what_programs_need_is_in_the_verdict(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr("tvm_ipc.cpu.openblas_discovery._PACKAGE", "no_such_package")
    _, head, _ = machine(trial=lambda *_: WORKS)
    assert head[1].startswith("Compiling models: not ready: '/no/such/compiler' cannot be started")
    assert head[2] == (
        "OpenBLAS: not installed, so matmuls run in slower kernels of TVM. Run pip install "
        "scipy-openblas64."
    )


def test_json_begins_with_the_verdict(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(trial=lambda *_: WORKS)
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert next(iter(printed)) == "verdict"
    entries = printed["verdict"]
    assert entries[0] == {
        "feature": "cpus",
        "ready": True,
        "text": "Ready on CPUs: 2 workers tried.",
    }
    assert entries == feature_readiness_and_advice.verdict(printed)
    assert printed["node_launcher"]["kind"] == "Open MPI"
