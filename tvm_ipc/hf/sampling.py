# SPDX-License-Identifier: Apache-2.0
"""Which token comes next, given a number for each: the likeliest, or one by chance."""

from __future__ import annotations

import math
import numbers
from typing import Any, Final

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError

#: How many of the likeliest tokens are sorted at first; vocabularies have a hundred times as many.
_SORTED: Final = 1024


class Sampler:
    """Chooses tokens.

    Parameters
    ----------
    temperature : 0 takes the likeliest one; else logits are divided by it before one is drawn.
    top_k : draw from so many of the likeliest tokens, and those that are as likely as the last one;
        from all of them if None.
    top_p : draw from the fewest of these that together are at least so likely.
    seed : of the draws; with None they differ each time.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> None:
        self.temperature = _number("temperature", temperature, "a number of at least 0", math.inf)
        wanted = "a number of tokens, 1 or more, or None"
        self.top_k = top_k if top_k is None else arguments.integer(_of("top_k"), top_k, wanted, 1)
        self.top_p = _number("top_p", top_p, "a number above 0, up to 1", 1.0)
        if self.top_p == 0:
            raise arguments.wrong_value(_of("top_p"), "a number above 0, up to 1", top_p)
        if seed is not None:
            seed = arguments.integer(_of("seed"), seed, "a number of at least 0, or None")
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
        tokens, likely = self.chances(logits)
        below = likely.cumsum()
        drawn = np.searchsorted(below, self._random.random() * below[-1], side="right")
        return int(tokens[min(int(drawn), len(tokens) - 1)])

    def chances(self, logits: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        """Return the tokens that may be drawn, and how likely each is, up to one factor."""
        with np.errstate(over="ignore"):  # of a low temperature, by which others are not likely
            scaled = (logits.astype("float64") - logits.max()) / self.temperature
        likely = np.exp(scaled)
        tokens = np.arange(len(logits))
        if self.top_k is not None and self.top_k < len(logits):
            tokens = np.flatnonzero(logits >= np.partition(logits, -self.top_k)[-self.top_k])
        if self.top_p < 1:
            tokens = tokens[_likeliest(likely[tokens], self.top_p)]
        return tokens, likely[tokens]


def _likeliest(likely: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Return the indices of the fewest, at least one, that together have a share of all."""
    wanted, count = share * likely.sum(), _SORTED
    while True:
        some = np.arange(len(likely))
        if count < len(likely):
            some = np.argpartition(likely, -count)[-count:]
        order = some[np.argsort(-likely[some], kind="stable")]
        together = likely[order].cumsum()
        if together[-1] >= wanted or len(some) == len(likely):
            return order[: 1 + np.count_nonzero(together < wanted)]
        count *= 8


def _of(name: str) -> str:
    return f"generate: {name}"


def _number(name: str, value: object, wanted: str, most: float) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise arguments.wrong_type(_of(name), wanted, value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= most or math.isinf(number):
        raise arguments.wrong_value(_of(name), wanted, value)
    return number
