# SPDX-License-Identifier: Apache-2.0
"""Random weights: the same ones at every run, and for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tvm_ipc.demo.config import Config
from tvm_ipc.demo.model import Shard, export, padded_context

Array = npt.NDArray[Any]

#: Of the rotary positions, as in the models that brought them.
_BASE: Final = 10000.0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type of that name."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make(config: Config, seed: int = 0) -> Iterator[tuple[str, Array, Shard | None]]:
    """Yield the weights of the whole model, in the order of the program's parameters.

    A weight without a `Shard` is the same on every worker.
    """
    random = np.random.default_rng(seed)
    for name, parameter in export(config, 1)[1]:
        shape = tuple(int(extent) for extent in parameter.shape)
        if name == "angles":
            yield name, _angles(config), None
            continue
        values = random.standard_normal(shape, "float32")
        if len(shape) == 1:  # of a norm
            values = 1 + np.float32(0.1) * values
        elif name != "embedding":
            # A layer neither grows nor shrinks what goes through it, however many there are.
            depth = 2 * config.layers if name.endswith(("out.weight", "down.weight")) else 1
            values *= np.float32((shape[0] * depth) ** -0.5)
        yield name, values.astype(numpy_dtype(str(parameter.dtype))), parameter.attrs.get("shard")


def shard(weight: Array, how: Shard, workers: int) -> Array:
    """Return an array with a part for each worker."""
    cuts = np.cumsum(how.segments)[:-1]
    parts = [np.split(s, workers, axis=how.axis) for s in np.split(weight, cuts, axis=how.axis)]
    return np.stack([np.concatenate(mine, axis=how.axis) for mine in zip(*parts, strict=True)])


def _angles(config: Config) -> Array:
    half = config.head_dim // 2
    frequencies = _BASE ** -(np.arange(half) / half)
    angles = np.outer(np.arange(padded_context(config)), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
