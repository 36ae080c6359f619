# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc demo`: what it prints is true, it is quick, and it refuses options in one line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_ipc import this_machine
from tvm_ipc.cpu.openblas_discovery import installed
from tvm_ipc.errors import IPCError
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.generate import Generation, Generator
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.this_machine import available_cores
from tvm_ipc.tools import demo
from tvm_ipc.tools.demo import compare_worker_counts
from tvm_ipc.tools.demo.options import parse
from tvm_ipc.tools.demo.step_printer import Report

pytestmark = pytest.mark.slow  # compiles the demo for each test

SMALL = (
    *("--hidden", "96", "--heads", "8", "--kv-heads", "4", "--inner", "64", "--layers", "3"),
    *("--vocabulary", "256", "--prompt-length", "20", "--tokens", "6"),
)


def facts(output: str) -> dict[str, str]:
    """The lines of each label, joined."""
    found: dict[str, str] = {}
    label = ""
    for line in output.splitlines():
        label = line[:11].strip() or label
        found[label] = (found.get(label, "") + " " + line[11:].strip()).strip()
    return found


def test_story_of_several_workers(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--workers", "4"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    story = facts(out)
    assert "for 1 and 4" in story["compile"]
    assert "12 all-reduces in two functions, 12 rewritten (auto)" in story["compile"]
    # Of the last layer's sum `prefill` normalises one row only.
    assert "11 fused with the norm that follows" in story["compile"]
    assert "12 without exit barrier" in story["compile"]
    kernels = "OpenBLAS" if installed() else "kernels of TVM"
    assert f"matmuls: {kernels}" in story["compile"]
    assert "TVM alone" not in story
    assert re.search(r"planned: \S+ \wiB, of which .* TVM's plan: ", story["compile"])
    assert "1/4 of the weights each" in story["4 workers"]
    assert len(story["tokens"].split()) == 6
    assert "the same 6 tokens on 1 and 4 workers" in story["result"]
    cores = available_cores()
    rows = re.findall(r"(\d workers? on \d+ cores?) +\d+ +(\S+)x +\d+ +(\S+)x", story["speed"])
    alone = [("1 worker on 1 core", "1.00", "1.00")]
    assert rows[:1] == alone
    labels = [f"1 worker on {cores} cores"] * (cores > 1)
    labels.append(f"4 workers on {min(4, cores)} core{'s' * (cores > 1)}")
    assert [label for label, *_ in rows[1:]] == labels
    assert ("which 4 workers share" in story["speed"]) == (cores < 4)
    assert re.search(r"each of 4 workers used \d\S* .* of ipc_memory", story["memory"])
    assert "tvm-ipc explain --demo --open" in story["try next"]
    assert out.count("tvm-ipc ", out.index("try next")) == 4


def test_story_of_sequence_parallelism(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--sequence-parallel", "--workers", "2", "4"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    story = facts(out)
    assert (
        "4 workers: 6 all-gathers and 6 reduce-scatters of the prompt's rows; " in story["compile"]
    )
    assert (
        "6 all-reduces per decoding step, 6 rewritten (auto), 6 fused with the norm"
        in story["compile"]
    )
    assert "of all collectives 19 without exit barrier" in story["compile"]
    assert "1/2 of the weights and of the prompt's rows each" in story["2 workers"]
    assert "the same 6 tokens on 1, 2 and 4 workers" in story["result"]


def test_story_of_two_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        find_mpi()
    except IPCError as error:
        pytest.skip(str(error))
    options = ["--hosts", "2", "--sequence-parallel", "--overlap", "2", "--hidden", "128"]
    assert demo.main([*SMALL, *options, "--inner", "128", "--layers", "1", "--workers", "2"]) == 0
    story = facts(capfd.readouterr().out)
    assert "4 of them overlapped with matmuls" in story["compile"]
    for label in ("2 workers", "no overlap"):
        assert "on 2 nodes, 1/2 of the weights and of the prompt's rows each" in story[label]
    assert "the same 6 tokens on 1 and 2 workers" in story["result"]
    assert "WRONG" not in story["speed"]


def test_tokens_on_one_worker_on_four_and_on_two_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        find_mpi()
    except IPCError as error:
        pytest.skip(str(error))
    said = []
    for where in (("--threads",), ("--hosts", "2")):  # each has one worker beside the four
        assert demo.main([*SMALL, "--layers", "1", "--workers", "4", *where]) == 0
        story = facts(capfd.readouterr().out)
        assert story["4 workers"].startswith("on 2 nodes" if "--hosts" in where else "threads")
        assert "the same 6 tokens on 1 and 4 workers" in story["result"]
        said.append(story["tokens"])
    assert said[0] == said[1]


def test_without_mpi_nodes_are_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise IPCError("there is no mpiexec")

    monkeypatch.setattr(compare_worker_counts, "compile_model", pytest.fail)
    monkeypatch.setattr("tvm_ipc.nodes.find_mpi_installation.find_mpi", none)
    for match in ("there is no mpiexec", "OMPI_COMM_WORLD_RANK shows"):
        with pytest.raises(IPCError, match=match):
            demo.main([*SMALL, "--hosts", "2"])
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert capsys.readouterr().out == ""


def test_story_of_overlap(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--sequence-parallel", "--overlap", "2", "--inner", "128", "--hidden", "128"]
    assert demo.main([*SMALL, *options, "--workers", "2"]) == 0
    story = facts(capfd.readouterr().out)
    moved = (
        "6 all-gathers and 6 reduce-scatters, 12 of them overlapped with matmuls, of the prompt's"
    )
    assert moved in story["compile"]
    assert "the same 6 tokens on 1 and 2 workers" in story["result"]
    assert "2 workers without overlap; logits differ by at most" in story["speed"]
    assert "1/2 of the weights and of the prompt's rows each" in story["no overlap"]
    assert "WRONG" not in story["speed"]


def test_rival_that_says_other_tokens_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--sequence-parallel", "--overlap", "2", "--tokens", "2"])
    (rival,) = compare_worker_counts._variants(options)
    assert (rival.workers, rival.build.overlap) == (4, None)
    ours = generation(3, 3, second=0.5)
    for theirs, right in (
        (ours, True),
        (generation(3, 5, second=0.5), False),
        (generation(3, 3, second=0.6), False),
    ):
        assert (
            compare_worker_counts._compare_variant(Report(), options, rival, ours, theirs) == right
        )
        assert ("WRONG" in capsys.readouterr().out) != right


def busy_threads(before: dict[int, int]) -> int:
    """Return how many threads of this process and its children computed since `before`."""
    after = ticks()
    spent = [count - before.get(thread, 0) for thread, count in after.items()]
    return sum(count > sum(spent) / 8 for count in spent)


def ticks() -> dict[int, int]:
    """Return the processor time of each thread of this process and its children."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task").glob("*/children")
    processes = [own, *(int(pid) for file in children for pid in file.read_text().split())]
    found = {}
    for pid in processes:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[int(folder.name)] = int(fields[11]) + int(fields[12])
    return found


def ticks_when_idle() -> dict[int, int]:
    """Return `ticks` once no thread computes; those of TVM spin for a while after their work."""
    found = ticks()
    while True:
        time.sleep(0.2)
        before, found = found, ticks()
        if sum(found.values()) - sum(before.get(thread, 0) for thread in found) <= 1:
            return found


@pytest.mark.parametrize("threads", [(), ("--threads",)])
def test_a_worker_uses_one_core_as_printed(
    threads: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other load changes how fast a thread is, but not which threads compute."""
    cores = available_cores()
    if cores < 2:
        pytest.skip("one core has no threads to limit")
    used, generate = [], Generator.generate

    def counted(self: Generator, prompt: Sequence[int], *rest: Any) -> Generation:
        result = generate(self, prompt, 1)  # a prompt is enough work for a second thread
        before = ticks_when_idle()
        for _ in range(8):
            result = generate(self, prompt, 1)
        used.append((self.session.num_workers, busy_threads(before)))
        return result

    monkeypatch.setattr(Generator, "generate", counted)
    monkeypatch.setattr(compare_worker_counts, "_ROUNDS", 1)
    options = ["--tokens", "1", "--prompt-length", "256", "--layers", "2", *threads]
    assert demo.main(["--workers", "2", *options]) == 0
    # The first generation of each pair warms up.
    alone, on_all_cores, together = used[1::2]
    assert (alone, together) == ((1, 1), (2, 2))
    assert on_all_cores[1] > 1


@pytest.mark.parametrize("busy", [0.2, 1.4])
def test_load_of_others_is_told_before_the_table(
    busy: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(this_machine.OtherPrograms, "cores", lambda _: busy)
    assert demo.main([*SMALL, "--workers", "1", "--tokens", "2"]) == 0
    out = capfd.readouterr().out
    words = f"Other programs kept {busy} of {available_cores()} cores busy meanwhile, so the times"
    assert (words in " ".join(out.split())) == (busy > 1)
    if busy > 1:
        assert out.index("\nnote ") < out.index("\nspeed ")


def test_suggestions_fit_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "available_cores", lambda: 8)
    monkeypatch.setattr(shared_libraries, "has_nvidia_driver", lambda: False)

    def suggested(*options: str, correct: bool = True) -> str:
        compare_worker_counts._suggest(Report(), parse(options), correct)
        return capsys.readouterr().out

    assert "tvm-ipc demo --workers 8 " in suggested()
    assert "--workers 8 " not in suggested("--workers", "8").partition("run FOLDER")[0]
    assert "--layers 12" not in suggested("--layers", "12")
    assert "--device cuda" not in suggested()
    assert suggested(correct=False) == "try next   tvm-ipc doctor -v   to check this machine\n"
    monkeypatch.setattr(shared_libraries, "has_nvidia_driver", lambda: True)
    assert "tvm-ipc demo --device cuda " in suggested()
    assert "tvm-ipc bench --device cuda " in suggested("--device", "cuda")
    for options in ((), ("--workers", "64"), ("--device", "cuda")):
        assert max(map(len, suggested(*options).splitlines())) <= 80


def test_story_of_one_worker(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--workers", "1", "--tokens", "1"]) == 0
    story = facts(capfd.readouterr().out)
    assert "no all-reduces, because there is one worker" in story["compile"]
    assert story["result"] == "1 token"
    assert "memory" not in story
    assert "decode" not in story["speed"]


@pytest.mark.parametrize(
    ("dtype", "strategy", "blas"),
    [("float16", "oneshot", "--blas"), ("bfloat16", "twoshot", "--no-blas")],
)
def test_types_strategies_and_kernels(
    capfd: pytest.CaptureFixture[str], dtype: str, strategy: str, blas: str
) -> None:
    if blas == "--blas" and not installed():
        pytest.skip("OpenBLAS is not installed")
    options = [*SMALL, blas, "--workers=2", f"--dtype={dtype}", f"--strategy={strategy}"]
    assert demo.main([*options, "--threads"]) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    story = facts(out)
    assert f"rewritten ({strategy})" in story["compile"]
    assert f"matmuls: {'OpenBLAS' if blas == '--blas' else 'kernels of TVM'}" in story["compile"]
    assert "threads, 1/2 of the weights each" in story["2 workers"]
    assert (blas == "--blas") == ("TVM alone" in story)
    assert ("without OpenBLAS; logits differ" in story["speed"]) == (blas == "--blas")
    assert "WRONG" not in story["result"] + story["speed"]


def verdict(
    capsys: pytest.CaptureFixture[str], config: Config, **changes: Generation
) -> tuple[bool, str]:
    said = {1: changes["one"], 2: changes["two"]}
    right = compare_worker_counts._compare(Report(), config, said)
    return right, capsys.readouterr().out


def generation(*tokens: int, second: float = 1.0) -> Generation:
    """Two good tokens, 3 and 5, and how good the second is."""
    logits = np.zeros((2, 8), "float32")
    logits[:, 3], logits[:, 5] = 1.0, second
    return Generation([list(tokens)] * 2, logits, 1.0, 1.0)


def test_other_tokens_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    one = generation(3, 3, second=0.5)
    right, out = verdict(capsys, Config(), one=one, two=generation(3, 5, second=0.5))
    assert not right
    assert "WRONG: 2 workers differ from 1 worker from token 2 on" in out


def test_two_tokens_that_are_equally_good_are_wrong_only_in_float32(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = generation(3, 3, second=0.999), generation(3, 5, second=1.0)
    assert not verdict(capsys, Config(), one=one, two=two)[0]
    right, out = verdict(capsys, Config(dtype="bfloat16"), one=one, two=two)
    assert right
    out = " ".join(out.split())
    assert "the logits of both tokens are 1.0e-03 apart, within the precision of bfloat16" in out


def test_ranks_that_disagree_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    one = generation(3, 3)
    two = replace(one, tokens=[[3, 3], [3, 4]])
    right, out = verdict(capsys, Config(), one=one, two=two)
    assert not right
    assert "WRONG: the 2 workers disagree with each other" in out


def test_right_tokens_of_wrong_logits_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = generation(3, 3, second=0.5), generation(3, 3, second=0.6)
    assert not verdict(capsys, Config(), one=one, two=two)[0]
    not_a_number = replace(one, logits=one.logits * np.nan)
    assert not verdict(capsys, Config(), one=one, two=not_a_number)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--workers 0", "--workers has 0; it must be 1 to 64"),
        ("--workers 2 65", "--workers has 65; it must be 1 to 64"),
        ("--workers two", "--workers: invalid int value"),
        (
            "--workers 3 --heads 8 --hidden 512",
            "--heads 8 cannot be split evenly over 3 workers; use --heads 9",
        ),
        (
            "--workers 2 --kv-heads 1",
            "--kv-heads 1 cannot be split evenly over 2 workers; use --kv-heads 2",
        ),
        ("--hidden 100 --heads 3", "--hidden 100 cannot be split evenly over 3 heads"),
        ("--inner 7", "--inner 7 cannot be split evenly over 2 workers; use --inner 8"),
        ("--hidden -4", "--hidden is -4; it must be at least 1"),
        ("--layers -1", "--layers is -1; it must be at least 1"),
        ("--tokens 0", "--tokens is 0; it must be at least 1"),
        ("--prompt-length 0", "--prompt-length is 0; it must be at least 1"),
        ("--context 100", "--context 100 is too short for a prompt of 128 tokens and 32 new ones"),
        ("--overlap 2", "--overlap needs --sequence-parallel"),
        ("--workers 2 --hosts 3", "--hosts 3 has 3 nodes, and --workers is 2; give at least one"),
        ("--threads --hosts 2", "--threads is for workers of one machine, and --hosts for"),
        ("--sequence-parallel --overlap 0", "--overlap is 0; it must be 1 to 64"),
        ("--seed -1", "--seed is -1; it must be at least 0"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--strategy best", "--strategy: invalid choice: 'best'"),
        ("--work 2", "unrecognized arguments: --work"),
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


def test_default_sizes_suit_the_workers() -> None:
    for workers in range(1, 65):
        options = parse(["--workers", str(workers)])
        options.config.check_workers(workers)
        assert options.config.hidden < 2048
        assert options.workers == tuple(sorted({1, workers}))
    assert parse(["--hidden", "1024"]).config.heads == 16


def test_a_model_that_cannot_fit_is_refused() -> None:
    result = command("--hidden", "204800")
    assert result.returncode == 1
    assert re.search(r"needs about \S+ TiB of memory, but the machine has", result.stderr)
    assert result.stderr.count("\n") == 1


def test_without_a_compiler_the_demo_says_what_to_install() -> None:
    result = command(PATH="", CXX="", CC="")
    assert result.returncode == 1
    assert "install g++ or clang" in result.stderr


def test_help_names_every_option() -> None:
    text = command("--help").stdout
    for name in ("workers", "layers", "hidden", "heads", "kv-heads", "inner", "vocabulary"):
        assert f"--{name}" in text
    for name in ("context", "prompt-length", "tokens", "dtype", "strategy", "threads", "blas"):
        assert f"--{name}" in text
    assert "--sequence-parallel" in text
    assert "--overlap" in text


def test_bar_is_drawn_on_a_terminal_and_leaves_nothing() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_ipc", "demo", *SMALL, "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    drawn = b""
    with contextlib.suppress(OSError):  # nobody has the terminal open any more
        while part := os.read(controller, 1 << 16):
            drawn += part
    out, _ = process.communicate(timeout=60)
    os.close(controller)
    assert process.returncode == 0
    assert re.search(rb"\r\x1b\[K\[\.+\] +0% compiling for 1 worker: StaticPlanBlock", drawn)
    assert re.search(rb"\r\x1b\[K\[#+\.+\] +\d+% 1 worker: ", drawn)
    assert drawn.endswith(b"\r\x1b[K")
    assert b"\x1b" not in out


def test_interrupt_ends_everything_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_ipc", "demo", *SMALL, "--workers", "2", "--tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("weights"):
        assert process.poll() is None
    time.sleep(1.5)  # somewhere in the start or the tokens of a session
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
