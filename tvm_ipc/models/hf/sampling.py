# SPDX-License-Identifier: Apache-2.0
"""Choose the next token from logits, by greedy decoding or by sampling.

TVM's `vm.builtin.sample_top_p_from_logits` has no top-k, and sorts the whole vocabulary each time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError

#: Top-p sampling first sorts this many tokens; vocabularies have a hundred times as many.
_SORTED: Final = 1024


class Sampler:
    """Chooses the next token from logits.

    Parameters
    ----------
    temperature : 0 for greedy decoding; otherwise the logits are divided by it.
    top_k : sample from the `top_k` most probable tokens, and from those that tie with the last of
        them; from all tokens if None.
    top_p : sample from the smallest set of most probable tokens whose probabilities sum to at least
        `top_p`.
    seed : the seed for sampling; with None the results differ each time.
    where : begins the error messages: the function that the caller called.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        where: str = "generate",
    ) -> None:
        self.temperature = arguments.not_negative(
            f"{where}: temperature", temperature, "a number of at least 0"
        )
        if top_k is not None:
            wanted = "a number of tokens, 1 or more, or None"
            top_k = arguments.integer(f"{where}: top_k", top_k, wanted, 1)
        self.top_k = top_k
        wanted = "a number above 0, up to 1"
        self.top_p = arguments.not_negative(f"{where}: top_p", top_p, wanted, 1.0)
        if self.top_p == 0:
            raise arguments.wrong_value(f"{where}: top_p", wanted, top_p)
        if seed is not None:
            seed = arguments.integer(f"{where}: seed", seed, "a number of at least 0, or None")
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray[Any, Any]) -> int:
        """Return the next token."""
        if not np.isfinite(logits).all():
            raise ModelError(
                f"the model returned {np.count_nonzero(~np.isfinite(logits))} logits that are not "
                "finite; with float16 weights, try dtype bfloat16 or float32 (--dtype)"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        tokens, weights = self.chances(logits)
        cumulative = weights.cumsum()
        index = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(tokens[min(int(index), len(tokens) - 1)])

    def chances(self, logits: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        """Return the candidate tokens and their unnormalized probabilities."""
        # A division by a low temperature may overflow to -inf, whose probability is 0.
        with np.errstate(over="ignore"):
            scaled = (logits.astype("float64") - logits.max()) / self.temperature
        weights = np.exp(scaled)
        tokens = np.arange(len(logits))
        if self.top_k is not None and self.top_k < len(logits):
            tokens = np.flatnonzero(logits >= np.partition(logits, -self.top_k)[-self.top_k])
        if self.top_p < 1:
            tokens = tokens[_nucleus(weights[tokens], self.top_p)]
        return tokens, weights[tokens]


def _nucleus(weights: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Return the indices of the fewest largest weights that sum to at least a share of all."""
    target, count = share * weights.sum(), _SORTED
    while True:
        largest = np.arange(len(weights))
        if count < len(weights):
            largest = np.argpartition(weights, -count)[-count:]
        order = largest[np.argsort(-weights[largest], kind="stable")]
        cumulative = weights[order].cumsum()
        if cumulative[-1] >= target or len(largest) == len(weights):
            return order[: 1 + np.count_nonzero(cumulative < target)]
        count *= 8
