# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc bench`: what it writes can be used, and what it prints says what was asked."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvm_ipc import this_machine
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.packed_functions.program_function_declarations import EXPOSE, PEER_VIEW
from tvm_ipc.tools.bench import calibrate_cost_model
from tvm_ipc.tools.bench.chrome_trace import Activity
from tvm_ipc.tools.bench.timing_session import TimingSession
from tvm_ipc.tools.command_line import main

SMALL = ["--rows", "8", "--inner", "16", "--columns", "16", "--rounds", "1"]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("bench") / "here.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate_cost_model, "_KERNELS", ((1, 8), (8, 16), (8, 16)))
        patch.setattr(calibrate_cost_model, "_BLAS", ((1, 8), (8, 16), (8, 16)))
        patch.setattr(calibrate_cost_model, "_BYTES", ((64, 1024),))
        link = ["--bandwidth", "1e9", "--latency", "1e-4"]
        assert main(["bench", "--calibrate", "--out", str(path), *link]) == 0
    yield path


def test_a_calibration_is_of_this_machine_and_says_what_was_told(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Calibration.load(calibration, workers=2)
    assert (found.bandwidth, found.latency) == (1e9, 1e-4)
    assert 0 < found.matmul.at(8, 16, 16) < 1
    assert found.hide > 0
    assert 0 <= found.noise < 1


@pytest.mark.slow
def test_progress_rises_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, grid in (("_KERNELS", ((1,),) * 3), ("_BLAS", ((1,),) * 3), ("_BYTES", ((64,),))):
        monkeypatch.setattr(calibrate_cost_model, name, grid)
    shares: list[float] = []
    found = calibrate_cost_model.calibrate(2, 0, 0, lambda share, _: shares.append(share))
    assert shares == sorted(shares)
    assert shares[0] == 0
    steps = {round(b - a, 9) for a, b in itertools.pairwise(shares)}
    assert len(steps) == 1
    assert shares[-1] + steps.pop() == pytest.approx(1)  # as many as were foreseen
    assert found.workers == 2


def test_overlap_prints_a_table_and_writes_a_trace(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    given = ["--calibration", str(calibration), "--trace", str(trace)]
    for kind in COLLECTIVES:
        assert main(["bench", "overlap", *SMALL, *given, "--kind", kind]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "2 workers, 8 rows each, 16 x 16, float32" in lines[0]
        assert lines[1] == "emulated link of 1 GB/s, 100 us"
        assert [line[:16].strip() for line in lines[3:9]] == [
            *("matmul alone", "without overlap"),
            *(f"in {n} chunk{'s' * (n > 1)}" for n in (1, 2, 4, 8)),
        ]
        assert sum("fastest" in line for line in lines) == 1
        assert sum("chosen" in line for line in lines[3:9]) == 1
        assert max(map(len, lines[:-1])) <= 80
        found = json.loads(trace.read_text())["traceEvents"]
        complete = [one for one in found if one["ph"] == "X"]
        assert {(one["pid"], one["tid"]) for one in complete} == {
            (p, r) for p in range(4) for r in range(2)
        }
        assert min(one["ts"] for one in complete) == 0
        overlapped = [one["name"] for one in complete if one["pid"] == 1 and one["tid"] == 0]
        assert overlapped.count(EXPOSE.name) == overlapped.count(PEER_VIEW.name) > 0
        kinds = {one["cat"] for one in complete if one["pid"] == 0}
        assert {Activity.COMPUTE.value, Activity.COMMUNICATE.value} <= kinds
        titles = [one["args"]["name"] for one in found if one["name"] == "process_name"]
        assert titles[0] == "without overlap"
        assert re.fullmatch(r"in \d+ chunks?", titles[1])
        assert titles[2:] == [f"{one}, as predicted" for one in titles[:2]]
        foretold = [one["name"] for one in complete if one["pid"] == 2 and one["tid"] == 1]
        both = ["communicate", "compute"]
        assert foretold == (both if kind == "allgather" else both[::-1])


def test_overlap_without_a_calibration_predicts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "overlap", *SMALL, "--no-blas"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "kernels of TVM" in out
    assert "no emulated link" in out
    assert "chosen" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x"], "--out needs --calibrate"),
        (["--latency", "0"], "--latency needs --calibrate"),
        (["--calibrate", "--plot", "x.svg"], "--plot conflicts with --calibrate"),
        (
            ["--from", "FILE", "--workers", "2"],
            "--workers is for a new measurement and conflicts with --from",
        ),
        (["--plot", "x.png"], "--plot is 'x.png'; it must end in .svg"),
        (
            ["overlap", "--calibration", "FILE", "--workers", "2"],
            "--workers is 2, but --calibration specifies it",
        ),
        (
            ["overlap", "--calibration", "FILE", "--latency", "0"],
            "--latency is 0.0, but --calibration specifies it",
        ),
    ],
)
def test_options_that_make_no_sense(
    calibration: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(calibration) if one == "FILE" else one for one in arguments]
    assert main(["bench", *given]) == 2
    assert capsys.readouterr().err.startswith(f"tvm-ipc bench: {message}")


def test_a_calibration_without_the_blas_is_told(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    dataclasses.replace(Calibration.load(calibration), blas_matmul=None).save(path)
    assert main(["bench", "overlap", "--calibration", str(path), "--blas"]) == 1
    assert (
        "was measured without OpenBLAS; install scipy-openblas64 and calibrate again"
        in capsys.readouterr().err
    )
    assert main(["bench", "overlap", "--calibration", str(path), "--no-blas", *SMALL]) == 0


def test_a_stale_or_broken_calibration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    path.write_text("{}")
    assert main(["bench", "overlap", "--calibration", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"tvm-ipc: the calibration {path} is stale: ")


def test_real_time_that_is_refused_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_setscheduler", refuse)
    for given in (["--calibrate"], ["overlap"]):
        assert main(["bench", *given, "--real-time"]) == 1
        assert capsys.readouterr().err == (
            "tvm-ipc: --real-time: the system refused real-time priority: Operation not permitted; "
            "run as root or with CAP_SYS_NICE\n"
        )


@pytest.mark.parametrize(
    ("cores", "busy", "said"), [(4, 2.2, False), (4, 2.4, True), (1, 0.4, True)]
)
def test_a_busy_machine_is_told(
    cores: int,
    busy: float,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(this_machine, "available_cores", lambda: cores)
    monkeypatch.setattr(this_machine.OtherPrograms, "cores", lambda _: busy)
    assert main(["bench", "overlap", *SMALL]) == 0
    assert (f"kept {busy} of {cores} cores busy meanwhile" in capsys.readouterr().out) is said


def test_what_other_programs_have_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(own: float, others: float, waited: float) -> float:
        """Of two usable cores and another one, in 10 seconds."""
        seconds, stat = 100.0, "cpu 0\ncpu0 0\n"
        ours = (5.0, 0.0, 1.0, 0.0, 100.0)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 2})
        monkeypatch.setattr("os.sysconf", lambda _: 100)
        monkeypatch.setattr("time.monotonic", lambda: seconds)
        monkeypatch.setattr("os.times", lambda: ours)
        monkeypatch.setattr(Path, "read_text", lambda _: stat)
        busy = round(50 * (own + others))
        stat = "cpu 9\ncpu0 9 9 9 9 9 9 9 9 0 0\ncpu1 0 0 0 7 0 0 0 0\ncpu2 0 0 0 7 0 0 0 0\n"
        found = this_machine.OtherPrograms()
        stat = f"cpu0 5000 0 0 0 0 0 0 0 0 0\ncpu1 {busy} 0 0 {waited} 9 0 0 0 0 0\n"
        stat += f"cpu2 0 {busy // 2} {busy - busy // 2} 0 0 0 0 0 0 0\n"
        seconds, ours = 110.0, (5.0 + own / 2, 0.0, 1.0, own / 2, 110.0)
        return found.cores()

    assert measured(own=20.0, others=0.0, waited=0) == 0.0
    assert measured(own=10.0, others=8.0, waited=200) == pytest.approx(0.8)
    assert measured(own=0.0, others=20.0, waited=0) == pytest.approx(2.0)


@pytest.mark.slow
def test_programs_are_timed_over_the_link_of_the_calibration(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "far.json"
    dataclasses.replace(Calibration.load(calibration), latency=0.2).save(path)
    assert main(["bench", "overlap", "--calibration", str(path), *SMALL]) == 0
    matmul, plain, chunk = (
        float(line[16:26]) for line in capsys.readouterr().out.splitlines()[3:6]
    )
    assert min(plain, chunk) >= 200 > matmul


def test_the_slowest_worker_counts() -> None:
    class Session:
        def get(self, answer: list[list[float]], rank: int) -> list[float]:
            return answer[rank]

    stage = TimingSession.__new__(TimingSession)
    stage.workers, stage.session = 2, Session()  # type: ignore[assignment]
    stage._synchronize, stage._seconds = None, lambda *_: [[1.0, 5.0], [2.0, 4.0]]
    assert stage.seconds(None, [], 2) == [2.0, 5.0]


def test_programs_take_turns() -> None:
    calls: list[str] = []

    class Fake(TimingSession):
        def __init__(self) -> None:
            self.workers = 2

        def seconds(self, function, given, repeats=1, calls_=1):  # type: ignore[no-untyped-def]
            calls.append(function)
            return [float(len(calls))]

    times = Fake().interleaved({"a": ("a", []), "b": ("b", [])}, 2)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert times == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
