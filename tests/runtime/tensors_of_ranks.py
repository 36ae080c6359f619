# SPDX-License-Identifier: Apache-2.0
"""Tensors of which each rank has its own values: written, and compared with what is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

#: Something for each rank, by their numbers or in their order.
OfRanks = Mapping[int, Any] | Iterable[Any]


def by_rank(values: OfRanks) -> dict[int, Any]:
    return dict(values if isinstance(values, Mapping) else enumerate(values))


def write_each(tensor: Any, values: OfRanks) -> None:
    """Give each rank the array that is its own."""
    for rank, value in by_rank(values).items():
        tensor.debug_copy_from(rank, value)


def put_each(session: Any, values: OfRanks, **where: Any) -> Any:
    """Return a reference to a tensor of which each rank has its own array."""
    arrays = {rank: np.asarray(value, order="C") for rank, value in by_rank(values).items()}
    first = next(iter(arrays.values()))
    tensor = session.empty(first.shape, str(first.dtype), **where)
    write_each(tensor, arrays)
    return tensor


def arrays_on(result: Any, rank: int) -> list[Any]:
    """Return the tensors that a rank has: one, or those of a tuple."""
    value = result.debug_get_from_remote(rank)
    return [np.array(one.numpy()) for one in ([value] if hasattr(value, "numpy") else value)]


def assert_each(result: Any, wanted: OfRanks, where: str = "") -> None:
    """Compare the tensor of each rank with an array; None: it may have any values."""
    assert_each_tuple(result, {rank: [one] for rank, one in by_rank(wanted).items()}, where)


def assert_each_tuple(result: Any, wanted: OfRanks, where: str = "") -> None:
    """Compare the tensors of each rank with arrays; None: it may have any values."""
    for rank, rights in by_rank(wanted).items():
        for k, (found, one) in enumerate(zip(arrays_on(result, rank), rights, strict=True)):
            if one is not None:
                np.testing.assert_array_equal(found, one, f"{where} rank {rank}, result {k}")
