# SPDX-License-Identifier: Apache-2.0
"""How an axis is divided: what ranks have of it, and of axes made of it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tvm_ipc.comm import Division, Mesh, Shard
from tvm_ipc.comm.axis_block_sharding import concatenated
from tvm_ipc.comm.placements import placement_of, placements_of


def table(text: str, workers: int) -> list[list[int]]:
    rows: list[list[int]] = Division.of("division", text).table(workers).tolist()
    return rows


def test_heads_of_one_group_are_beside_each_other() -> None:
    assert table("2/2x3/2", 4) == [[0, 1], [2, -1], [3, 4], [5, -1]]
    assert table("2/2", 4) == [[0], [0], [1], [1]]
    assert table("2", 2) == [[0, 1], [0, 1]]
    assert table("5/2x2", 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, -1, -1]]


def test_segments_are_divided_one_by_one() -> None:
    assert table("4/2+2/2+2/2", 2) == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert table("3/2+2", 2) == [[0, 1, 3, 4], [2, -1, 3, 4]]
    assert Division.of("", "3/2+2").runs(1, 2) == ((2, 1), (None, 1), (3, 2))
    assert Division.of("", "8/2").runs(1, 2) == ((4, 4),)


def _drawn(random: Random, workers: int) -> Division:
    segments = []
    for _ in range(random.randint(1, 3)):
        left, factors = workers, []
        for _ in range(random.randint(1, 3)):
            among = random.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= among
            factors.append((random.randint(1, 6), among))
        segments.append(tuple(factors))
    return Division(tuple(segments))


@pytest.mark.parametrize("seed", range(200))
def test_axes_made_of_others(seed: int) -> None:
    """Their tables are those of NumPy's reshape, repeat and concatenate."""
    random = Random(seed)
    workers = random.choice([1, 2, 3, 4, 6, 8])
    division, other = (_drawn(random, workers) for _ in range(2))
    found = division.table(workers)
    assert Division.of("", str(division)) == division
    assert division.shard_extent == found.shape[1]
    assert division.padded == (found < 0).any()
    count = random.randint(1, 6)
    inner = np.where(found[..., None] < 0, -1, found[..., None] * count + np.arange(count))
    assert np.array_equal(division.times(count).table(workers), inner.reshape(workers, -1))
    assert division.times(count).over(count) == division
    blocks = [np.where(found < 0, -1, found + k * division.extent) for k in range(count)]
    assert np.array_equal(division.within(count).table(workers), np.concatenate(blocks, 1))
    assert division.within(count).under(count) == division
    beyond = other.table(workers)
    beyond = np.where(beyond < 0, -1, beyond + division.extent)
    both = concatenated([division, other])
    assert np.array_equal(both.table(workers), np.concatenate([found, beyond], 1))
    end = both.extent
    assert both.between(division.extent, end) == (other, division.shard_extent, both.shard_extent)
    assert both.between(0, division.extent) == (division, 0, division.shard_extent)
    for rank in range(workers):
        runs = division.runs(rank, workers)
        row = [k for at, n in runs for k in ([-1] * n if at is None else range(at, at + n))]
        assert row == found[rank].tolist()


@pytest.mark.parametrize("seed", range(50))
def test_what_is_repeated_is_shared_by_those_that_have_copies(seed: int) -> None:
    """Each element is on one rank then, unless all copies are."""
    random = Random(seed)
    workers, extent, times = random.choice([2, 4, 6, 8]), random.randint(1, 4), random.randint(1, 9)
    ways = random.choice([n for n in range(1, workers + 1) if workers % n == 0])
    repeated = Division(((((extent, ways)),),)).repeated(times, workers)
    found = repeated.table(workers)
    assert sorted(found[found >= 0].tolist()) == list(range(extent * times))
    base = Division((((extent, ways),),)).table(workers)
    for rank in range(workers):
        own = {int(one) // times for one in found[rank] if one >= 0}
        assert own <= set(base[rank].tolist())


def test_what_is_no_part_of_it() -> None:
    division = Division.of("", "10/4x3")
    assert division.over(2) is None
    assert division.under(2) is None
    assert division.between(0, 3) is None
    assert division.why_not(30, 4) == ""
    assert division.why_not(31, 4) == "10/4x3 divides an axis of extent 30, but the extent is 31"
    assert division.why_not(30, 6) == "10/4x3 needs a multiple of 4 ranks, but there are 6"


def test_placements_have_divisions() -> None:
    mesh = Mesh({"tp": 4})
    text = "S[1: 2/2x3/2+2/2]"
    (placement,) = placements_of(mesh, [text])
    assert placement == Shard(1, "2/2x3/2+2/2")
    assert str(placement) == text
    assert placement_of("", text) == placement
    assert placements_of(mesh, ["S[0: 8/4]"]) == (Shard(0),)
    with pytest.raises(ValueError, match="needs a multiple of 3 ranks, but there are 4"):
        placements_of(mesh, {"tp": "S[0: 6/3]"})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("8/2-4", ValueError, "is a division of an axis, such as '2/2x3/2x4'"),
        ("8/0", ValueError, "all 1 or more"),
        ("0/2", ValueError, "all 1 or more"),
        (8, TypeError, "Shard: division is a Division, its text, or None, not 8"),
        ("", ValueError, "a division of an axis"),
    ],
)
def test_divisions_that_cannot_be_meant(given: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Shard(0, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [(), ((),), 5, (5,), (((0, 1),),)])
def test_segments_that_cannot_be_meant(given: object) -> None:
    with pytest.raises((TypeError, ValueError), match="Division: segments is segments, each"):
        Division(given)  # type: ignore[arg-type]
