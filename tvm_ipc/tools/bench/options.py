# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc bench` and `tvm-ipc bench overlap`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tvm_ipc.calibration import COLLECTIVES
from tvm_ipc.packed_functions import BACKENDS, MAX_WORKERS
from tvm_ipc.tools.options import (
    OptionError,
    Parser,
    amount,
    existing_file,
    file_option,
    number,
    option,
    switch,
    writable_file,
)

_OVERLAP: Final = "overlap"


def _plot_file(flag: str, path: Path) -> None:
    writable_file(flag, path)
    if path.suffix.lower() != ".svg":
        raise OptionError(f"{flag} is {str(path)!r}; it must end in .svg")


def _workers(group: str | None = None) -> Any:
    text = f"number of workers, 2 to {MAX_WORKERS}"
    return number(text, 2, least=2, most=MAX_WORKERS, group=group)


def _real_time() -> Any:
    return switch("run with real-time priority; needs root or CAP_SYS_NICE")


def _bandwidth() -> Any:
    return option(
        "bandwidth of an emulated link into each worker, in bytes per second (default: no link)",
        0.0,
        type=float,
        metavar="B",
        check=amount,
    )


def _latency() -> Any:
    text = "latency of the emulated link, in seconds (default: 0)"
    return option(text, 0.0, type=float, metavar="S", check=amount)


@dataclass(frozen=True)
class Options:
    """The options of a measurement and of a calibration."""

    device: str = option(
        "device that the workers compute on",
        "cpu",
        group="workers",
        choices=tuple(dict.fromkeys(BACKENDS.values())),
    )
    workers: int = _workers()
    real_time: bool = _real_time()
    json: Path | None = file_option(
        "save the measurement as JSON", group="results", check=writable_file
    )
    plot: Path | None = file_option("save a plot as SVG", check=_plot_file)
    compare: Path | None = file_option(
        "print the speedup over this saved measurement", check=existing_file
    )
    load_from: Path | None = file_option(
        "print this saved measurement instead of measuring", flag="--from", check=existing_file
    )
    calibrate: bool = switch(
        "measure a calibration for the cost model instead", group="calibration"
    )
    bandwidth: float = _bandwidth()
    latency: float = _latency()
    out: Path = file_option(
        "file to save the calibration in", Path("tvm-ipc-calibration.json"), check=writable_file
    )
    #: The names of the options that the user specified; a saved run specifies the others.
    explicit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OverlapOptions:
    """The options of a comparison with and without overlap."""

    kind: str = option(
        "collective of the program", "allgather", group="program", choices=COLLECTIVES
    )
    rows: int = number("number of rows of each worker", 256)
    inner: int = number("inner extent of the matmul", 512)
    columns: int = number("number of columns of the result", 512)
    rounds: int = number("number of times that each variant is timed", 9)
    blas: bool | None = option(
        "run the matmul with OpenBLAS, or with kernels of TVM (default: OpenBLAS if it is "
        "installed)",
        action=argparse.BooleanOptionalAction,
    )
    workers: int = _workers("workers")
    real_time: bool = _real_time()
    bandwidth: float = _bandwidth()
    latency: float = _latency()
    calibration: Path | None = file_option(
        "calibration whose link is emulated and whose predictions and choice are printed",
        group="cost model and output",
        check=existing_file,
    )
    trace: Path | None = file_option(
        "write a timeline of each worker for Perfetto", check=writable_file
    )


def parser() -> Parser[Options]:
    """Return the parser of `tvm-ipc bench`."""
    return Parser(
        Options,
        "tvm-ipc bench",
        description="Measure collectives by size and calls of workers on this machine. With "
        "--calibrate, measure the times that the cost model of overlap needs.",
        epilog="`tvm-ipc bench overlap --help` describes the comparison of programs with and "
        "without overlap. Exit code: 0 success, 1 failure, 2 invalid options.",
    )


def overlap_parser() -> Parser[OverlapOptions]:
    """Return the parser of `tvm-ipc bench overlap`."""
    return Parser(
        OverlapOptions,
        "tvm-ipc bench overlap",
        description="Time a collective and its matmul without overlap and in chunks, and report "
        "the share of the communication that each variant hides.",
        epilog="Exit code: 0 success, 1 failure, 2 invalid options.",
    )


def parse(argv: Sequence[str]) -> Options | OverlapOptions:
    """Read the command line; `--help` prints and exits."""
    if argv and argv[0] == _OVERLAP:
        values = overlap_parser().specified(argv[1:])
        for name in ("workers", "bandwidth", "latency"):
            if name in values and "calibration" in values:
                raise OptionError(
                    f"--{name} is {values[name]}, but --calibration specifies it; leave it out"
                )
        return OverlapOptions(**values)
    values = parser().specified(argv)
    options = Options(**values, explicit=frozenset(values))
    if options.calibrate:
        _refuse(values, ("json", "plot", "compare", "load_from"), "conflicts with --calibrate")
    else:
        _refuse(values, ("out", "bandwidth", "latency"), "needs --calibrate")
    if options.load_from is not None:
        problem = "is for a new measurement and conflicts with --from"
        _refuse(values, ("device", "workers", "real_time"), problem)
    if options.device != "cpu" and (options.bandwidth or options.latency):
        raise OptionError(
            "--bandwidth and --latency need --device cpu; links between GPUs are not emulated"
        )
    return options


def _refuse(values: dict[str, Any], names: Sequence[str], problem: str) -> None:
    """Raise an `OptionError` if one of some options is specified."""
    for name in names:
        if name in values:
            flag = "--from" if name == "load_from" else f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} {problem}")
