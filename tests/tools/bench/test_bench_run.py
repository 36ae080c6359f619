# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc bench` without --calibrate: a measurement is shown, saved, drawn and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tvm_ipc.tools import terminal
from tvm_ipc.tools.bench import collective_times, plot_svg, result_file
from tvm_ipc.tools.bench.result_file import Run
from tvm_ipc.tools.command_line import main
from tvm_ipc.tools.format import message_size_text, time_text

ABOUT = {"machine": "A & B <1>, 2 cores", "tvm_ipc": "0.1.0", "backend": "shm"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("bench") / "here.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_times, "SIZES", (64, 4096))
        patch.setattr(collective_times, "_SESSIONS", 2)
        patch.setattr(collective_times, "_ROUNDS", 2)
        patch.setattr(collective_times, "_MEASUREMENT_SECONDS", 1e-5)
        drawn = path.with_suffix(".svg")
        assert main(["bench", "--workers", "3", "--json", str(path), "--plot", str(drawn)]) == 0
    yield path


def saved(path: Path, factor: float = 1.0, **changes: Any) -> Path:
    """A made-up measurement: its times are `factor` as long."""
    times = {
        (case, size): tuple(factor * size * (1 + 0.01 * k) * 1e-9 for k in range(9))
        for case in (collective_times.COPIED, "all-reduce")
        for size in (1024, 65536)
    }
    times["start a session", 0] = (0.5 * factor, 0.51 * factor)
    dataclasses.replace(Run(2, "cpu", ABOUT, times), **changes).save(path)
    return path


def test_a_measurement_has_all_cases_and_says_where_it_was(measured: Path) -> None:
    found = result_file.load(measured)
    assert (found.workers, found.device) == (3, "cpu")
    assert found.sizes() == [64, 4096]
    assert found.cases()[0] == collective_times.COPIED
    assert {len(times) for (_, size), times in found.times.items() if size} == {4}
    assert all(found.at(case, size) for case in found.cases() for size in found.sizes())
    assert len(found.fixed()) == 5
    assert {"machine", "tvm_ipc", "apache-tvm", "apache-tvm-ffi", "backend"} <= set(found.about)


def test_a_saved_run_is_shown_again(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from", str(measured)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 workers, cpu: ")
    assert re.search(r"^64 B( +[\d.]+ .?s){5}$", out, re.MULTILINE)
    assert err == ""
    assert max(map(len, out.splitlines()[1:])) <= terminal.WIDTH


def test_a_comparison_says_what_is_faster_and_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = saved(tmp_path / "now.json")
    then = saved(tmp_path / "then.json", 2.0, about={**ABOUT, "tvm_ipc": "0.0.9"})
    picture = tmp_path / "both.svg"
    given = ["--from", str(now), "--compare", str(then), "--plot", str(picture)]
    assert main(["bench", *given]) == 0
    _, _, out = capsys.readouterr().out.partition("Speedup over")
    assert re.search(r"^64 KB +2\.00 +2\.00$", out, re.MULTILINE)
    assert re.search(r"^all sizes +2\.00 +2\.00$", out, re.MULTILINE)
    assert re.search(r"^start a session +2\.00$", out, re.MULTILINE)
    assert "tvm_ipc: 0.0.9 then, 0.1.0 now" in out
    assert "machine:" not in out
    assert "speedup over then.json" in picture.read_text()
    same = saved(tmp_path / "same.json", 1.02)
    assert main(["bench", "--from", str(now), "--compare", str(same)]) == 0
    _, _, out = capsys.readouterr().out.partition("Speedup over")
    assert re.search(r"^1 KB +~1\.02 +~1\.02$", out, re.MULTILINE)
    assert "The machine and all versions are the same." in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# words", "is not a measurement: it is not JSON; measure again"),
        ("[1]", "is not a measurement, but other JSON; measure again"),
        ('{"matmul": {}, "version": 1}', "is not a measurement, but a calibration; measure again"),
        (
            '{"tvm_ipc_bench": 9}',
            "has format version 9, and this version of tvm_ipc reads version 1",
        ),
        ('{"tvm_ipc_bench": 1}', "is damaged: KeyError('workers')"),
        ("WORKERS", "is damaged: ValueError('workers is 1')"),
        ("SECONDS", "is damaged: ValueError(\"seconds of 'copy' are [0]\")"),
        ("\udcff", "cannot read the measurement|is not a measurement: it is not JSON"),
    ],
)
def test_files_that_are_no_measurements_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "run.json")
    whole = json.loads(path.read_text())
    if text == "WORKERS":
        text = json.dumps({**whole, "workers": 1})
    elif text == "SECONDS":
        text = json.dumps({**whole, "times": [{"case": "copy", "bytes": 4, "seconds": [0]}]})
    path.write_bytes(text.encode(errors="surrogateescape"))
    for option in ("--from", "--compare"):
        assert main(["bench", option, str(path)]) == 1
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert any(part in err for part in message.split("|")), err


def test_runs_with_other_workers_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    then = saved(tmp_path / "then.json", workers=4)
    now = saved(tmp_path / "now.json")
    for given in (["--from", str(now)], ["--workers", "2"]):
        assert main(["bench", *given, "--compare", str(then)]) == 1
        assert "was measured with 4 workers on cpu, and this run with 2" in capsys.readouterr().err


def test_a_comparison_measures_as_the_saved_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = saved(tmp_path / "then.json", workers=4)
    asked = []

    def measure(workers: int, device: str, _tell: object) -> Run:
        asked.append((workers, device))
        return result_file.load(then)

    monkeypatch.setattr(collective_times, "measure", measure)
    assert main(["bench", "--compare", str(then)]) == 0
    assert asked == [(4, "cpu")]


def test_progress_is_for_terminals(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_workers: int, _device: str, tell: Any) -> Run:
        for share in (0.0, 0.5):
            tell(share, "measuring")
        return result_file.load(measured)

    monkeypatch.setattr(collective_times, "measure", measure)
    assert main(["bench"]) == 0
    assert capsys.readouterr().err == ""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr("sys.stderr", screen)
        assert main(["bench"]) == 0
    shown = ""
    with contextlib.suppress(OSError):  # which says that the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece.decode()
    os.close(ours)
    assert "50% measuring" in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize("compared", [False, True])
def test_a_picture_names_sizes_and_times_and_has_no_empty_panel(
    compared: bool, tmp_path: Path
) -> None:
    now, then = (result_file.load(saved(tmp_path / f"{f}.json", f)) for f in (1.0, 4.0))
    text = plot_svg.draw(now, then if compared else None, "old <1>.json")
    root = ElementTree.fromstring(text)
    said = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert said.count("64 KB") == 2
    assert {"1 µs", "100 µs", "1x", "A & B <1>, 2 cores"} <= set(said)
    assert ("speedup over old <1>.json" in said) is compared
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == (4 if compared else 3)
    places = [float(n) for one in lines for n in re.findall(r"[\d.]+", one.get("points", ""))]
    assert min(places) > 0
    assert max(places) < float(root.get("height", 0))
    # A copy alone has nothing to be compared with, and gets no second panel.
    only = dataclasses.replace(now, times={k: v for k, v in now.times.items() if k[0] == "copy"})
    assert plot_svg.draw(only, None, "").count("1 KB</text>") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-7, "0.12 µs"),
        (9.999e-6, "10.0 µs"),
        (9.9999e-4, "1.00 ms"),
        (0.0456, "45.6 ms"),
        (12.34, "12.3 s"),
    ],
)
def test_times_have_three_digits_and_their_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_sizes_have_their_unit() -> None:
    sizes = [message_size_text(n) for n in (64, 1024, 1536, 65536, 16 << 20)]
    assert sizes == ["64 B", "1 KB", "1.5 KB", "64 KB", "16 MB"]
