# SPDX-License-Identifier: Apache-2.0
"""Attention, masks and KV caches for transformers models while they are exported.

transformers lets users register functions for attention and for masks. The functions here use few
operators, all with sharding rules, and a mask is built once for all layers of a kind. If the ranks
shard the key/value heads, the queries of a key/value head are rows of one matmul, so keys and
values are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

#: The attention implementation for models whose key/value heads the ranks shard.
GROUPED: Final = "tvm_ipc_grouped"
#: The attention implementation for models whose key/value heads each rank has all of.
REPEATED: Final = "tvm_ipc_repeated"

#: The positions of the query tokens.
_QUERY_POSITIONS: ContextVar[Any] = ContextVar("query_positions")


@contextmanager
def query_positions(positions: Any) -> Iterator[None]:
    """Set the positions of the query tokens while a model is called."""
    token = _QUERY_POSITIONS.set(positions)
    try:
        yield
    finally:
        _QUERY_POSITIONS.reset(token)


def register() -> None:
    """Register both attention implementations with transformers."""
    for name, function in ((GROUPED, _attend_grouped), (REPEATED, _attend_repeated)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _mask)


def _mask(
    *,
    kv_length: Any,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    dtype: Any = torch.float32,
    **_: Any,
) -> Any:
    """Return the additive mask: 0, or the lowest number where a query must not attend to a key."""
    if attention_mask is not None or kv_offset != 0:
        raise NotImplementedError("attention with padding, or with an offset of the keys")
    queries = _QUERY_POSITIONS.get()[:, None, :, None]
    keys = torch.arange(kv_length)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    allowed = mask_function(zero, zero, queries, keys)
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min).to(dtype)


def _attention_weights(scores: Any, mask: Any, scaling: float, softcap: Any, sinks: Any) -> Any:
    if sinks is not None:
        raise NotImplementedError("attention with sinks")
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores.float(), -1)


def _attend_repeated(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Repeat each key/value head for all of its query heads, and attend head by head."""
    batch, heads, _, dim = query.shape
    groups = key.shape[1]
    if heads != groups:
        key, value = (
            states[:, :, None]
            .expand(batch, groups, heads // groups, states.shape[2], states.shape[3])
            .reshape(batch, heads, states.shape[2], states.shape[3])
            for states in (key, value)
        )
    scores = torch.matmul(query, key.transpose(2, 3))
    scaling = dim**-0.5 if scaling is None else scaling
    weights = _attention_weights(scores, attention_mask, scaling, softcap, s_aux).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2), None


def _attend_grouped(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attend with all queries of a key/value head as rows of one matmul."""
    batch, heads, count, dim = query.shape
    groups, total = key.shape[1], key.shape[2]
    rows = query.reshape(batch, groups, heads // groups * count, dim)
    scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, heads, count, total)
    scaling = dim**-0.5 if scaling is None else scaling
    weights = _attention_weights(scores, attention_mask, scaling, softcap, s_aux).to(query.dtype)
    rows = weights.reshape(batch, groups, heads // groups * count, total)
    mixed = torch.matmul(rows, value).reshape(batch, heads, count, value.shape[3])
    return mixed.transpose(1, 2), None


class TensorCacheLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of a layer: the past ones, if any, followed by the new ones."""

    def __init__(self, keys: Any = None, values: Any = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append keys and values, and return all of them."""
        if self.is_initialized:
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


def make_cache(tensors: Any, layers: int) -> Any:
    """Return a cache with the given keys and values of each layer, or an empty cache."""
    pairs = [tensors[2 * k : 2 * k + 2] for k in range(layers)] if tensors else [()] * layers
    return Cache(layers=[TensorCacheLayer(*pair) for pair in pairs])
