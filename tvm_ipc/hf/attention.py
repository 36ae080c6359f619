# SPDX-License-Identifier: Apache-2.0
"""How models of transformers attend, and keep keys and values, while they are exported.

transformers lets others register functions for attention and for masks. These are written with few
operators, which all have rules: a mask is made once for all layers of a kind, and where the ranks
divide the heads of keys, the queries of a head of keys are rows of one product, so that no keys
are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

#: The names of attention in configurations, if the ranks divide the heads of keys or do not.
GROUPED: Final = "tvm_ipc_grouped"
REPEATED: Final = "tvm_ipc_repeated"


#: The positions of the tokens that attend.
_QUERIES: ContextVar[Any] = ContextVar("queries")


@contextmanager
def queries_at(positions: Any) -> Iterator[None]:
    """Say where the tokens are that attend, while a model is called."""
    token = _QUERIES.set(positions)
    try:
        yield
    finally:
        _QUERIES.reset(token)


def register() -> None:
    """Make the two known to transformers."""
    for name, function in ((GROUPED, _grouped), (REPEATED, _repeated)):
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
    """Return what is added to scores: 0, or the least number where a query must not look."""
    if attention_mask is not None or kv_offset != 0:
        raise NotImplementedError("attention with padding, or from another key on than the first")
    queries = _QUERIES.get()[:, None, :, None]
    keys = torch.arange(kv_length)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    allowed = mask_function(zero, zero, queries, keys)
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min).to(dtype)


def _weights(scores: Any, mask: Any, scaling: float, softcap: Any, sinks: Any) -> Any:
    if sinks is not None:
        raise NotImplementedError("attention with sinks")
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores.float(), -1)


def _repeated(
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
    """Attend with each head of keys as often as there are queries for it."""
    batch, heads, _, dim = query.shape
    groups = key.shape[1]
    if heads != groups:
        key, value = (
            one[:, :, None]
            .expand(batch, groups, heads // groups, one.shape[2], one.shape[3])
            .reshape(batch, heads, one.shape[2], one.shape[3])
            for one in (key, value)
        )
    scores = torch.matmul(query, key.transpose(2, 3))
    scaling = dim**-0.5 if scaling is None else scaling
    weights = _weights(scores, attention_mask, scaling, softcap, s_aux).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2), None


def _grouped(
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
    """Attend with all queries of a head of keys as rows of one product."""
    batch, heads, count, dim = query.shape
    groups, total = key.shape[1], key.shape[2]
    rows = query.reshape(batch, groups, heads // groups * count, dim)
    scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, heads, count, total)
    scaling = dim**-0.5 if scaling is None else scaling
    weights = _weights(scores, attention_mask, scaling, softcap, s_aux).to(query.dtype)
    rows = weights.reshape(batch, groups, heads // groups * count, total)
    mixed = torch.matmul(rows, value).reshape(batch, heads, count, value.shape[3])
    return mixed.transpose(1, 2), None


class KeptLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of a layer: those of before, if any, and the new ones after them."""

    def __init__(self, keys: Any = None, values: Any = None) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, keys is not None

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Keep more keys and values, and return all of them."""
        if self.is_initialized:
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


def cache_of(tensors: Any, layers: int) -> Any:
    """Return a cache of layers whose keys and values are tensors, or which are empty."""
    pairs = [tensors[2 * k : 2 * k + 2] for k in range(layers)] if tensors else [()] * layers
    return Cache(layers=[KeptLayer(*pair) for pair in pairs])
