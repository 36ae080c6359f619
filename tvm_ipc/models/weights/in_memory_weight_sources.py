# SPDX-License-Identifier: Apache-2.0
"""Tensors in the controller's memory, from PyTorch, NumPy or TVM, and the models that hold them.

This module does not import PyTorch, unless the caller passed a tensor of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import WeightsError

_WANTED: Final = (
    "a file, a folder, a mapping from names to arrays, or a model or an ExportedProgram of PyTorch"
)


@dataclass(frozen=True)
class HostTensor:
    """A tensor in the controller's memory.

    Attributes
    ----------
    dtype : the element type, by its NumPy name.
    shape : the shape.
    value : the tensor of the library.
    """

    dtype: str
    shape: tuple[int, ...]
    value: Any = field(repr=False, compare=False)

    @property
    def memory(self) -> tuple[object, ...]:
        """A key that is equal for tensors that share their memory."""
        if _is_torch(self.value):
            return str(self.value.device), self.value.data_ptr(), self.value.stride()
        return (id(self.value),)

    def array(self) -> np.ndarray[Any, Any]:
        """Return the tensor as an array, without a copy where possible."""
        if not _is_torch(self.value):
            array = self.value if isinstance(self.value, np.ndarray) else self.value.numpy()
            return np.asarray(array)
        tensor = self.value.detach().cpu().contiguous()
        try:
            return np.asarray(tensor.numpy())
        except TypeError:  # PyTorch does not convert types that NumPy itself lacks
            import torch

            flat = tensor.reshape(-1).view(torch.uint8).numpy().view(np.dtype(self.dtype))
            return np.asarray(flat.reshape(self.shape))


@dataclass(frozen=True)
class Tensors:
    """The tensors of a source in memory.

    Attributes
    ----------
    by_name : the tensors, by their names.
    other_names : aliases of the names, such as those of an ExportedProgram's inputs.
    chosen : True if the caller chose the tensors; False if they are all tensors of a model.
    """

    by_name: dict[str, HostTensor]
    other_names: dict[str, str]
    chosen: bool


def collect_tensors(source: Any) -> Tensors:
    """Return the tensors of a mapping, or of a model or an ExportedProgram of PyTorch."""
    if isinstance(source, Mapping):
        return Tensors(_wrap_all(source), {}, True)
    if hasattr(source, "graph_signature") and hasattr(source, "constants"):
        specs = source.graph_signature.input_specs
        aliases = {
            str(spec.arg.name): str(spec.target) for spec in specs if spec.target is not None
        }
        return Tensors(_wrap_all({**source.state_dict, **source.constants}), aliases, False)
    if hasattr(source, "named_parameters") and hasattr(source, "named_buffers"):
        parameters = source.named_parameters(remove_duplicate=False)
        buffers = source.named_buffers(remove_duplicate=False)
        return Tensors(_wrap_all({**dict(parameters), **dict(buffers)}), {}, False)
    raise arguments.wrong_type("load_weights: source", _WANTED, source)


def _wrap_all(source: Mapping[Any, Any]) -> dict[str, HostTensor]:
    tensors = {}
    for name, value in source.items():
        arguments.text("load_weights: source, a name", name)
        tensors[name] = _wrap(name, value)
    return tensors


def _wrap(name: str, value: Any) -> HostTensor:
    where = f"load_weights: source, {name!r}"
    if _is_torch(value):
        if str(value.layout) != "torch.strided" or value.is_quantized or value.is_meta:
            raise WeightsError(
                f"{where}: this tensor has no plain elements: its layout is {value.layout}, its "
                f"device {value.device}, and its type {value.dtype}; pass a dense tensor that is "
                "neither quantized nor on the meta device"
            )
        dtype = str(value.dtype).removeprefix("torch.")
    elif hasattr(value, "numpy") and hasattr(value, "dtype"):  # a tensor of TVM
        dtype = str(value.dtype)
    else:
        try:
            array = np.asarray(value)
        except Exception as error:
            raise arguments.wrong_type(where, "an array of numbers", value) from error
        if array.dtype.hasobject or array.dtype.kind not in "biufV" or array.dtype.names:
            raise arguments.wrong_type(where, "an array of numbers", value)
        dtype = array.dtype.name
        value = array.astype(array.dtype.newbyteorder("="), copy=False)
    return HostTensor(dtype, tuple(int(extent) for extent in value.shape), value)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "is_quantized")
