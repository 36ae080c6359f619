# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/allreduce_cuda.py` says of its goals, from times that are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import allreduce_cuda
import cuda_goals
from cuda_goals import HALF, HIDDEN, LARGE, ROWS, SMALL

Times = dict[tuple[str, int], float]
TWO, FOUR = "2 threads", "4 threads"


def good() -> Times:
    """Microseconds by which two ranks just meet each goal: 2 x 64 MB are copied in 700 us."""
    times: Times = {("meeting", 0): 4.0, ("oneshot", SMALL): 6.0}
    times |= {("copies", LARGE): 700.0, ("twoshot", LARGE): 1531.0}
    for rows in ROWS:
        times |= {("fused norm", rows * HIDDEN * HALF): 8.0}
        times |= {("norm apart", rows * HIDDEN * HALF): 12.0}
    return times


def judged(times: Times, ranks: str = TWO, devices: int = 1) -> list[cuda_goals.Verdict]:
    def find(of: str, what: str, size: int) -> float | None:
        time = times.get((what, size)) if of == ranks else None
        return None if time is None else time * 1e-6

    return cuda_goals.judge(find, [ranks], devices)


def changed(verdicts: list[cuda_goals.Verdict]) -> list[tuple[str, str]]:
    return [(one.goal, one.verdict) for one in verdicts if one.verdict != "met"]


def test_all_goals_are_met_at_their_limits() -> None:
    verdicts = judged(good())
    assert [one.verdict for one in verdicts] == ["met"] * (2 + len(ROWS))
    assert [round(one.found or 0, 3) for one in verdicts] == [1.5, 0.8, *[1.5] * len(ROWS)]
    assert cuda_goals.status(verdicts) == 0


@pytest.mark.parametrize(
    ("what", "size", "time", "goal"),
    [
        ("oneshot", SMALL, 6.1, "one-shot of 16 KB"),
        ("meeting", 0, 3.9, "one-shot of 16 KB"),
        ("twoshot", LARGE, 1540.0, "two-shot of 64 MB"),
        ("copies", LARGE, 690.0, "two-shot of 64 MB"),
        ("fused norm", 16 * HIDDEN * HALF, 8.1, f"sum, residual and RMSNorm of 16 x {HIDDEN}"),
        ("norm apart", HIDDEN * HALF, 11.9, f"sum, residual and RMSNorm of 1 x {HIDDEN}"),
    ],
)
def test_a_goal_that_is_missed(what: str, size: int, time: float, goal: str) -> None:
    verdicts = judged(good() | {(what, size): time})
    assert changed(verdicts) == [(goal, "missed")]
    assert cuda_goals.status(verdicts) == 1


@pytest.mark.parametrize("time", [None, float("nan"), 0.0])
@pytest.mark.parametrize("which", sorted(good()))
def test_what_was_not_measured_is_no_goal_that_is_met(which: Any, time: float | None) -> None:
    times = good()
    del times[which]
    verdicts = judged(times if time is None else {**times, which: time})
    assert [verdict for _, verdict in changed(verdicts)] == ["not measured"]
    assert which[0] in next(one.text for one in verdicts if one.verdict != "met")
    assert cuda_goals.status(verdicts) == 2


def test_one_that_is_missed_says_more_than_one_that_was_not_measured() -> None:
    times = good() | {("oneshot", SMALL): 60.0}
    del times["copies", LARGE]
    assert cuda_goals.status(judged(times)) == 1


def test_more_ranks_move_more() -> None:
    """Of n ranks on one GPU (3n + 1) x 64 MB, beside copies of 2n x 64 MB."""
    times = good() | {("twoshot", LARGE): 700 * 13 / 8 / 0.8}
    assert judged(times, FOUR)[1].found == pytest.approx(0.8)


def test_who_is_not_judged() -> None:
    """Processes, that take turns on a GPU; several GPUs, whose links are the limit."""
    assert judged(good(), "2 processes") == []
    assert cuda_goals.status([]) == 2
    assert changed(judged(good(), devices=2)) == [("two-shot of 64 MB", "not measured")]


@pytest.mark.parametrize(("slow", "status"), [(1.0, 0), (2.0, 1), (None, 2)])
def test_the_command(
    slow: float | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With made-up times of a made-up GPU: what it says, writes and returns."""
    monkeypatch.setenv("TVM_IPC_CUDA_GRAPHS_OF_THREADS", "")
    gpu = SimpleNamespace(id=0, name="GPU (1)", kernels="sm_90", capability="9.0")
    found = SimpleNamespace(devices=(gpu,), reason="", driver="13.0")
    monkeypatch.setattr(allreduce_cuda.discovery, "find", lambda: found)
    monkeypatch.setattr(allreduce_cuda, "HERE", tmp_path)
    monkeypatch.setattr(allreduce_cuda.cuda_steps, "compiled", lambda *_: Path("steps.so"))
    given: list[Any] = []

    def measure(ranks: int, threads: bool, plan: Any, results: Any, steps: Path | None) -> None:
        given.append(steps)
        for (what, size), time in good().items():
            factor = slow if what == "fused norm" else 1.0
            if factor is not None:
                name = allreduce_cuda.name_of(ranks, threads)
                results.add(name, what, size, [[time * factor * 1e-6] * 3] * ranks)

    monkeypatch.setattr(allreduce_cuda, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["allreduce_cuda.py", "--quick"])
    monkeypatch.setattr(allreduce_cuda, "asdict", _plain)
    assert allreduce_cuda.main() == status
    assert given == [Path("steps.so")]
    said = capsys.readouterr().out
    assert f"{['met', 'missed', 'not measured'][status]} " in said.partition("goals")[2]
    (file,) = (tmp_path / "results").glob("allreduce_cuda-gpu-1-*.json")
    kept = json.loads(file.read_text())
    assert len(kept["goals"]) == 2 + len(ROWS)
    assert kept["machine"]["devices"][0]["name"] == "GPU (1)"
    assert kept["machine"]["nvidia-smi"]


def _plain(one: Any) -> Any:
    from dataclasses import asdict

    return vars(one) if isinstance(one, SimpleNamespace) else asdict(one)


def test_steps_of_another_generation(tmp_path: Path) -> None:
    (tmp_path / "steps.sm_80.so").touch()
    (tmp_path / "steps.sm_90.so").touch()
    assert allreduce_cuda.cuda_steps.find(tmp_path, "8.6").name == "steps.sm_80.so"
    with pytest.raises(allreduce_cuda.cuda_steps.NoStepsError, match=r"sm_80\.so, steps\.sm_90"):
        allreduce_cuda.cuda_steps.find(tmp_path, "12.0")


def test_where_tvm_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('there is no compiler')\n")
    monkeypatch.setattr(allreduce_cuda.cuda_steps, "COMPILE", broken)
    wanted = r"does not compile them here \(there is no compiler\): pip install .* --programs"
    with pytest.raises(allreduce_cuda.cuda_steps.NoStepsError, match=wanted):
        allreduce_cuda.cuda_steps.compiled(tmp_path, "9.0")
