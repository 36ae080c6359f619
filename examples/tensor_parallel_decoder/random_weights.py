# SPDX-License-Identifier: Apache-2.0
"""Make random weights that are the same in every run and for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .decoder_config import Config
from .decoder_model import Shard, export, padded_context

Array = npt.NDArray[Any]

#: Base of the rotary embedding, as in the paper that introduced it.
_ROTARY_BASE: Final = 10000.0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type of a name, including `bfloat16`."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make(config: Config, seed: int = 0) -> Iterator[tuple[str, Array, Shard | None]]:
    """Yield name, value and `Shard` of each weight, in the order of the program's parameters.

    A weight without a `Shard` is replicated on every worker.
    """
    random = np.random.default_rng(seed)
    for name, parameter in export(config, 1)[1]:
        shape = tuple(int(extent) for extent in parameter.shape)
        if name == "angles":
            yield name, _angles(config), None
            continue
        values = random.standard_normal(shape, "float32")
        if len(shape) == 1:  # the scale of a norm
            values = 1 + np.float32(0.1) * values
        elif name != "embedding":
            # Keep the scale of activations independent of the number of layers.
            depth = 2 * config.layers if name.endswith(("out.weight", "down.weight")) else 1
            values *= np.float32((shape[0] * depth) ** -0.5)
        yield name, values.astype(numpy_dtype(str(parameter.dtype))), parameter.attrs.get("shard")


def shard(weight: Array, spec: Shard, workers: int) -> Array:
    """Return an array whose first axis has the shard of each worker."""
    bounds = np.cumsum(spec.segments)[:-1]
    segments = np.split(weight, bounds, axis=spec.axis)
    pieces = [np.split(segment, workers, axis=spec.axis) for segment in segments]
    return np.stack([np.concatenate(own, axis=spec.axis) for own in zip(*pieces, strict=True)])


def _angles(config: Config) -> Array:
    """Return the cosines and sines of the rotary embedding."""
    half = config.head_dim // 2
    frequencies = _ROTARY_BASE ** -(np.arange(half) / half)
    angles = np.outer(np.arange(padded_context(config)), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
