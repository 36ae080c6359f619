# SPDX-License-Identifier: Apache-2.0
"""Calibrations: times between the sizes that were measured, and files that must be refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made_up_calibration import LINE, calibration
from tvm_ipc.calibration import VERSION, Calibration, Times
from tvm_ipc.errors import IPCError

CUBE = Times(((1, 1000), (1, 1000), (1, 1000)), tuple(1e-6 * 10 ** (3 * n) for n in range(8)))
GIVEN = calibration(
    backend="memory", bandwidth=1e9, latency=1e-5, wake=1e-6, matmul=CUBE, hide=2e-6
)


def test_times_between_sizes_that_were_measured() -> None:
    table = Times(((10, 100), (1, 100)), (1.0, 4.0, 100.0, 400.0))
    assert table.at(10, 1) == pytest.approx(1.0)
    assert table.at(100, 100) == pytest.approx(400.0)
    assert table.at(math.sqrt(1000), 1) == pytest.approx(10.0)  # halfway, of logarithms
    assert table.at(10, 10) == pytest.approx(2.0)
    assert table.at(math.sqrt(1000), 10) == pytest.approx(20.0)
    assert table.at(300, 100) == pytest.approx(1200.0)  # beyond the grid like the size
    assert table.at(200, 1000) == pytest.approx(8000.0)
    assert table.at(1, 1) == pytest.approx(1.0)  # no less than for the least size
    assert table.at(0, 50) == 0.0
    assert Times(((8,),), (2.0,)).at(8) == pytest.approx(2.0)
    assert Times(((8,),), (2.0,)).at(16) == pytest.approx(4.0)


def test_more_never_takes_less_time() -> None:
    draw = random.Random(0)
    axes = ((1, 7, 64, 500), (1, 30), (2, 3, 900))
    table = Times.measured(axes, lambda *sizes: draw.uniform(0.1, 10) * math.prod(sizes))
    for _ in range(2000):
        sizes = [draw.uniform(0.5, 2 * axis[-1]) for axis in axes]
        more = [size * draw.choice((1, 1.01, 2)) for size in sizes]
        assert table.at(*more) >= table.at(*sizes) * (1 - 1e-12)


def test_noise_of_a_measurement_does_not_make_more_take_less() -> None:
    times = {(1, 1): 3.0, (1, 2): 2.0, (2, 1): 1.0, (2, 2): 4.0}
    table = Times.measured(((1, 2), (1, 2)), lambda *sizes: times[sizes])
    assert table.seconds == (3.0, 3.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("axes", "seconds", "message"),
    [
        ((), (), "at least one size"),
        (((),), (), "at least one size"),
        (((2, 1),), (1.0, 2.0), r"rise from 1 or more, unlike \[2, 1\]"),
        (((0, 1),), (1.0, 2.0), "rise from 1 or more"),
        (((1, 2),), (1.0,), "a table of 2 points has 1 times"),
        (((1, 2),), (1.0, 0.0), "above 0"),
        (((1, 2),), (1.0, math.nan), "above 0"),
        (((1, 2),), (2.0, 1.0), "that of the larger size is smaller"),
    ],
)
def test_tables_that_are_refused(axes: Any, seconds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Times(axes, seconds)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("machine", "", ValueError, "machine is the name of a machine, not ''"),
        ("backend", 3, TypeError, "backend is the name of a backend, not 3"),
        ("workers", 0, ValueError, "workers is a number of workers, 1 to 64, not 0"),
        ("bandwidth", -1, ValueError, "bandwidth is a number, 0 or more, not -1"),
        ("latency", math.nan, ValueError, "latency is a number, 0 or more, not nan"),
        ("chunk", "1", TypeError, "chunk is a number, 0 or more, not '1'"),
        ("hide", True, TypeError, "hide is a number, 0 or more, not True"),
        ("noise", math.inf, ValueError, "noise is a number, 0 or more, not inf"),
        ("matmul", LINE, ValueError, "matmul is a table of times along 3 axes"),
        ("matmul", None, TypeError, "matmul is a table of times along 3 axes, not None"),
        ("blas_matmul", 3, TypeError, "blas_matmul is a table of times along 3 axes, not 3"),
        ("reduce", CUBE, ValueError, "reduce is a table of times along 1 axis"),
        ("collectives", {}, ValueError, "collectives is the times of allgather"),
        ("collectives", LINE, TypeError, "collectives is times by kind"),
    ],
)
def test_values_that_are_refused(
    field: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"Calibration: {re.escape(message)}"):
        dataclasses.replace(GIVEN, **{field: value})


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    for given in (GIVEN, dataclasses.replace(GIVEN, blas_matmul=CUBE, bandwidth=0)):
        given.save(tmp_path / "here.json")
        assert Calibration.load(tmp_path / "here.json", workers=2, backend="memory") == given


@pytest.mark.parametrize(
    ("was", "asked", "message"),
    [
        ({"machine": "a toaster, 1 core"}, {}, "measured on a toaster, 1 core, and this is "),
        ({}, {"workers": 3}, "measured for 2 workers, and this is 3 workers"),
        ({"workers": 1}, {"workers": 2}, "measured for 1 worker, and this is 2 workers"),
        ({}, {"backend": "wire"}, "measured with the backend memory, and this is wire"),
    ],
)
def test_a_stale_file(
    tmp_path: Path, was: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    path = tmp_path / "here.json"
    dataclasses.replace(GIVEN, **was).save(path)
    with pytest.raises(IPCError, match=f"{path} is stale: it was {re.escape(message)}") as raised:
        Calibration.load(path, **asked)
    assert str(raised.value).endswith("measure again with `tvm-ipc bench --calibrate`")


def test_programs_for_another_machine_take_its_calibration(tmp_path: Path) -> None:
    given = dataclasses.replace(GIVEN, machine="a toaster, 1 core")
    given.save(tmp_path / "there.json")
    assert Calibration.load(tmp_path / "there.json", any_machine=True) == given


def broken(change: Callable[[dict[str, Any]], Any]) -> str:
    data = {"version": VERSION, **dataclasses.asdict(GIVEN)}
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "broken: it is no JSON"),
        ("\x00", "broken: it is no JSON"),
        ("[" * 100000, "broken: it is no JSON"),
        ("[1]", "broken: it holds a list"),
        ("{}", f"stale: it has version None, and this is tvm-ipc with version {VERSION}"),
        (broken(lambda d: d.update(version=99)), "stale: it has version 99"),
        (broken(lambda d: d.pop("hide")), "broken: it lacks 'hide'"),
        (broken(lambda d: d.update(more=1)), "broken: it also has 'more'"),
        (broken(lambda d: d.update(matmul=3)), "broken: a table of times has 'axes' and 'seconds'"),
        (broken(lambda d: d.update(matmul=None)), "broken: a table of times has 'axes'"),
        (broken(lambda d: d["copy"].update(axes=3)), "broken: a list was expected, not 3"),
        (broken(lambda d: d["copy"].update(axes=[["a"]])), "broken: axes is sizes, 1 or more each"),
        (broken(lambda d: d["copy"].update(seconds=["a"])), "broken: seconds is times above 0"),
        (
            broken(lambda d: d["copy"].update(seconds=[1])),
            "broken: a table of 2 points has 1 times",
        ),
        (broken(lambda d: d.update(collectives=[])), "broken: 'collectives' is no table"),
        (broken(lambda d: d["collectives"].pop("allgather")), "broken: Calibration: collectives"),
        (broken(lambda d: d.update(workers="2")), "broken: Calibration: workers"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "here.json"
    path.write_text(text)
    with pytest.raises(IPCError, match=re.escape(f"the calibration {path} is {message}")):
        Calibration.load(path)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(IPCError, match=r"cannot read the calibration .*none: No such file"):
        Calibration.load(tmp_path / "none")
    with pytest.raises(IPCError, match=r"cannot read the calibration .*: Is a directory"):
        Calibration.load(tmp_path)
    with pytest.raises(IPCError, match=r"cannot write the calibration .*: Is a directory"):
        GIVEN.save(tmp_path)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(IPCError, match="broken: it is no text"):
        Calibration.load(tmp_path / "picture")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"path": 3}, TypeError, "path is a file with a calibration, not 3"),
        ({"path": ""}, ValueError, "path is a file with a calibration, not ''"),
        ({"workers": 65}, ValueError, "workers is a number of workers, 1 to 64, or None, not 65"),
        ({"workers": "2"}, TypeError, "workers is a number of workers, 1 to 64, or None, not '2'"),
        ({"backend": ""}, ValueError, "backend is a backend or None, not ''"),
        ({"backend": 3}, TypeError, "backend is a backend or None, not 3"),
        ({"any_machine": 1}, TypeError, "any_machine is True or False, not 1"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    GIVEN.save(tmp_path / "here.json")
    with pytest.raises(error, match=f"Calibration.load: {re.escape(message)}"):
        Calibration.load(**{"path": tmp_path / "here.json", **given})
    with pytest.raises(TypeError, match=r"Calibration\.save: path is a file to write, not 3"):
        GIVEN.save(3)  # type: ignore[arg-type]
