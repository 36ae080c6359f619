# SPDX-License-Identifier: Apache-2.0
"""The cost model against schedules that were worked out by hand, and what it must never do."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from typing import Any

import pytest

from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.transform.overlap.cost_model import (
    LEAST_GAIN,
    Choice,
    PredictedStep,
    Workload,
    choose,
    predict,
    predict_sequential,
    schedule,
)

#: A second for each row, or for each byte.
ROWS = Times(((1, 2), (1,), (1,)), (1.0, 2.0))
BYTES = Times(((1, 2),), (1e-9, 2e-9))
IDEAL = Calibration(
    machine="a machine of which everything is known",
    backend="memory",
    workers=2,
    bandwidth=0.0,
    latency=0.0,
    wake=0.0,
    matmul=ROWS,
    blas_matmul=None,
    collectives=dict.fromkeys(COLLECTIVES, BYTES),
    reduce=BYTES,
    copy=BYTES,
    chunk=0.0,
    hide=0.0,
    noise=0.0,
)
GATHER = Workload("allgather", 2, rows=8, inner=1, columns=1, item_bytes=1, blas=False)
SCATTER = dataclasses.replace(GATHER, kind="reduce_scatter")
SUM = dataclasses.replace(GATHER, kind="allreduce")


def machine(**other: Any) -> Calibration:
    return dataclasses.replace(IDEAL, **other)


def like(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-6)


def test_gather_then_matmul() -> None:
    # The own 8 rows take 8 s; the peer's 8 bytes 16 s over the link, with a latency of 1 s.
    slow = machine(bandwidth=0.5, latency=1.0)
    assert predict_sequential(GATHER, slow) == like(1 + 16 + 16)
    assert predict(GATHER, 1, slow) == like(1 + 16 + 8)
    # Halves are there at 9 and 17, and take 4 s each; quarters at 5, 9, 13, 17, and take 2 s.
    assert predict(GATHER, 2, slow) == like(17 + 4)
    assert predict(GATHER, 4, slow) == like(17 + 2)
    # Over a fast one the peer's rows are there when the own ones are done.
    fast = machine(bandwidth=4.0)
    assert predict_sequential(GATHER, fast) == like(2 + 16)
    assert predict(GATHER, 2, fast) == like(16)
    # The own rows and both chunks cost something, and the end does.
    costs = machine(bandwidth=4.0, chunk=0.5, hide=0.25)
    assert predict(GATHER, 2, costs) == like(16 + 3 * 0.5 + 0.25)


def test_who_waits_for_the_link_wakes_late() -> None:
    slow = machine(bandwidth=0.5, wake=0.25)
    assert predict_sequential(GATHER, slow) == like(16 + 0.25 + 16)
    # Both halves are waited for; here only the first, which is there at 9.5; here none.
    assert predict(GATHER, 2, slow) == like(16 + 0.25 + 4)
    far = machine(bandwidth=8.0, latency=9.0, wake=0.25)
    assert predict(GATHER, 2, far) == like(9.5 + 0.25 + 8)
    assert predict(GATHER, 2, machine(bandwidth=4.0, wake=0.25)) == like(16)
    assert predict(SCATTER, 2, slow) == like(20 + 0.25)
    # Where there is no link nobody sleeps.
    assert predict_sequential(GATHER, machine(wake=0.25)) == like(16)


def test_what_a_rank_does_when() -> None:
    slow = machine(bandwidth=0.5)
    steps = [(one.activity, one.begin, one.end) for one in schedule(GATHER, 2, slow)]
    assert steps == [
        *(("compute", 0, 8), ("compute", 8, 12), ("wait", 12, 16), ("compute", 16, 20)),
        ("hide", 20, 20),
    ]
    assert [one.activity for one in schedule(GATHER, 0, slow)] == ["communicate", "compute"]
    product, scatter = schedule(SCATTER, 0, slow)
    assert product == PredictedStep("compute", 0.0, like(16))
    assert scatter == PredictedStep("communicate", like(16), like(32))


def test_gather_from_three_peers() -> None:
    # A chunk of 4 bytes each 8 s, from one peer after the other: at 8, 16, ..., 48.
    site = dataclasses.replace(GATHER, ranks=4)
    slow = machine(workers=4, bandwidth=0.5)
    assert predict_sequential(site, slow) == like(48 + 32)
    assert predict(site, 2, slow) == like(48 + 4)
    # Chunks of 4 bytes at 3, 6, ..., 18, each of which is multiplied for 4 s, after the own 8 s.
    assert predict(site, 2, machine(workers=4, bandwidth=4 / 3)) == like(8 + 6 * 4)


def test_matmul_then_reduce_scatter() -> None:
    # What the peer needs is shown at 8, the own is there at 16; 8 bytes take 16 s.
    slow = machine(bandwidth=0.5, latency=1.0)
    assert predict_sequential(SCATTER, slow) == like(16 + 1 + 16)
    assert predict(SCATTER, 1, slow) == like(8 + 16 + 1)
    # Halves are shown at 4 and 8, over the link at 12 and 20, and there at 13 and 21.
    assert predict(SCATTER, 2, slow) == like(21)
    # Quarters: shown at 2, over the link at 6, 10, 14, 18.
    assert predict(SCATTER, 4, slow) == like(19)
    # Over a fast one only the matmul counts, and what is reduced after it: here a byte a second.
    local = Times(((1, 2),), (1.0, 2.0))
    assert predict(SCATTER, 2, machine(bandwidth=4.0, reduce=local)) == like(16 + 4 + 4)


def test_matmul_then_reduce_scatter_to_three() -> None:
    # Chunks of 2 rows for both peers are shown at 2, 4 and 6, 8, then the own rows come, until 12.
    # They are asked for in this order, and travel 4 s each: until 6, 10, 14, 18.
    site = dataclasses.replace(SCATTER, ranks=3, rows=4)
    assert predict(site, 2, machine(workers=3, bandwidth=0.5)) == like(18)
    assert predict(site, 1, machine(workers=3, bandwidth=0.5)) == like(20)
    # Of travels of 1 s none is seen.
    assert predict(site, 2, machine(workers=3, bandwidth=2.0)) == like(12)


def test_more_ranks_gain_from_chunks_too() -> None:
    for ranks in (2, 3, 4, 8):
        site = dataclasses.replace(SCATTER, ranks=ranks, rows=8)
        whole = 8.0 * ranks
        even = machine(workers=ranks, bandwidth=8 * (ranks - 1) / whole)  # as slow as the matmul
        times = [predict(site, count, even) for count in (1, 2, 4, 8)]
        assert times == sorted(times, reverse=True)
        assert times[-1] <= whole + 8 * 0.3


def test_matmul_then_allreduce() -> None:
    # As a reduce-scatter: chunks at 12 and 20. They are shown then, and the peer's come as late.
    slow = machine(bandwidth=0.5)
    assert predict_sequential(SUM, slow) == like(16 + 2 * 16)
    # Of the peer's reduced chunks, shown at 16 and 20, the first travels from 20 to 28.
    assert predict(SUM, 2, slow) == like(36)
    copied = Times(((1, 2),), (1.0, 2.0))
    assert predict(SUM, 2, machine(bandwidth=0.5, copy=copied)) == like(36 + 4)


def test_rows_that_chunks_do_not_divide() -> None:
    site = dataclasses.replace(GATHER, rows=5)
    # 3 and 2 rows, there at 6 and 10, after the own 5 s.
    assert predict(site, 2, machine(bandwidth=0.5)) == like(10 + 2)
    # 2, 2 and 1 row, of which there are no four chunks.
    assert predict(site, 4, machine(bandwidth=0.5)) == like(10 + 1)
    assert predict(dataclasses.replace(GATHER, rows=0), 1, machine(chunk=1.0)) == like(1)
    assert predict(dataclasses.replace(GATHER, rows=1), 3, machine(chunk=1.0)) == like(2 + 2)


def test_it_takes_the_best_number_of_chunks() -> None:
    slow = machine(bandwidth=0.5, chunk=0.01)
    choice = choose(GATHER, slow)
    every = {count: predict(GATHER, count, slow) for count in (1, 2, 4, 8)}
    assert choice.overlaps
    assert choice.chunks == min(every, key=lambda count: every[count]) == 8
    assert choice.seconds == every[8]
    assert choice.sequential_seconds == predict_sequential(GATHER, slow)
    assert choice.reason == "8 chunks, 1.7e+04 ms predicted, 3.2e+04 ms without overlap"
    # Fewer where more would gain nothing, and where each costs.
    assert choose(GATHER, machine(bandwidth=4.0)).chunks == 1
    assert choose(GATHER, machine(bandwidth=0.5, chunk=1.0)).chunks == 2


def test_it_leaves_alone_what_gains_too_little() -> None:
    choice = choose(GATHER, machine())
    assert (choice.algorithm, choice.chunks, choice.overlaps) == ("sequential", 0, False)
    assert choice.reason.startswith(f"overlap would gain less than {LEAST_GAIN:.0%}: 1 chunk, ")
    # 2 s of 18 s are more than a tenth, and less than twice a noise of 6%.
    some = machine(bandwidth=4.0)
    assert choose(GATHER, some).overlaps
    assert not choose(GATHER, dataclasses.replace(some, noise=0.06)).overlaps
    # A chunk that costs as much as the link.
    assert not choose(GATHER, machine(bandwidth=4.0, chunk=1.0, hide=1.0)).overlaps


@pytest.mark.parametrize(
    ("site", "calibration", "reason"),
    [
        (GATHER, None, "there is no calibration"),
        (dataclasses.replace(GATHER, rows=None), IDEAL, "an extent is only known when"),
        (dataclasses.replace(GATHER, inner=None), IDEAL, "an extent is only known when"),
        (dataclasses.replace(GATHER, columns=None), IDEAL, "an extent is only known when"),
        (dataclasses.replace(GATHER, ranks=4), IDEAL, "the team has 4 ranks"),
        (dataclasses.replace(GATHER, blas=True), IDEAL, "measured without BLAS"),
    ],
)
def test_what_cannot_be_predicted_is_left_alone_unless_asked_for(
    site: Workload, calibration: Calibration | None, reason: str
) -> None:
    left = choose(site, calibration)
    assert left == Choice("sequential", 0, None, None, left.reason)
    assert reason in left.reason
    forced = choose(site, calibration, chunks=4)
    assert forced == Choice("direct", 4, None, None, forced.reason)
    assert reason in forced.reason


def test_what_is_asked_for_is_done() -> None:
    choice = choose(GATHER, IDEAL, chunks=3)
    assert (choice.algorithm, choice.chunks) == ("direct", 3)
    assert choice.seconds == predict(GATHER, 3, IDEAL)
    assert choice.reason.startswith("as requested; 3 chunks, ")
    left = choose(GATHER, machine(bandwidth=1e-3), chunks=0)
    assert (left.algorithm, left.chunks, left.seconds) == ("sequential", 0, left.sequential_seconds)
    assert left.reason.startswith("as requested; not overlapped, ")


def test_few_rows_are_not_taken_to_be_faster_than_many() -> None:
    odd = Times(((1, 16), (1,), (1,)), (0.1, 16.0))
    assert predict(GATHER, 8, machine(matmul=odd)) == like(16)


def test_the_blas_has_times_of_its_own() -> None:
    fast = Times(((1, 2), (1,), (1,)), (0.5, 1.0))
    site = dataclasses.replace(GATHER, blas=True)
    assert predict_sequential(site, machine(blas_matmul=fast)) == like(8)


@pytest.mark.parametrize(
    ("kind", "ranks", "most"),
    [("allgather", 2, 64), ("reduce_scatter", 3, 32), ("allreduce", 2, 32), ("allreduce", 64, 1)],
)
def test_no_more_chunks_than_can_be_shown(kind: str, ranks: int, most: int) -> None:
    site = Workload(kind, ranks, rows=1 << 20, inner=1, columns=1, item_bytes=1, blas=False)
    assert site.most_chunks == most
    assert dataclasses.replace(site, rows=None).most_chunks == most
    assert dataclasses.replace(site, rows=1).most_chunks == 1
    assert dataclasses.replace(site, rows=0).most_chunks == 1
    choice = choose(site, machine(workers=ranks, bandwidth=0.5))
    assert choice.overlaps
    assert choice.chunks <= most


@pytest.mark.slow
def test_what_is_worse_never_seems_better() -> None:
    """A slower link, a slower machine, more rows: none is predicted to take less time."""
    draw = random.Random(0)
    for _ in range(300):
        site = Workload(
            draw.choice(COLLECTIVES),
            draw.choice((2, 3, 5)),
            *(draw.randint(0, 300) for _ in range(3)),
            item_bytes=4,
            blas=False,
        )
        table = Times.measured(
            ((1, 30, 500), (1, 100), (1, 100)), lambda *s: 1e-6 + 1e-9 * s[0] * s[1] * s[2]
        )
        line = Times.measured(((64, 1 << 20),), lambda size: 1e-6 + 1e-10 * size)
        better = machine(
            workers=site.ranks,
            bandwidth=draw.uniform(1e6, 1e9),
            latency=draw.uniform(0, 1e-3),
            matmul=table,
            collectives=dict.fromkeys(COLLECTIVES, line),
            reduce=line,
            copy=line,
            chunk=1e-6,
            hide=1e-6,
        )
        worse = [
            dataclasses.replace(better, bandwidth=better.bandwidth / 2),
            dataclasses.replace(better, latency=better.latency + 1e-3),
            dataclasses.replace(better, wake=1e-3),
            dataclasses.replace(better, chunk=2e-6),
            dataclasses.replace(better, hide=2e-6),
        ]
        more = dataclasses.replace(site, rows=site.rows + 1)
        for count in (1, 2, 5):
            best = predict(site, count, better)
            assert all(predict(site, count, one) >= best for one in worse)
        assert all(
            predict_sequential(site, one) >= predict_sequential(site, better) for one in worse
        )
        assert predict_sequential(more, better) >= predict_sequential(site, better)
        choice = choose(site, better)
        assert choice.sequential_seconds is not None
        assert choice == choose(site, better)
        if choice.overlaps:
            assert choice.seconds <= choice.sequential_seconds * (1 - LEAST_GAIN)
            assert choice.chunks <= site.most_chunks


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"kind": "gather"}, ValueError, "kind is one of 'allgather'"),
        ({"kind": 3}, TypeError, "kind is one of 'allgather'"),
        ({"ranks": 0}, ValueError, "ranks is a number of ranks, 1 to 64, not 0"),
        ({"rows": -1}, ValueError, "rows is an extent, 0 or more, or None, not -1"),
        ({"inner": 2.5}, TypeError, "inner is an extent, 0 or more, or None, not 2.5"),
        ({"columns": "n"}, TypeError, "columns is an extent, 0 or more, or None, not 'n'"),
        ({"item_bytes": 0}, ValueError, "item_bytes is a number of bytes, 1 or more, not 0"),
        ({"blas": 1}, TypeError, "blas is True or False, not 1"),
    ],
)
def test_sites_that_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"Workload: {re.escape(message)}"):
        dataclasses.replace(GATHER, **given)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="choose: workload is a Workload, not 3"):
        choose(3, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="choose: calibration is a Calibration or None, not 'x'"):
        choose(GATHER, "x")  # type: ignore[arg-type]
    for wrong in (-1, 65, 2.5, "2", True):
        with pytest.raises((TypeError, ValueError), match="choose: chunks is a number of chunks"):
            choose(GATHER, None, chunks=wrong)  # type: ignore[arg-type]
    for which in itertools.product((4, None), repeat=3):
        if None in which:
            extents = dict(zip(("rows", "inner", "columns"), which, strict=True))
            with pytest.raises(ValueError, match="expected known extents"):
                predict(dataclasses.replace(GATHER, **extents), 1, IDEAL)
