# SPDX-License-Identifier: Apache-2.0
"""Tensors of the controller: PyTorch's, NumPy's, TVM's, and models that have some.

PyTorch is not imported: who gives a tensor of it has done so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import WeightsError

_WANTED: Final = (
    "a file, a folder, a mapping from names to arrays, or a model or an ExportedProgram of PyTorch"
)


@dataclass(frozen=True)
class Held:
    """A tensor of the controller.

    Attributes
    ----------
    dtype : of its elements, as NumPy names it.
    shape : its extents.
    value : the tensor, of whatever library.
    """

    dtype: str
    shape: tuple[int, ...]
    value: Any = field(repr=False, compare=False)

    @property
    def memory(self) -> tuple[object, ...]:
        """What tensors that are the same memory have in common."""
        if _of_torch(self.value):
            return str(self.value.device), self.value.data_ptr(), self.value.stride()
        return (id(self.value),)

    def array(self) -> np.ndarray[Any, Any]:
        """Return it as an array, of its own memory where that is possible."""
        if not _of_torch(self.value):
            found = self.value if isinstance(self.value, np.ndarray) else self.value.numpy()
            return np.asarray(found)
        plain = self.value.detach().cpu().contiguous()
        try:
            return np.asarray(plain.numpy())
        except TypeError:  # NumPy does not have the type by itself
            import torch

            whole = plain.reshape(-1).view(torch.uint8).numpy().view(np.dtype(self.dtype))
            return np.asarray(whole.reshape(self.shape))


@dataclass(frozen=True)
class Tensors:
    """The tensors of a source that is in memory.

    Attributes
    ----------
    by_name : the tensors.
    other_names : what else they are called, by these other names.
    chosen : whether somebody chose them for this; the tensors of a whole model nobody did.
    """

    by_name: dict[str, Held]
    other_names: dict[str, str]
    chosen: bool


def tensors_of(source: Any) -> Tensors:
    """Return the tensors of a mapping, or of a model or an ExportedProgram of PyTorch."""
    if isinstance(source, Mapping):
        return Tensors(_held(source), {}, True)
    if hasattr(source, "graph_signature") and hasattr(source, "constants"):
        specs = source.graph_signature.input_specs
        other = {str(one.arg.name): str(one.target) for one in specs if one.target is not None}
        return Tensors(_held({**source.state_dict, **source.constants}), other, False)
    if hasattr(source, "named_parameters") and hasattr(source, "named_buffers"):
        parameters = source.named_parameters(remove_duplicate=False)
        buffers = source.named_buffers(remove_duplicate=False)
        return Tensors(_held({**dict(parameters), **dict(buffers)}), {}, False)
    raise arguments.wrong_type("load_weights: source", _WANTED, source)


def _held(source: Mapping[Any, Any]) -> dict[str, Held]:
    found = {}
    for name, value in source.items():
        arguments.text("load_weights: source, a name", name)
        found[name] = _one(name, value)
    return found


def _one(name: str, value: Any) -> Held:
    where = f"load_weights: source, {name!r}"
    if _of_torch(value):
        if str(value.layout) != "torch.strided" or value.is_quantized or value.is_meta:
            raise WeightsError(
                f"{where}: this tensor has no plain elements: it is {value.layout}, on device "
                f"{value.device}, of type {value.dtype}"
            )
        dtype = str(value.dtype).removeprefix("torch.")
    elif hasattr(value, "numpy") and hasattr(value, "dtype"):  # TVM's
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
    return Held(dtype, tuple(int(extent) for extent in value.shape), value)


def _of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "is_quantized")
