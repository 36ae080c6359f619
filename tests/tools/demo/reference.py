# SPDX-License-Identifier: Apache-2.0
"""The decoder of the demo in NumPy, in float64, without a cache: slow, short, and independent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tvm_ipc.examples.tensor_parallel_decoder import random_weights as weights
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.decoder_model import EPSILON

Array = npt.NDArray[np.float64]


class Reference:
    """All weights in float64."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config = config
        self.w = {name: w.astype("float64") for name, w, _ in weights.make(config, seed)}

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], Array]:
        """Greedy tokens, and the logits that chose each."""
        tokens, rows = list(prompt), []
        for _ in range(count):
            rows.append(self.logits(tokens))
            tokens.append(int(rows[-1].argmax()))
        return tokens[len(prompt) :], np.stack(rows)

    def logits(self, tokens: list[int]) -> Array:
        """Of the token after these."""
        x = self.w["embedding"][tokens]
        for i in range(self.config.layers):
            layer = f"layers.{i}."
            normed = _norm(x, self.w[layer + "attention_norm.weight"])
            x = x + self._attention(normed, layer + "attention.")
            normed = _norm(x, self.w[layer + "mlp_norm.weight"])
            gate, up = np.split(normed @ self.w[layer + "mlp.gate_up.weight"], 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[layer + "mlp.down.weight"]
        logits: Array = _norm(x[-1:], self.w["norm.weight"]) @ self.w["head.weight"]
        return logits[0]

    def _attention(self, x: Array, name: str) -> Array:
        c, n = self.config, len(x)
        sizes = np.cumsum([c.heads, c.kv_heads])
        qkv = (x @ self.w[name + "qkv.weight"]).reshape(n, -1, c.head_dim)
        q, k, v = (part.transpose(1, 0, 2) for part in np.split(qkv, sizes, axis=1))
        q, k = self._rotate(q), self._rotate(k)
        k, v = (np.repeat(part, c.heads // c.kv_heads, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(c.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ v
        out: Array = mixed.transpose(1, 0, 2).reshape(n, -1) @ self.w[name + "out.weight"]
        return out

    def _rotate(self, x: Array) -> Array:
        half = self.config.head_dim // 2
        angles = np.outer(np.arange(x.shape[1]), 10000.0 ** -(np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * weight
