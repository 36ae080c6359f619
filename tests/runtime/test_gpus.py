# SPDX-License-Identifier: Apache-2.0
"""What a session on GPUs asks of the machine, and what it says where that is not there."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tvm

import tvm_ipc
from tvm_ipc import packed_functions
from tvm_ipc.errors import IPCError, LibraryError, WorkerError
from tvm_ipc.gpu import discovery
from tvm_ipc.gpu.discovery import Gpu, Gpus
from tvm_ipc.runtime import device_and_backend_assignment, shared_libraries

H200 = {"name": "NVIDIA H200", "capability": "9.0", "memory": 141 << 30, "kernels": "sm_90"}
DRIVER = "NVIDIA's driver is missing: libcuda.so.1 cannot be loaded"
TWO = Gpus("13.0", "", tuple(Gpu(id=i, reason="", **H200) for i in range(2)), ("sm_90",))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`device_assignment.assign_devices` on a machine with these GPUs, two backends for
    them, and their refusals."""
    monkeypatch.setattr(
        device_and_backend_assignment, "BACKENDS", {"shm": "cpu", "cuda": "cuda", "nccl": "cuda"}
    )
    monkeypatch.setattr(
        packed_functions.constants_shared_with_native_library,
        "BACKENDS",
        device_and_backend_assignment.BACKENDS,
    )
    monkeypatch.setattr(shared_libraries, "require_cuda", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def of(
        workers: int,
        device: str = "cuda",
        ids: Sequence[int] | None = None,
        backend: str = "auto",
        found: Gpus = TWO,
        **refusals: str,
    ) -> device_and_backend_assignment.DeviceAssignment:
        monkeypatch.setattr(discovery, "find", lambda: found)
        monkeypatch.setattr(
            device_and_backend_assignment, "_refusal", lambda name, _ids: refusals.get(name, "")
        )
        return device_and_backend_assignment.assign_devices(
            "Session", workers, device, ids, backend
        )

    return of


def test_each_worker_has_a_gpu_by_default(place: Callable[..., Any]) -> None:
    placed = place(2)
    assert (placed.device, tuple(placed.ids), placed.backend) == ("cuda", (0, 1), "cuda")
    assert device_and_backend_assignment.describe(placed) == " on cuda 0, 1"


def test_workers_share_a_gpu_where_it_is_said(place: Callable[..., Any]) -> None:
    assert tuple(place(3, ids=[1, 1, 0]).ids) == (1, 1, 0)


def test_too_few_gpus_say_how_to_share_them(place: Callable[..., Any]) -> None:
    text = (
        "Session: 3 workers need a GPU each, but this machine has 2 GPUs: 0 (NVIDIA H200), 1 "
        "(NVIDIA H200); to let workers share a GPU, pass device_ids=[0, 1, 0]"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        place(3)


def test_a_number_that_no_gpu_has(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    text = (
        "Session: device_ids has 6, but this machine has 2 GPUs: 0 (NVIDIA H200), 1 "
        "(NVIDIA H200) (CUDA_VISIBLE_DEVICES is '4,6')"
    )
    monkeypatch.setattr(discovery, "find", lambda: TWO)
    with pytest.raises(ValueError, match=re.escape(text)):
        place(2, ids=[0, 6])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Gpus("", DRIVER, (), ("sm_90",)), DRIVER),
        (Gpus("13.0", "", (), ()), "NVIDIA's driver for CUDA 13.0 finds no device"),
    ],
)
def test_no_gpu_at_all(place: Callable[..., Any], found: Gpus, said: str) -> None:
    with pytest.raises(IPCError, match=re.escape(said)) as error:
        place(2, found=found)
    assert str(error.value).startswith("Session: workers on device 'cuda' need an NVIDIA GPU: ")
    assert "pass device='cpu' to run without one, or run `tvm-ipc doctor` for details" in str(
        error.value
    )


def test_workers_on_cpus_ask_no_driver(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "require", lambda *_args, **_given: pytest.fail("asked"))
    assert place(3, device="cpu").backend == "shm"


def test_the_next_backend_serves_where_the_first_one_cannot(place: Callable[..., Any]) -> None:
    placed = place(2, cuda="it takes at most 16 workers")
    assert placed.backend == "nccl"
    assert placed.reason == "backend cuda: it takes at most 16 workers"
    assert place(2, backend="nccl").reason == "as asked for"


def test_all_reasons_are_told_where_none_serves(place: Callable[..., Any]) -> None:
    text = "Session: backend cuda: too old; backend nccl: not installed"
    with pytest.raises(IPCError, match=re.escape(text)):
        place(2, cuda="too old", nccl="not installed")
    with pytest.raises(IPCError, match=re.escape("Session: backend cuda: too old")) as error:
        place(2, backend="cuda", cuda="too old", nccl="not installed")
    assert "nccl" not in str(error.value)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cuda"), ("cuda", "shm")])
def test_device_and_backend_that_do_not_fit(
    place: Callable[..., Any], device: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=f"Session: backend '{backend}' is for workers on device"):
        place(2, device=device, backend=backend)


def test_what_the_library_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"id": 0, "uuid": "GPU-1", "multiprocessors": 132, "vmm": True, "reason": "", **H200}
    said = {
        "architectures": ["sm_90", "compute_90"],
        "driver": {"version": 13010, "reason": ""},
        "max_ranks": 16,
        "devices": [device],
    }
    native = types.SimpleNamespace(get_global_func=lambda *_a, **_k: lambda: json.dumps(said))
    monkeypatch.setattr(discovery, "tvm_ffi", native)
    assert discovery.find() == Gpus(
        "13.1", "", (Gpu(id=0, reason="", **H200),), tuple(said["architectures"])
    )


def test_a_worker_says_what_tvm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_libraries, "load_cuda", lambda: "not loaded: no libcudart.so.13")
    monkeypatch.setattr(shared_libraries, "loaded_libraries", dict)
    with pytest.raises(LibraryError, match=r"libtvm_runtime_cuda.so, is not loaded: no libcudart"):
        tvm.get_global_func("tvm_ipc.cuda.bring_up")()


def test_a_session_on_cpus_brings_gpus_up_for_a_tensor_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_libraries, "load_cuda", lambda: "not loaded: no libcudart.so.13")
    with tvm_ipc.Session(2, threads=True) as session:
        session.empty((3,), "float32", device="cuda:0")
        with pytest.raises(WorkerError, match=r"ranks 0-1: LibraryError: .* no libcudart"):
            session.sync()


def test_a_worker_process_leaves_cuda_out(
    run_python: Callable[..., str],
) -> None:
    code = """
from tvm_ipc.runtime import shared_libraries
{first}
tried = []
shared_libraries._load_cuda = lambda loaded: tried.append(1) or "nothing"
import tvm
print(len(tried), shared_libraries._cuda)
"""
    settings = {"TVM_USE_RUNTIME_LIB": "1"}
    assert run_python(code.format(first=""), **settings) == "1 nothing\n"
    left_out = code.format(first="shared_libraries.leave_cuda_out()")
    assert run_python(left_out, **settings) == "0 None\n"
