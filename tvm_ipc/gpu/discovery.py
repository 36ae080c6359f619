# SPDX-License-Identifier: Apache-2.0
"""Discovery of the GPUs of this machine, through the native library and NVIDIA's driver.

CUDA is not loaded before a function of this module is called.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config, shared_libraries, startup_hooks


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes
    ----------
    id : the device number in this process.
    name : the name of the model.
    capability : the compute capability, such as "9.0".
    memory : the size of the memory in bytes.
    kernels : the architecture of the kernels of this package that run on it, such as "sm_90";
        empty if none do.
    reason : the reason if no kernels run on it.
    """

    id: int
    name: str
    capability: str
    memory: int
    kernels: str
    reason: str


@dataclass(frozen=True)
class Gpus:
    """The CUDA driver and devices of this machine.

    Attributes
    ----------
    driver : the version of CUDA that the driver supports, such as "13.0"; empty without a driver.
    reason : the reason if there is no driver or no device.
    devices : the devices that this process may use.
    architectures : the architectures of the kernels in this library; empty if it has none.
    links : for each pair of devices, by index, how they access each other's memory, as reported
        by the driver; empty if they cannot.
    """

    driver: str
    reason: str
    devices: tuple[Gpu, ...]
    architectures: tuple[str, ...]
    links: tuple[tuple[str, ...], ...] = ()


def ask(name: str, *args: Any) -> dict[str, Any] | None:
    """Return the result of a native function, parsed from JSON; None if the library lacks it."""
    function = tvm_ffi.get_global_func(name, allow_missing=True)
    return None if function is None else dict(json.loads(function(*args)))


def find() -> Gpus:
    """Load the driver and return its devices, without creating a context on any of them."""
    info = ask("tvm_ipc.cuda.info")
    if info is None:
        return Gpus("", "this version of tvm_ipc has no GPU support", (), ())
    version = int(info["driver"]["version"])
    devices = tuple(
        Gpu(**{name: device[name] for name in Gpu.__dataclass_fields__})
        for device in info["devices"]
    )
    return Gpus(
        f"{version // 1000}.{version % 1000 // 10}" if version else "",
        info["driver"]["reason"],
        devices,
        tuple(info["architectures"]),
        tuple(map(tuple, info.get("links", ()))),
    )


def require(where: str, ids: Sequence[int], *, given: bool, share: bool = True) -> None:
    """Raise an error if this machine lacks a device for a worker.

    Parameters
    ----------
    where : the beginning of the message.
    ids : the device number of each worker.
    given : whether the caller chose the numbers.
    share : whether workers may share a device.

    Raises
    ------
    IPCError
        If there is no GPU.
    ValueError
        If there are GPUs, but not the requested ones.
    """
    gpus = find()
    hidden = config.visible_gpus()
    visible = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
    if not gpus.devices:
        reason = gpus.reason or f"NVIDIA's driver for CUDA {gpus.driver} finds no device"
        raise IPCError(
            f"{where}: workers on device 'cuda' need an NVIDIA GPU: {reason}{visible}; "
            "pass device='cpu' to run without one, or run `tvm-ipc doctor` for details"
        )
    ids_here = {gpu.id for gpu in gpus.devices}
    missing = sorted({*ids} - ids_here)
    if not missing:
        return
    names = ", ".join(f"{gpu.id} ({gpu.name})" for gpu in gpus.devices)
    description = (
        f"this machine has {len(ids_here)} GPU{'s' * (len(ids_here) > 1)}: {names}{visible}"
    )
    if given:
        raise ValueError(
            f"{where}: device_ids has {', '.join(map(str, missing))}, but {description}"
        )
    shared = [i % len(ids_here) for i in range(len(ids))]
    hint = f"to let workers share a GPU, pass device_ids={shared}"
    if not share:
        hint = "workers cannot share a GPU with hosts; use fewer workers, or more machines"
    raise ValueError(f"{where}: {len(ids)} workers need a GPU each, but {description}; {hint}")


@tvm_ffi.register_global_func("tvm_ipc.cuda.bring_up")  # type: ignore[untyped-decorator]
def _bring_up() -> int:
    """Load TVM's CUDA runtime in a worker; return `config.queues_for_graphs`."""
    shared_libraries.require_cuda()
    return config.queues_for_graphs()


startup_hooks.require_devices["cuda"] = require
