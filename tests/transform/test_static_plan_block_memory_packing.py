# SPDX-License-Identifier: Apache-2.0
"""Packing: nothing overlaps, little is lost, and time grows with the number of tensors."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tvm import relax

from tests.transform.loads import power
from tvm_ipc.analysis.live_ranges import LiveRange
from tvm_ipc.analysis.program_order import Region, Step, exclusive
from tvm_ipc.transform.memory_plan import packing
from tvm_ipc.transform.memory_plan.packing import Item, Packing, most_live, pack
from tvm_ipc.transform.memory_plan.whole_storage_reuse import StorageRequest, pool

BODY = Region(None, None, 0, 1 << 20)


def item(size: int, first: int, last: int) -> Item:
    return Item(size, LiveRange(((first, last),), BODY))


def live_together(one: LiveRange, other: LiveRange) -> bool:
    if exclusive(one.region, other.region):
        return False
    return any(a <= d and c <= b for a, b in one.spans for c, d in other.spans)


def check(items: list[Item], packed: Packing, alignment: int) -> None:
    """Nothing overlaps in memory and in time; offsets are aligned; the total is the end."""
    spans = [(offset, offset + one.size) for offset, one in zip(packed.offsets, items, strict=True)]
    assert all(offset % alignment == 0 for offset in packed.offsets)
    assert packed.total == max(end for _, end in spans)
    for (a, one), (b, other) in itertools.combinations(zip(items, spans, strict=True), 2):
        if live_together(a.live_range, b.live_range):
            assert one[1] <= other[0] or other[1] <= one[0] or a.size == 0 or b.size == 0
    assert packed.total >= most_live(items)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_overlaps(seed):
    rng = random.Random(seed)
    items = []
    for _ in range(rng.randint(1, 80)):
        first = rng.randint(0, 100)
        size = rng.choice((0, 1, 7, 64, 100, 4096, rng.randint(1, 10**6)))
        items.append(item(size, first, first + rng.choice((0, 1, 3, 30))))
    for alignment in (1, 64, 256):
        check(items, pack(items, alignment), alignment)


def test_every_order_of_the_search_is_worth_its_time():
    # Without any of the orders, or with fewer moves after them, the sum is larger.
    total = 0
    for seed in range(300):
        rng = random.Random(seed)
        items = []
        for _ in range(rng.randint(8, 30)):
            first = rng.randrange(60)
            last = min(99, first + int(rng.expovariate(0.08)))
            items.append(item(rng.randint(1, 40), first, last))
        total += pack(items, 1).total
    assert total <= 44411


@pytest.mark.parametrize("seed", range(10))
def test_too_many_pairs_are_packed_in_the_order_of_time(seed, monkeypatch):
    monkeypatch.setattr(packing, "_MANY_PAIRS", 10)
    monkeypatch.setattr(packing, "_MANY_PAIRS_EACH", 1)
    rng = random.Random(seed)
    firsts = [rng.randint(0, 50) for _ in range(60)]
    items = [item(rng.randint(0, 1000), first, first + rng.randint(0, 9)) for first in firsts]
    check(items, pack(items, 64), 64)


def test_random_lifetimes_of_a_layered_model_lose_less_than_a_twentieth():
    lost = []
    for seed in range(20):
        rng = random.Random(seed)
        items = []
        for layer in range(60):
            at = layer * 6
            for _ in range(rng.randint(2, 5)):
                size = 64 * rng.choice((1, 2, 3, 8, 32, 100, 128))
                first = at + rng.randint(0, 4)
                items.append(item(size, first, first + rng.choice((1, 1, 2, 6))))
        packed = pack(items, 64)
        check(items, packed, 64)
        lost.append(packed.total / most_live(items))
    assert np.mean(lost) < 1.05
    assert max(lost) < 1.15  # these have no structure; models do, see benchmarks/memory_plan.py


def branches(entry: int, then: int, otherwise: int, region: Region = BODY) -> tuple[Region, Region]:
    """Return the two branches of an if, with so many events each."""
    binding = relax.VarBinding(relax.Var("y", relax.AnyType()), relax.prim_value(0))
    end = entry + then + otherwise + 1
    step = Step(binding, binding.var, binding.value, region, 0, entry, end)
    step.branches = (
        Region(step, None, entry + 1, entry + then, path=(*region.path, (step, 0))),
        Region(step, None, entry + then + 1, end - 1, path=(*region.path, (step, 1))),
    )
    return step.branches


def test_what_two_branches_need_is_not_added():
    then, other = branches(1, 2, 2)
    items = [
        Item(100, LiveRange(((2, 3), (6, 9)), then)),
        Item(60, LiveRange(((4, 9),), other)),
        item(10, 0, 9),
    ]
    assert most_live(items) == 110
    assert pack(items, 1).total == 110


def test_what_a_branch_needs_is_added_to_what_lives_through_it():
    then, other = branches(1, 4, 2)
    inner, _ = branches(2, 1, 1, then)
    items = [
        item(10, 0, 9),
        Item(5, LiveRange(((2, 5), (8, 9)), then)),
        Item(7, LiveRange(((3, 3), (5, 5)), inner)),
        Item(11, LiveRange(((6, 9),), other)),
    ]
    check(items, pack(items, 1), 1)
    assert most_live(items) == 10 + 5 + 7
    items[3] = Item(40, items[3].live_range)
    assert most_live(items) == 10 + 40


def test_work_grows_with_the_number_of_tensors():
    def layered(layers: int) -> None:
        items = []
        for layer in range(layers):
            at = layer * 10
            items += [item(64 * (1 + i % 7), at + i, at + i + 2 + i % 4) for i in range(10)]
        pack(items, 64)

    assert power(layered, 10) < 1.2


def test_work_grows_with_the_number_of_branches():
    def chained(count: int) -> None:
        items = []
        for number in range(count):
            at = number * 10
            for branch in branches(at, 4, 4):
                first = branch.begin + 1
                items += [Item(64, LiveRange(((first, first),), branch))]
            items.append(item(64, at, at + 12))
        assert most_live(items) == 3 * 64
        pack(items, 64)

    assert power(chained, 20) < 1.2


def test_work_grows_with_what_is_live_at_once(monkeypatch):
    monkeypatch.setattr(packing, "_MANY_PAIRS", 0)
    monkeypatch.setattr(packing, "_MANY_PAIRS_EACH", 1)

    def wide(count: int) -> None:
        items = [item(64 * (1 + i % 5), i, count) for i in range(count)]
        assert pack(items, 64).total == most_live(items)

    assert power(wide, 50) < 1.2


def test_thousands_that_are_live_at_once():
    items = [item(64 * (1 + i % 5), i, 3000) for i in range(3000)]
    assert pack(items, 64).total == most_live(items)


def test_storages_pass_from_tensor_to_tensor_of_a_kind():
    requests = [
        StorageRequest(1000, "float32", 0, 2, True),
        StorageRequest(900, "float16", 3, 5, True),  # of another kind
        StorageRequest(900, "float32", 6, 8, True),  # takes the first
        StorageRequest(1200, "float32", 9, 10, True),  # which then grows
        StorageRequest(70, "float32", 11, 12, True),  # too small for it by more than 16 times
        StorageRequest(1000, "float32", 13, 14, False),  # one that may not share
    ]
    found = pool(requests, exact=False)
    assert [(one.size, one.members) for one in found] == [
        (1200, [0, 2, 3]),
        (900, [1]),
        (70, [4]),
        (1000, [5]),
    ]
    assert [one.members for one in pool(requests, exact=True)] == [[0], [1], [2], [3], [4], [5]]
