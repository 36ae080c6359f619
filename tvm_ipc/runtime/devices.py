# SPDX-License-Identifier: Apache-2.0
"""The devices of workers, as callers give them, and what moves data between them.

A backend is for one kind of device; `tvm_ipc.refusal` says why it cannot serve some devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.contract import BACKENDS, backends_of
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import gpus, library

_refusal = tvm_ffi.get_global_func("tvm_ipc.refusal")
_AUTO: Final = "auto"
_CPU: Final = "cpu"
_GPU: Final = "cuda"


@dataclass(frozen=True)
class Placement:
    """Where the workers of a session are.

    Attributes
    ----------
    device : the kind of their devices.
    ids : the device of each worker.
    backend : what moves data between them.
    reason : why it is that one.
    otherwise : what workers go on with where they find that it cannot connect them; "" is nothing.
    """

    device: str
    ids: tvm_ffi.Shape
    backend: str
    reason: str
    otherwise: str = ""


def place(
    where: str,
    num_workers: int,
    device: object,
    device_ids: object,
    backend: object,
    backend_name: str = "backend",
    machines: Sequence[int] | None = None,
) -> Placement:
    """Return where the workers are that a caller asks for.

    Parameters
    ----------
    where, backend_name : for errors.
    machines : the machine of each worker; this one, 0, is that of all by default. Only devices of
        this one can be looked at; workers elsewhere say what is wrong with theirs when they start.
    """
    kind = arguments.one_of(f"{where}: device", device, dict.fromkeys(BACKENDS.values()))
    serving = backends_of(kind)
    wanted = arguments.one_of(f"{where}: {backend_name}", backend, (_AUTO, *BACKENDS))
    if wanted not in (_AUTO, *serving):
        raise ValueError(
            f"{where}: {backend_name} {wanted!r} is for workers on device {BACKENDS[wanted]!r}, "
            f"and device is {kind!r}, for which there are {', '.join(map(repr, serving))}"
        )
    several = machines is not None
    machines = [0] * num_workers if machines is None else machines
    ids = of_workers(where, num_workers, device_ids, machines)
    here = tvm_ffi.Shape([i for i, machine in zip(ids, machines, strict=True) if machine == 0])
    if kind == _GPU:
        gpus.require(where, here, given=device_ids is not None, share=not several)
        library.require_cuda()  # worker 0 is a thread of this process
        _require_apart(where, ids, machines)
    chosen, reason = _chosen(where, wanted, serving, here)
    # All CPUs of a machine are reached in the same way.
    after = serving[serving.index(chosen) + 1 :] if wanted == _AUTO and kind == _GPU else ()
    otherwise = next((name for name in after if not str(_refusal(name, here))), "")
    return Placement(kind, ids, chosen, reason, otherwise)


def _chosen(
    where: str, wanted: str, serving: tuple[str, ...], ids: tvm_ffi.Shape
) -> tuple[str, str]:
    """Return a backend that serves these devices, and why it is that one."""
    refused: list[str] = []
    for name in serving if wanted == _AUTO else (wanted,):
        if not (refusal := str(_refusal(name, ids))):
            why = "; ".join(refused) or ("as asked for" if wanted == name else "the first choice")
            return name, why
        refused.append(f"backend {name}: {refusal}")
    raise IPCError(f"{where}: {'; '.join(refused)}")


def describe(placed: Placement) -> str:
    """Say which devices the workers are on; nothing of CPUs, of which they have no certain one."""
    if placed.device == _CPU:
        return ""
    return f" on {placed.device} {', '.join(map(str, placed.ids))}"


def _require_apart(where: str, ids: Sequence[int], machines: Sequence[int]) -> None:
    """Raise if workers of another machine share a device; what is here the backend refuses."""
    first: dict[tuple[int, int], int] = {}
    for worker, place in enumerate(zip(machines, ids, strict=True)):
        before = first.setdefault(place, worker)
        if before != worker and place[0] != 0:
            raise ValueError(
                f"{where}: between machines there must be a device for each worker, and workers "
                f"{before} and {worker}, of one machine, would share {_GPU}:{place[1]}; give other "
                "device_ids, or fewer workers"
            )


def of_workers(
    where: str, num_workers: int, ids: object, machines: Sequence[int] | None = None
) -> tvm_ffi.Shape:
    """Return the device of each worker."""
    if ids is None:
        used: Counter[int] = Counter()
        chosen = []
        for machine in [0] * num_workers if machines is None else machines:
            chosen.append(used[machine])
            used[machine] += 1
        return tvm_ffi.Shape(chosen)
    name, wanted = f"{where}: device_ids", f"{num_workers} numbers of devices, one for each worker"
    given = numbers(name, ids, wanted)
    if len(given) != num_workers:
        raise arguments.wrong_value(name, wanted, ids)
    return given


def numbers(name: str, value: object, wanted: str) -> tvm_ffi.Shape:
    """Return numbers of devices, however many they are."""
    return tvm_ffi.Shape(arguments.integers(name, value, wanted, 0, (1 << 31) - 1))
