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
from tvm_ipc import contract
from tvm_ipc.errors import IPCError, LibraryError, WorkerError
from tvm_ipc.runtime import devices, gpus, library
from tvm_ipc.runtime.gpus import Gpu, Gpus

H200 = {"name": "NVIDIA H200", "capability": "9.0", "memory": 141 << 30, "kernels": "sm_90"}
DRIVER = "NVIDIA's driver is missing: libcuda.so.1 cannot be loaded"
TWO = Gpus("13.0", "", tuple(Gpu(id=i, reason="", **H200) for i in range(2)), ("sm_90",))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`devices.place` on a machine with these GPUs, two backends for them, and their refusals."""
    monkeypatch.setattr(devices, "BACKENDS", {"shm": "cpu", "cuda": "cuda", "nccl": "cuda"})
    monkeypatch.setattr(contract.values, "BACKENDS", devices.BACKENDS)
    monkeypatch.setattr(library, "require_cuda", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def of(
        workers: int,
        device: str = "cuda",
        ids: Sequence[int] | None = None,
        backend: str = "auto",
        found: Gpus = TWO,
        **refusals: str,
    ) -> devices.Placement:
        monkeypatch.setattr(gpus, "find", lambda: found)
        monkeypatch.setattr(devices, "_refusal", lambda name, _ids: refusals.get(name, ""))
        return devices.place("Session", workers, device, ids, backend)

    return of


def test_each_worker_has_a_gpu_by_default(place: Callable[..., Any]) -> None:
    placed = place(2)
    assert (placed.device, tuple(placed.ids), placed.backend) == ("cuda", (0, 1), "cuda")
    assert devices.describe(placed) == " on cuda 0, 1"


def test_workers_share_a_gpu_where_it_is_said(place: Callable[..., Any]) -> None:
    assert tuple(place(3, ids=[1, 1, 0]).ids) == (1, 1, 0)


def test_too_few_gpus_say_how_to_share_them(place: Callable[..., Any]) -> None:
    text = (
        "Session: 3 workers want a GPU each, and this machine has 2: 0 (NVIDIA H200), 1 (NVIDIA "
        "H200); to let workers share one, say device_ids=[0, 1, 0]"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        place(3)


def test_a_number_that_no_gpu_has(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    text = (
        "Session: device_ids has 6, which is no GPU here: this machine has 2: 0 (NVIDIA H200), 1 "
        "(NVIDIA H200) (CUDA_VISIBLE_DEVICES is '4,6')"
    )
    monkeypatch.setattr(gpus, "find", lambda: TWO)
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
    assert str(error.value).startswith("Session: workers on device 'cuda' want an NVIDIA GPU: ")
    assert "device='cpu' wants none; `tvm-ipc doctor` says more" in str(error.value)


def test_workers_on_cpus_ask_no_driver(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "require", lambda *_args, **_given: pytest.fail("asked"))
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
    monkeypatch.setattr(gpus, "tvm_ffi", native)
    assert gpus.find() == Gpus(
        "13.1", "", (Gpu(id=0, reason="", **H200),), tuple(said["architectures"])
    )


def test_a_worker_says_what_tvm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_cuda", lambda: "not loaded: no libcudart.so.13")
    monkeypatch.setattr(library, "_loaded_libraries", dict)
    with pytest.raises(LibraryError, match=r"libtvm_runtime_cuda.so, is not loaded: no libcudart"):
        tvm.get_global_func("tvm_ipc.cuda.bring_up")()


def test_a_session_on_cpus_brings_gpus_up_for_a_tensor_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "load_cuda", lambda: "not loaded: no libcudart.so.13")
    with tvm_ipc.Session(2, threads=True) as session:
        session.empty((3,), "float32", device="cuda:0")
        with pytest.raises(WorkerError, match=r"ranks 0-1: LibraryError: .* no libcudart"):
            session.sync()


def test_a_worker_process_leaves_cuda_out(
    run_python: Callable[..., str],
) -> None:
    code = """
from tvm_ipc.runtime import library
{first}
tried = []
library._load_cuda = lambda loaded: tried.append(1) or "nothing"
import tvm
print(len(tried), library._cuda)
"""
    settings = {"TVM_USE_RUNTIME_LIB": "1"}
    assert run_python(code.format(first=""), **settings) == "1 nothing\n"
    left_out = code.format(first="library.leave_cuda_out()")
    assert run_python(left_out, **settings) == "0 None\n"
