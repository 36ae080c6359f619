# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays: which indices they have, and where these go."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_ipc.index_spans_per_axis import Span, even_shard, extract, rows, shape_of, whole_axis


def test_what_a_part_has() -> None:
    whole = np.arange(24).reshape(4, 6)
    runs = (((2, 2), (None, 1), (2, 1)), ((5, 1), (0, 2)))
    assert shape_of(runs) == (4, 3)
    assert extract(whole, runs).tolist() == [[17, 12, 13], [23, 18, 19], [0, 0, 0], [17, 12, 13]]


def test_rows_of_a_part() -> None:
    whole = np.arange(24).reshape(4, 6)
    runs = (((2, 2), (None, 1), (0, 3)), ((5, 1), (0, 2)))
    part = extract(whole, runs)
    for begin in range(6):
        for count in range(1, 7 - begin):
            assert (extract(whole, rows(runs, begin, count)) == part[begin : begin + count]).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("extent", [0, 1, 4, 7])
def test_even_parts_are_the_whole_and_zeros(extent: int, parts: int) -> None:
    whole = np.arange(1, extent + 1)
    size = -(-extent // parts)
    found = np.concatenate([extract(whole, (even_shard(extent, k, parts),)) for k in range(parts)])
    assert found.tolist() == [*whole.tolist(), *[0] * (size * parts - extent)]


def test_random_runs() -> None:
    draw = np.random.default_rng(1)
    for _ in range(100):
        whole = draw.integers(-9, 9, draw.integers(0, 5, draw.integers(0, 4)))
        runs: list[tuple[Span, ...]] = []
        wanted = whole
        for axis, extent in enumerate(whole.shape):
            axis_runs: list[Span] = [whole_axis(extent)[0]]
            pieces = [wanted]
            for _ in range(int(draw.integers(0, 3))):
                start = int(draw.integers(0, extent + 1))
                count = int(draw.integers(0, extent - start + 1))
                axis_runs.append((start, count))
                pieces.append(wanted.take(range(start, start + count), axis))
            zeros = int(draw.integers(0, 3))
            axis_runs.append((None, zeros))
            padding = [(0, zeros if k == axis else 0) for k in range(whole.ndim)]
            wanted = np.pad(np.concatenate(pieces, axis), padding)
            runs.append(tuple(axis_runs))
        found = extract(whole, runs)
        assert found.shape == shape_of(tuple(runs))
        np.testing.assert_array_equal(found, wanted)
        assert not np.shares_memory(found, whole)
