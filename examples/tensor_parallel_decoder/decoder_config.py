# SPDX-License-Identifier: Apache-2.0
"""Define and check the sizes of the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm_ipc.packed_functions import MAX_WORKERS

DTYPES: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder. They describe the whole model, for any number of workers.

    Attributes
    ----------
    layers : number of layers, each an attention and a gated MLP.
    hidden : width of the residual stream.
    heads : number of query heads; `hidden` is split over them.
    kv_heads : number of heads of keys and values; each serves `heads / kv_heads` query heads.
    inner : width of the MLP.
    vocabulary : number of tokens in the vocabulary.
    context : maximum length of a sequence, including the generated tokens.
    dtype : type of weights, activations and all-reduces; sums are float32.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    inner: int = 1408
    vocabulary: int = 4096
    context: int = 256
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check the sizes; raise ValueError for those that no model can have."""
        for name in ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        _check_divisible("hidden", self.hidden, self.heads, "heads")
        _check_divisible("heads", self.heads, self.kv_heads, "kv_heads")
        if self.head_dim % 2:
            raise ValueError(
                f"hidden {self.hidden} gives each of {self.heads} heads a width of "
                f"{self.head_dim}; rotary embeddings need an even width"
            )

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """The number of weights of the whole model."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def check_workers(self, workers: int) -> None:
        """Raise a `ValueError` if the model cannot be split evenly over `workers` workers."""
        if not 1 <= workers <= MAX_WORKERS:
            raise ValueError(f"the number of workers is {workers}; it must be 1 to {MAX_WORKERS}")
        for name in ("heads", "kv_heads", "inner", "vocabulary"):
            _check_divisible(name, getattr(self, name), workers, "workers")


def _check_divisible(name: str, number: int, count: int, of: str) -> None:
    if number % count:
        multiple = -(-number // count) * count
        raise ValueError(
            f"{name} {number} cannot be split evenly over {count} {of}; use {name} {multiple}"
        )
