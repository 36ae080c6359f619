# SPDX-License-Identifier: Apache-2.0
"""What is said of times that were taken, and of events."""

from __future__ import annotations

import pytest

import tvm_ipc
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.errors import IPCError
from tvm_ipc.packed_functions.collective_declarations import ALLGATHER, CUSTOM_ALLREDUCE
from tvm_ipc.packed_functions.program_function_declarations import (
    ALLOC_STORAGE,
    EXPOSE,
    MATMUL,
    PEER_VIEW,
    RELEASE,
    VIEW,
)
from tvm_ipc.tools.bench import overlap_programs
from tvm_ipc.tools.bench.chrome_trace import Activity, activity, document, totals
from tvm_ipc.tools.bench.overlap import Comparison, counts, table
from tvm_ipc.tools.bench.timing_session import Event
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.overlap.cost_model import Workload, choose

WORK = Workload("allgather", 2, 8, 8, 8, 4, False)
FOUND = Comparison(
    WORK,
    matmul=[1.0, 1.0, 2.0],
    plain=[2.0, 2.0, 3.0],
    chunks={1: [1.5, 1.5, 3.0], 2: [1.1, 1.2, 2.0]},
)


def test_efficiency_is_the_share_of_communication_that_is_hidden() -> None:
    assert FOUND.efficiency(1) == pytest.approx(0.5)
    assert FOUND.efficiency(2) == pytest.approx(0.9)
    assert FOUND.ratio(1) == pytest.approx(0.75)
    assert FOUND.ratio(0) == 1
    assert FOUND.best == 2


def test_nothing_is_hidden_where_nothing_was_to_hide() -> None:
    free = Comparison(WORK, matmul=[2.0], plain=[2.0], chunks={1: [3.0]})
    assert free.efficiency(1) is None
    assert free.best == 0
    assert table(free, None) == [
        "variant                 ms   hidden",
        "matmul alone      2000.000",
        "without overlap   2000.000           fastest",
        "in 1 chunk        3000.000",
    ]


def test_numbers_of_chunks_that_are_tried() -> None:
    assert counts(WORK) == [1, 2, 4, 8]
    assert counts(WORK, most=4) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (EXPOSE.name, Activity.EXPOSE),
        (PEER_VIEW.name, Activity.WAIT),
        (RELEASE.name, Activity.RELEASE),
        (ALLGATHER.name, Activity.COMMUNICATE),
        (CUSTOM_ALLREDUCE.name, Activity.COMMUNICATE),
        ("runtime.disco.allreduce", Activity.COMMUNICATE),
        (MATMUL.name, Activity.COMPUTE),
        ("fused_matmul_add", Activity.COMPUTE),
        ("vm.builtin.alloc_tensor", Activity.MANAGE),
        (ALLOC_STORAGE.name, Activity.MANAGE),
        (VIEW.name, Activity.MANAGE),
    ],
)
def test_what_a_call_does(name: str, kind: Activity) -> None:
    assert activity(name) is kind


def test_a_trace_has_a_process_for_each_program_and_a_thread_for_each_rank() -> None:
    events = [Event(0, PEER_VIEW.name, 5000, 7000), Event(1, PEER_VIEW.name, 6000, 10000)]
    events += [Event(1, "matmul", 10000, 11000)]
    assert totals(events) == {
        Activity.WAIT: pytest.approx(4e-6),
        Activity.COMPUTE: pytest.approx(1e-6),
    }
    found = document({"plain": [], "overlapped": events})["traceEvents"]
    assert [(one["ph"], one["pid"], one["tid"]) for one in found] == [
        *(("M", 0, 0), ("M", 1, 0), ("M", 1, 0), ("M", 1, 1)),
        *(("X", 1, 0), ("X", 1, 1), ("X", 1, 1)),
    ]
    last = found[-1]
    assert (last["name"], last["cat"], last["ts"], last["dur"]) == ("matmul", "compute", 5.0, 1.0)


def calibration(bandwidth: float) -> Calibration:
    line = Times(((1, 1 << 20),), (1e-6, 1e-3))
    return Calibration(
        machine="one",
        backend="shm",
        workers=2,
        bandwidth=bandwidth,
        latency=0.0,
        wake=0.0,
        matmul=Times(((1, 1000), (16,), (16,)), (1e-5, 1e-2)),
        blas_matmul=None,
        collectives=dict.fromkeys(COLLECTIVES, line),
        reduce=line,
        copy=line,
        chunk=1e-6,
        hide=1e-6,
        noise=0.0,
    )


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("bandwidth", [2e6, 5e6, 1e12])
def test_the_pipeline_does_what_the_model_chooses(kind: str, bandwidth: float) -> None:
    work = Workload(kind, 2, 64, 16, 16, 4, False)
    given = calibration(bandwidth)
    wanted = choose(work, given)
    pipeline = tvm_ipc.get_pipeline("llvm", 2, overlap=given, blas=False)
    with collect_report() as report:
        pipeline(overlap_programs.plain(work))
    (found,) = (one for one in report.decisions if one.pass_name == "OverlapCommunication")
    assert (found.verdict == "skipped") is (wanted.chunks == 0)
    assert wanted.reason in found.reason
    assert wanted.overlaps is (bandwidth < 1e12)


def test_programs_that_are_not_overlapped_are_not_timed_as_if_they_were() -> None:
    work = Workload("allgather", 1, 64, 16, 16, 4, False)
    with pytest.raises(
        IPCError, match="allgather of x cannot be overlapped: its team has one rank"
    ):
        overlap_programs.variants(work, [2])
