# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc doctor` says of GPUs, and of machines without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tvm_ipc.gpu import discovery
from tvm_ipc.gpu.discovery import Gpu, Gpus
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.tools.doctor import facts
from tvm_ipc.tools.doctor import gpus as examined

H200 = Gpu(0, "NVIDIA H200", "9.0", 150_000_000_000, "sm_90", "")
OLD = Gpu(1, "Tesla V100", "7.0", 16 << 30, "", "our kernels want compute capability 8.0 or more")
SAID = {
    "tvm_ipc.nccl.info": {"version": 22803, "path": "/lib/libnccl.so.2", "reason": ""},
    "tvm_ipc.cuda.probe": {
        "pairs": [
            [
                {"rung": "vmm", "link": "same device", "reason": ""},
                {"rung": "host", "link": "pcie", "reason": "wrong data came back"},
            ],
            [{}, {"rung": "vmm", "link": "same device", "reason": ""}],
        ]
    },
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The rows of the table on a machine where the library finds and says this."""

    def rows(found: Gpus, said: dict[str, Any]) -> dict[str, str]:
        monkeypatch.setattr(discovery, "find", lambda: found)
        monkeypatch.setattr(discovery, "ask", lambda name, *_: said.get(name))
        found_out = examined.examine(None)
        assert json.loads(json.dumps(found_out)) == found_out
        return dict(examined.rows(found_out, "loaded by TVM"))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return rows


def test_devices_and_what_lies_between_them(machine: Any) -> None:
    rows = machine(Gpus("13.0", "", (H200, OLD), ("sm_90", "compute_90")), SAID)
    assert rows["driver"] == "for CUDA 13.0"
    assert rows["GPU 0"] == (
        "NVIDIA H200, 140 GiB, compute capability 9.0; runs the kernels for sm_90"
    )
    assert rows["GPU 1"].endswith("7.0; our kernels want compute capability 8.0 or more")
    assert rows["GPUs 0, 1"] == "direct access to each other's memory, by file descriptors"
    assert rows["GPUs 0-1"] == ("through pinned host memory, over PCIe (wrong data came back)")
    assert rows["tvm_ipc kernels"] == "compiled for sm_90, compute_90"
    assert rows["NCCL"] == "2.28.3, /lib/libnccl.so.2"
    assert rows["CUDA library of TVM"] == "loaded by TVM"


def test_links_are_told_where_there_is_no_trial(machine: Any) -> None:
    links = (("same device", "nvlink"), ("nvlink", "same device"))
    rows = machine(Gpus("13.0", "", (H200, OLD), (), links), {})
    assert (
        rows["GPUs 0-1"]
        == "direct access to each other's memory, according to the driver, over NVLink"
    )
    rows = machine(
        Gpus("13.0", "", (H200, OLD), (), (("same device", ""), ("", "same device"))), {}
    )
    assert rows["GPUs 0-1"].startswith("no direct access, according to the driver")


def test_without_a_driver_it_says_what_is_missing(machine: Any) -> None:
    missing = "libcuda.so.1 cannot be loaded: no such file"
    nccl = {"tvm_ipc.nccl.info": {"version": 0, "path": "", "reason": "pip install it"}}
    rows = machine(Gpus("", missing, (), ("sm_90",)), nccl)
    assert rows["driver"] == f"not available: {missing}"
    assert rows["NCCL"] == "not available: pip install it"
    assert "devices" not in rows


def test_backends_for_gpus_are_tried_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the rows of the driver and its devices say why, and say it once."""
    monkeypatch.setattr(facts, "_try", lambda name, ids: (True, f"tried on {ids}"))
    said = {name: one["reason"] for name, one in facts._backends(None, []).items()}
    assert said["shm"] == "tried on []"
    assert said["cuda"] == said["nccl"] == "this machine has no GPU"
    assert facts._backends(None, [1])["nccl"] == {"available": True, "reason": "tried on [1]"}
    assert facts._backends("no TVM", [])["cuda"]["reason"] == "no TVM"


def test_hidden_devices_are_said_to_be(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = machine(Gpus("13.0", "", (), ("sm_90",)), SAID)
    assert rows["devices"] == "none: the driver finds none; CUDA_VISIBLE_DEVICES is ''"


def test_a_probe_that_fails_is_an_answer(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str, *_: Any) -> dict[str, Any] | None:
        if name == "tvm_ipc.cuda.probe":
            raise RuntimeError("out of memory\nand more")
        return None

    monkeypatch.setattr(discovery, "find", lambda: Gpus("13.0", "", (H200,), ()))
    monkeypatch.setattr(discovery, "ask", ask)
    rows = dict(examined.rows(examined.examine(None), None))
    assert rows["between GPUs"] == "not probed: RuntimeError: out of memory"
    assert rows["tvm_ipc kernels"] == "not in this library"


def test_libraries_that_the_wheel_has_not_say_how_to_get_them(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_libraries, "cudart", lambda: None)
    rows = machine(Gpus("13.0", "", (H200,), ()), {})
    assert rows["libcudart"] == "not found: pip install '.[cuda]' in a checkout of tvm-ipc"
