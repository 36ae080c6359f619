# SPDX-License-Identifier: Apache-2.0
"""Assign devices to workers, and choose the backend that moves data between them.

A backend serves one kind of device. The native function `tvm_ipc.refusal` returns the reason why it
cannot serve some devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError
from tvm_ipc.packed_functions import BACKENDS, backends_of
from tvm_ipc.runtime import shared_libraries, startup_hooks

_refusal = tvm_ffi.get_global_func("tvm_ipc.refusal")
_AUTO: Final = "auto"
_CPU: Final = "cpu"
_GPU: Final = "cuda"


@dataclass(frozen=True)
class DeviceAssignment:
    """The devices of a session's workers, and their backend.

    Attributes
    ----------
    device : the kind of the devices.
    ids : the device of each worker.
    backend : the backend that moves data between the workers.
    reason : the reason for this backend.
    otherwise : the fallback backend for workers that it cannot connect; "" for none.
    """

    device: str
    ids: tvm_ffi.Shape
    backend: str
    reason: str
    otherwise: str = ""


def assign_devices(
    where: str,
    num_workers: int,
    device: object,
    device_ids: object,
    backend: object,
    backend_name: str = "backend",
    machines: Sequence[int] | None = None,
) -> DeviceAssignment:
    """Check the device arguments of a caller, and return the assignment.

    Parameters
    ----------
    where, backend_name : the prefix of errors, and the name of the argument `backend` in them.
    machines : the machine of each worker; by default 0, this machine, for all. Only devices of
        this machine are checked here; workers elsewhere check theirs when they start.
    """
    kind = arguments.one_of(f"{where}: device", device, dict.fromkeys(BACKENDS.values()))
    serving = backends_of(kind)
    requested = arguments.one_of(f"{where}: {backend_name}", backend, (_AUTO, *BACKENDS))
    if requested not in (_AUTO, *serving):
        raise ValueError(
            f"{where}: {backend_name} {requested!r} is for workers on device "
            f"{BACKENDS[requested]!r}, and device is {kind!r}, for which there are "
            f"{', '.join(map(repr, serving))}"
        )
    on_several_machines = machines is not None
    machines = [0] * num_workers if machines is None else machines
    ids = of_workers(where, num_workers, device_ids, machines)
    here = tvm_ffi.Shape([i for i, machine in zip(ids, machines, strict=True) if machine == 0])
    if kind == _GPU:
        startup_hooks.require_devices[_GPU](
            where, here, given=device_ids is not None, share=not on_several_machines
        )
        shared_libraries.require_cuda()  # worker 0 is a thread of this process
        _refuse_remote_sharing(where, ids, machines)
    chosen, reason = _choose_backend(where, requested, serving, here)
    # CPUs need no fallback: all CPUs of a machine are reached in the same way.
    fallbacks = serving[serving.index(chosen) + 1 :] if requested == _AUTO and kind == _GPU else ()
    otherwise = next((name for name in fallbacks if not str(_refusal(name, here))), "")
    return DeviceAssignment(kind, ids, chosen, reason, otherwise)


def _choose_backend(
    where: str, requested: str, serving: tuple[str, ...], ids: tvm_ffi.Shape
) -> tuple[str, str]:
    """Return a backend that serves these devices, and the reason for it."""
    refusals: list[str] = []
    for name in serving if requested == _AUTO else (requested,):
        if not (refusal := str(_refusal(name, ids))):
            default_reason = "as asked for" if requested == name else "the first choice"
            return name, "; ".join(refusals) or default_reason
        refusals.append(f"backend {name}: {refusal}")
    raise IPCError(f"{where}: {'; '.join(refusals)}")


def describe(assignment: DeviceAssignment) -> str:
    """Return a phrase for the devices of the workers; "" for CPUs, which are not assigned."""
    if assignment.device == _CPU:
        return ""
    return f" on {assignment.device} {', '.join(map(str, assignment.ids))}"


def _refuse_remote_sharing(where: str, ids: Sequence[int], machines: Sequence[int]) -> None:
    """Raise if workers of another machine share a device; on this machine the backend checks."""
    first_worker: dict[tuple[int, int], int] = {}
    for worker, (machine, device) in enumerate(zip(machines, ids, strict=True)):
        first = first_worker.setdefault((machine, device), worker)
        if first != worker and machine != 0:
            raise ValueError(
                f"{where}: between machines there must be a device for each worker, and workers "
                f"{first} and {worker}, of one machine, would share {_GPU}:{device}; give other "
                "device_ids, or fewer workers"
            )


def of_workers(
    where: str, num_workers: int, ids: object, machines: Sequence[int] | None = None
) -> tvm_ffi.Shape:
    """Check the argument `device_ids`, and return the device of each worker."""
    if ids is None:
        used: Counter[int] = Counter()
        defaults = []
        for machine in [0] * num_workers if machines is None else machines:
            defaults.append(used[machine])
            used[machine] += 1
        return tvm_ffi.Shape(defaults)
    name, expected = (
        f"{where}: device_ids",
        "the number of a device" if num_workers == 1 else f"{num_workers} numbers of devices",
    )
    device_ids = numbers(name, ids, expected)
    if len(device_ids) != num_workers:
        raise arguments.wrong_value(name, expected, ids)
    return device_ids


def numbers(name: str, value: object, expected: str) -> tvm_ffi.Shape:
    """Check any number of device numbers, and return them."""
    return tvm_ffi.Shape(arguments.integers(name, value, expected, 0, (1 << 31) - 1))
