# SPDX-License-Identifier: Apache-2.0
"""Checks that a module keeps its tensors on one device, because each worker has only one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.binding_builders import same_device
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import relax_functions, walk
from tvm_ipc.errors import TransformError

_CPUS = frozenset(("llvm", "c"))


def check_one_device(where: str, mod: tvm.IRModule, target: tvm.target.Target) -> None:
    """Raise an error if the types of a module name VDevices of two devices that a worker needs.

    VDevices of one device that differ in the scope are allowed. So is the host of a GPU.
    """
    devices = as_list(mod.global_infos.get("vdevice", []))
    if all(same_device(device, devices[0]) for device in devices):
        return
    first: tuple[Any, str, str] | None = None
    on_gpu = target.kind.name not in _CPUS
    for global_var, function in relax_functions(mod):
        name = str(global_var.name_hint)
        variables = [*function.params, *(b.var for b, _ in walk(function) if b is not None)]
        for variable in variables:
            for device in _devices_of(variable.ty):
                if on_gpu and str(device.target.kind.name) in _CPUS:
                    continue
                if first is None:
                    first = device, name, str(variable.name)
                elif not same_device(device, first[0]):
                    raise TransformError(
                        f"{where}: {variable.name!r} of function {name!r} is on the VDevice "
                        f"{_name(device)}, and {first[2]!r} of function {first[1]!r} is on "
                        f"{_name(first[0])}, but each worker has one device; put all tensors on "
                        "one VDevice, and use more workers for more devices"
                    )


def _devices_of(ty: Any) -> Iterator[Any]:
    if isinstance(ty, relax.TensorType):
        if ty.vdevice is not None:
            yield ty.vdevice
    elif isinstance(ty, relax.TupleType):
        for field in as_list(ty.fields):
            yield from _devices_of(field)


def _name(device: Any) -> str:
    return f"{device.target.kind.name}:{device.vdevice_id}"
