# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as the native library and NVIDIA's driver tell of them.

Nothing of CUDA is touched before somebody asks for it here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config, library


@dataclass(frozen=True)
class Gpu:
    """A device.

    Attributes
    ----------
    id : its number, as this process counts.
    capability : such as "9.0".
    memory : bytes.
    kernels : which of our kernels run on it, such as "sm_90"; empty if none do.
    reason : why none do.
    """

    id: int
    name: str
    capability: str
    memory: int
    kernels: str
    reason: str


@dataclass(frozen=True)
class Gpus:
    """What is known of CUDA here.

    Attributes
    ----------
    driver : the version of CUDA that the driver knows, such as "13.0"; empty without a driver.
    reason : why there is no driver, or no device.
    devices : those that this process may use.
    architectures : what our kernels are compiled for; nothing if they are not in this library.
    links : by the places of two devices, how they reach each other's memory, as the driver says;
        empty where they do not.
    """

    driver: str
    reason: str
    devices: tuple[Gpu, ...]
    architectures: tuple[str, ...]
    links: tuple[tuple[str, ...], ...] = ()


def ask(name: str, *args: Any) -> dict[str, Any] | None:
    """Return what a native function says in JSON; None where the library lacks it."""
    function = tvm_ffi.get_global_func(name, allow_missing=True)
    return None if function is None else dict(json.loads(function(*args)))


def find() -> Gpus:
    """Ask the driver, which is loaded for it; no device is touched."""
    found = ask("tvm_ipc.cuda.info")
    if found is None:
        return Gpus("", "this version of tvm_ipc has nothing for GPUs", (), ())
    version = int(found["driver"]["version"])
    devices = tuple(
        Gpu(**{name: one[name] for name in Gpu.__dataclass_fields__}) for one in found["devices"]
    )
    return Gpus(
        f"{version // 1000}.{version % 1000 // 10}" if version else "",
        found["driver"]["reason"],
        devices,
        tuple(found["architectures"]),
        tuple(map(tuple, found.get("links", ()))),
    )


def require(where: str, ids: Sequence[int], *, given: bool, share: bool = True) -> None:
    """Raise if this machine has no device with one of these numbers.

    Parameters
    ----------
    where : for the error.
    ids : the device of each worker.
    given : whether the caller chose them.
    share : whether workers may share one.
    """
    found = find()
    hidden = config.visible_gpus()
    seen = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
    if not found.devices:
        reason = found.reason or f"NVIDIA's driver for CUDA {found.driver} finds no device"
        raise IPCError(
            f"{where}: workers on device 'cuda' want an NVIDIA GPU: {reason}{seen}; "
            "device='cpu' wants none; `tvm-ipc doctor` says more"
        )
    known = {gpu.id for gpu in found.devices}
    missing = sorted({*ids} - known)
    if not missing:
        return
    names = ", ".join(f"{gpu.id} ({gpu.name})" for gpu in found.devices)
    have = f"this machine has {len(known)}: {names}{seen}"
    if given:
        raise ValueError(
            f"{where}: device_ids has {', '.join(map(str, missing))}, which is no GPU here: {have}"
        )
    shared = [i % len(known) for i in range(len(ids))]
    hint = f"to let workers share one, say device_ids={shared}"
    if not share:
        hint = "with hosts no two can share one; take fewer workers, or more machines"
    raise ValueError(f"{where}: {len(ids)} workers want a GPU each, and {have}; {hint}")


@tvm_ffi.register_global_func("tvm_ipc.cuda.bring_up")  # type: ignore[untyped-decorator]
def _bring_up() -> None:
    """Make TVM's part for GPUs ready in a worker, whose backend asks for it."""
    library.require_cuda()
