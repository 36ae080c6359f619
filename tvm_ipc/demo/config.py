# SPDX-License-Identifier: Apache-2.0
"""The size of a decoder, among how many workers it can be divided, and how it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm_ipc.contract import MAX_WORKERS, AllReduceStrategy

DTYPES: Final = ("float32", "float16", "bfloat16")
DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True)
class Config:
    """A decoder. All sizes are of the whole model, whatever the number of workers.

    Attributes
    ----------
    layers : each an attention and a gated MLP.
    hidden : width of the residual stream.
    heads : of the queries; `hidden` is divided among them.
    kv_heads : of the keys and values; each serves `heads / kv_heads` query heads.
    inner : width of the MLP.
    vocabulary : how many different tokens there are.
    context : the most tokens of a sequence, prompt and answer together.
    dtype : of weights, activations and all-reduces; sums are float32.
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
        for name in ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        _check_divides("hidden", self.hidden, self.heads, "heads")
        _check_divides("heads", self.heads, self.kv_heads, "kv_heads")
        if self.head_dim % 2:
            raise ValueError(
                f"hidden {self.hidden} gives each of {self.heads} heads {self.head_dim} numbers; "
                "rotary positions need an even one"
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
        """Raise a `ValueError` if the model cannot be divided evenly among so many workers."""
        if not 1 <= workers <= MAX_WORKERS:
            raise ValueError(f"the number of workers is {workers}; it must be 1 to {MAX_WORKERS}")
        for name in ("heads", "kv_heads", "inner", "vocabulary"):
            _check_divides(name, getattr(self, name), workers, "workers")


@dataclass(frozen=True)
class Build:
    """How a decoder is compiled.

    Attributes
    ----------
    strategy : of the all-reduces.
    blas : whether matrix products are OpenBLAS's, or kernels of TVM as `schedule` has them. None:
        OpenBLAS's where it is installed.
    sequence_parallel : whether each of several workers has a part of a prompt's residual stream.
    overlap : into how many chunks a worker's rows are divided, which are on their way while others
        are multiplied. None: rows are gathered first, and sums scattered afterwards.
    device : what the workers compute on, one of `DEVICES`.
    """

    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    blas: bool | None = None
    sequence_parallel: bool = False
    overlap: int | None = None
    device: str = "cpu"


def _check_divides(name: str, number: int, parts: int, of: str) -> None:
    if number % parts:
        near = -(-number // parts) * parts
        raise ValueError(
            f"{name} {number} cannot be divided evenly among {parts} {of}; {name} {near} can"
        )
