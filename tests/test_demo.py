# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc demo`: what it prints is true, it is quick, and it refuses options in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tvm_ipc import demo
from tvm_ipc.contract import AllReduceStrategy
from tvm_ipc.demo.lowering import compile_module
from tvm_ipc.demo.mlp import build_module, make_data, numpy_result
from tvm_ipc.demo.options import DTYPES, OptionError, Options, parse
from tvm_ipc.demo.tour import allowed_difference

SMALL = ("--hidden", "96", "--layers", "3", "--batch", "4", "--steps", "2")


def facts(output: str) -> dict[str, str]:
    """The lines of each label, joined."""
    found: dict[str, str] = {}
    label = ""
    for line in output.splitlines():
        label = line[:11].strip() or label
        found[label] = (found.get(label, "") + " " + line[11:].strip()).strip()
    return found


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_story_of_several_workers(capfd: pytest.CaptureFixture[str], workers: int) -> None:
    assert demo.main([*SMALL, f"--workers={workers}"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    story = facts(out)
    assert "3 all-reduces in the module, 3 rewritten (auto)" in story["compile"]
    assert "1 storage in ipc_memory (1.5 KiB)" in story["compile"]
    assert re.search(r"to one worker, .* to NumPy: right", story["result"])
    assert f"the same bits on all {workers} workers" in story["result"]
    assert re.search(r"a step \(median of 2\), .* with one worker: \d+\.\dx", story["time"])
    assert re.search(r"an all-reduce of 1\.5 KiB takes .*; 3 would be \S+% of", story["time"])
    assert "used 1.5 KiB of ipc_memory, 1.5 KiB planned, in a memfd" in story["memory"]
    assert "tvm-ipc doctor" in story["try next"]


def test_story_of_one_worker(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--workers=1"]) == 0
    story = facts(capfd.readouterr().out)
    assert "no all-reduces" in story["compile"]
    assert re.search(r"to NumPy: right", story["result"])
    assert "memory" not in story
    assert "tvm-ipc demo --workers 2" in story["try next"]


@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [("float32", "twoshot"), ("float16", "oneshot"), ("bfloat16", "ring")],
)
def test_types_and_strategies_in_threads(
    capfd: pytest.CaptureFixture[str], dtype: str, strategy: str
) -> None:
    options = [*SMALL, "--threads", f"--dtype={dtype}", f"--strategy={strategy}"]
    assert demo.main(options) == 0
    story = facts(capfd.readouterr().out)
    assert f"3 rewritten ({strategy})" in story["compile"]
    assert "threads started" in story["2 workers"]
    assert "the same bits" in story["result"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_part_is_no_rounding_error(dtype: str) -> None:
    options = Options(hidden=256, dtype=dtype)
    x, weights = make_data(options)
    right = numpy_result(x, weights)
    half = options.inner // 2
    parts = [w[:, :half] if i % 2 == 0 else w[:half] for i, w in enumerate(weights)]
    allowed = allowed_difference(options, float(np.abs(right).max()))
    assert np.abs(numpy_result(x, parts) - right).max() > 4 * allowed


def test_wrong_results_are_called_wrong(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.tour, "numpy_result", lambda x, weights: 2 * numpy_result(x, weights))
    assert demo.main([*SMALL, "--workers=1"]) == 1
    assert "to NumPy: WRONG" in capfd.readouterr().out


def test_one_worker_has_no_all_reduce() -> None:
    options = Options(hidden=64, layers=2)
    single = compile_module(build_module(options, 1), AllReduceStrategy.AUTO)
    assert (single.allreduces, single.rewritten, single.ipc_storages) == (0, 0, ())
    pair = compile_module(build_module(options, 2), AllReduceStrategy.AUTO)
    assert (pair.allreduces, pair.rewritten) == (2, 2)
    assert pair.ipc_storages == (options.batch * options.hidden * 4,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--workers 0", "--workers is 0; it must be 1 to 64"),
        ("--workers 65", "--workers is 65; it must be 1 to 64"),
        ("--workers two", "--workers: invalid int value"),
        (
            "--workers 3 --hidden 100",
            "--hidden 100 cannot be divided among 3 workers; --hidden 102",
        ),
        ("--hidden 0", "--hidden is 0; it must be at least 1"),
        ("--layers -1", "--layers is -1; it must be at least 1"),
        ("--batch 0", "--batch is 0; it must be at least 1"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--strategy best", "--strategy: invalid choice: 'best'"),
        ("--work 2", "unrecognized arguments: --work 2"),
        ("fast", "unrecognized arguments: fast"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert demo.main(options.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tvm-ipc demo: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_model_that_cannot_fit_is_refused() -> None:
    result = command("--hidden", "200000")
    assert result.returncode == 1
    assert re.search(r"would need about \S+ GiB of memory and the machine has", result.stderr)
    assert result.stderr.count("\n") == 1


def test_without_a_compiler_the_demo_says_what_to_install() -> None:
    result = command(PATH="", CXX="", CC="")
    assert result.returncode == 1
    assert "install g++ or clang" in result.stderr


def test_default_width_suits_the_workers() -> None:
    for workers in range(1, 65):
        options = parse(["--workers", str(workers)])
        assert options.hidden % workers == 0
        assert options.hidden < 2048
    with pytest.raises(OptionError):
        replace(Options(), workers=7)


def test_help_names_every_option() -> None:
    text = command("--help").stdout
    for name in ("workers", "layers", "hidden", "batch", "dtype", "strategy", "threads", "steps"):
        assert f"--{name}" in text


def test_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_ipc", "demo", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 1


def test_interrupt_ends_everything_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_ipc", "demo", "--hidden", "64", "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("1 worker"):
        assert process.poll() is None
    time.sleep(1.5)  # somewhere in the start or the steps of the two workers
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - start < 10
    assert "Traceback" not in err
    assert [pid for pid in children if is_running(pid)] == []


def is_running(pid: str) -> bool:
    """Whether it still does anything; one that ended may wait for its parent to hear of it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def command(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tvm_ipc", "demo", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
