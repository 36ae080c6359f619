# SPDX-License-Identifier: Apache-2.0
"""What a tensor of keys or values is like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cached:
    """A tensor of keys or values: so many heads, and numbers for each, of every token."""

    heads: int
    dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """How many bytes a token takes."""
        return self.heads * self.dim * np.dtype(self.dtype).itemsize
