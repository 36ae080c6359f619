# SPDX-License-Identifier: Apache-2.0
"""Short forms for TVMScript; each function stands for one call."""

from __future__ import annotations

from typing import Any

from tvm.script import relax as R

#: The type of a tensor of eight numbers.
F8 = R.Tensor((8,), "float32")


def alloc(*shape: Any, dtype: str = "float32", scope: str = "global") -> Any:
    """Allocate a tensor on the first device."""
    index, where = R.prim_value(0), R.str(scope)
    return R.builtin.alloc_tensor(R.shape(list(shape)), R.dtype(dtype), index, where)


def alloc_storage(size: Any, scope: str = "global", dtype: str = "uint8") -> Any:
    """Allocate a storage of `size` bytes on the first device."""
    return R.memory.alloc_storage(R.shape([size]), R.prim_value(0), R.str(scope), R.dtype(dtype))


def alloc_in(storage: Any, offset: Any, *shape: Any, dtype: str = "float32") -> Any:
    """Allocate a tensor at an offset of a storage."""
    start, extents = R.prim_value(offset), R.shape(list(shape))
    return R.memory.alloc_tensor(storage, start, extents, R.dtype(dtype))


def custom_allreduce(send: Any, recv: Any) -> Any:
    """Call upstream's all-reduce with its first strategy."""
    name = "runtime.disco.cuda_ipc.custom_allreduce"
    return R.call_packed(name, send, R.prim_value(1), recv)


def expose(tensor: Any) -> Any:
    """Let all ranks read a tensor."""
    return R.call_pure_packed("tvm_ipc.expose", tensor, 0, ty_args=R.Any)


def peer_view(exposed: Any, shift: int, *shape: int) -> Any:
    """Return a view of a tensor that another rank exposes."""
    return _rows("tvm_ipc.peer_view", [exposed, shift], shape)


def view(tensor: Any, offset: int, *shape: int) -> Any:
    """Return a view of a tensor from a byte on."""
    return _rows("tvm_ipc.view", [tensor, offset], shape)


def own_slice(tensor: Any, shift: int, stride: int, offset: int, *shape: int) -> Any:
    """Return a view of the slice of a tensor that belongs to a rank."""
    return _rows("tvm_ipc.own_slice", [tensor, 0, shift, stride, offset], shape)


def _rows(name: str, arguments: list[Any], shape: tuple[int, ...]) -> Any:
    extents, ty = R.shape(list(shape)), R.Tensor(shape, "float32")
    return R.call_pure_packed(name, *arguments, extents, ty_args=ty)


def reduce_slices(*slices: Any, shape: tuple[int, ...]) -> Any:
    """Sum one slice of each rank."""
    ty = R.Tensor(shape, "float32")
    return R.call_dps_packed("tvm_ipc.reduce_slices", (0, 0, *slices), out_ty=ty)


def assemble(positions: list[int], *slices: Any, shape: tuple[int, ...]) -> Any:
    """Assemble slices at positions: shift, stride and offset of each."""
    ty = R.Tensor(shape, "float32")
    return R.call_dps_packed("tvm_ipc.assemble", (0, R.shape(positions), *slices), out_ty=ty)
