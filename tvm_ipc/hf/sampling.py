# SPDX-License-Identifier: Apache-2.0
"""Which token comes next, given a number for each: the likeliest, or one by chance."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError


class Sampler:
    """Chooses tokens.

    Parameters
    ----------
    temperature : 0 takes the likeliest one; else logits are divided by it before one is drawn.
    top_p : draw from the fewest tokens that together are at least so likely.
    seed : of the draws; with None they differ each time.
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        self.temperature = _number(
            "generate: temperature", temperature, "a number of at least 0", 0.0, math.inf
        )
        self.top_p = _number("generate: top_p", top_p, "a number above 0, up to 1", 0.0, 1.0)
        if self.top_p == 0:
            raise arguments.wrong_value("generate: top_p", "a number above 0, up to 1", top_p)
        if seed is not None:
            seed = arguments.integer("generate: seed", seed, "a number of at least 0, or None")
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray[Any, Any]) -> int:
        """Return the number of the next token."""
        if not np.isfinite(logits).all():
            raise ModelError(
                f"the model gave {np.count_nonzero(~np.isfinite(logits))} logits that are not "
                "finite; with float16 weights it may need --dtype bfloat16 or float32"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = (logits - logits.max()).astype("float64") / self.temperature
        likely = np.exp(scaled)
        likely /= likely.sum()
        order = np.argsort(-likely, kind="stable")
        # As many as are needed, and the first one in any case.
        before = np.cumsum(likely[order]) - likely[order]
        kept = order[before < self.top_p]
        chances = likely[kept] / likely[kept].sum()
        return int(self._random.choice(kept, p=chances))


def _number(name: str, value: object, wanted: str, least: float, most: float) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise arguments.wrong_type(name, wanted, value)
    number = float(value)
    if not least <= number <= most or math.isinf(number):
        raise arguments.wrong_value(name, wanted, value)
    return number
