# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc bench` and `tvm-ipc bench overlap`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tvm_ipc.calibration import COLLECTIVES
from tvm_ipc.packed_functions import BACKENDS, MAX_WORKERS
from tvm_ipc.tools import terminal

_OVERLAP: Final = "overlap"
#: Options that a calibration specifies, so that they conflict with --calibration.
_SPECIFIED_BY_CALIBRATION: Final = ("workers", "bandwidth", "latency")
#: Options that need `--calibrate`, and options that conflict with it.
_NEEDS_CALIBRATE: Final = {"--out": "out", "--bandwidth": "bandwidth", "--latency": "latency"}
_CONFLICTS_WITH_CALIBRATE: Final = {
    "--json": "json",
    "--plot": "plot",
    "--compare": "compare",
    "--from": "load_from",
}


class OptionError(Exception):
    """Raised for invalid options, with a message of one line."""


@dataclass(frozen=True)
class MeasureOptions:
    """The options of a measurement: what to measure, compare with, and write."""

    workers: int = 2
    device: str = "cpu"
    real_time: bool = False
    json: Path | None = None
    plot: Path | None = None
    compare: Path | None = None
    load_from: Path | None = None  #: a saved run to print instead of measuring
    #: Which of `workers` and `device` the user specified; a saved run specifies the others.
    explicit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of a calibration."""

    workers: int = 2
    bandwidth: float = 0.0
    latency: float = 0.0
    real_time: bool = False
    out: Path = Path("tvm-ipc-calibration.json")
    device: str = "cpu"


@dataclass(frozen=True)
class OverlapOptions:
    """The options of a comparison with and without overlap."""

    workers: int = 2
    bandwidth: float = 0.0
    latency: float = 0.0
    real_time: bool = False
    calibration: Path | None = None
    kind: str = "allgather"
    rows: int = 256  #: per worker
    inner: int = 512
    columns: int = 512
    rounds: int = 9
    blas: bool | None = None  #: None: if it is installed
    trace: Path | None = None


def parse(argv: Sequence[str]) -> MeasureOptions | CalibrateOptions | OverlapOptions:
    """Read the command line; `--help` prints and exits."""
    if argv and argv[0] == _OVERLAP:
        return _overlap(_overlap_parser().parse_args(argv[1:]))
    arguments = _parser().parse_args(argv)
    invalid = _CONFLICTS_WITH_CALIBRATE if arguments.calibrate else _NEEDS_CALIBRATE
    for option, name in invalid.items():
        if getattr(arguments, name) is not None:
            problem = "conflicts with" if arguments.calibrate else "needs"
            raise OptionError(f"{option} {problem} --calibrate")
    return _calibrate(arguments) if arguments.calibrate else _measure(arguments)


def _measure(arguments: argparse.Namespace) -> MeasureOptions:
    default = MeasureOptions()
    explicit = frozenset(
        name for name in ("workers", "device") if getattr(arguments, name) is not None
    )
    for name in ("workers", "device"):
        if name not in explicit:
            setattr(arguments, name, getattr(default, name))
    _check_workers(arguments)
    for option, name in (("--compare", "compare"), ("--from", "load_from")):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            raise OptionError(
                f"{option} is {str(path)!r}, which is not a file; specify an existing file"
            )
    if arguments.load_from is not None:
        for name in (*sorted(explicit), *(["real_time"] if arguments.real_time else [])):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is for a new measurement and conflicts with --from")
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None:
            _check_file(option, path)
    if arguments.plot is not None and arguments.plot.suffix.lower() != ".svg":
        raise OptionError(f"--plot is {str(arguments.plot)!r}; it must end in .svg")
    return MeasureOptions(
        arguments.workers,
        arguments.device,
        arguments.real_time,
        arguments.json,
        arguments.plot,
        arguments.compare,
        arguments.load_from,
        explicit,
    )


def _calibrate(arguments: argparse.Namespace) -> CalibrateOptions:
    default = CalibrateOptions()
    for name in ("workers", "device", "bandwidth", "latency", "out"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(default, name))
    _check_numbers(arguments)
    _check_file("--out", arguments.out)
    if arguments.device != "cpu" and (arguments.bandwidth or arguments.latency):
        raise OptionError(
            "--bandwidth and --latency need --device cpu; links between GPUs are not emulated"
        )
    return CalibrateOptions(
        arguments.workers,
        arguments.bandwidth,
        arguments.latency,
        arguments.real_time,
        arguments.out,
        arguments.device,
    )


def _overlap(arguments: argparse.Namespace) -> OverlapOptions:
    default = OverlapOptions()
    for name in _SPECIFIED_BY_CALIBRATION:
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(default, name))
        elif arguments.calibration is not None:
            raise OptionError(
                f"--{name} is {getattr(arguments, name)}, but --calibration specifies it; "
                "leave it out"
            )
    _check_numbers(arguments)
    for name in ("rows", "inner", "columns", "rounds"):
        if getattr(arguments, name) < 1:
            raise OptionError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.calibration is not None and not arguments.calibration.is_file():
        raise OptionError(
            f"--calibration is {str(arguments.calibration)!r}, which is not a file; "
            "specify an existing file"
        )
    if arguments.trace is not None:
        _check_file("--trace", arguments.trace)
    return OverlapOptions(**vars(arguments))


def _check_workers(arguments: argparse.Namespace) -> None:
    if not 2 <= arguments.workers <= MAX_WORKERS:
        raise OptionError(f"--workers is {arguments.workers}; it must be 2 to {MAX_WORKERS}")


def _check_numbers(arguments: argparse.Namespace) -> None:
    _check_workers(arguments)
    for name in ("bandwidth", "latency"):
        value = getattr(arguments, name)
        if not 0 <= value < math.inf:
            raise OptionError(f"--{name} is {value}; it must be a number, 0 or more")


def _check_file(option: str, path: Path) -> None:
    """Raise if a file cannot be written, before minutes are spent on its content."""
    folder = path.parent
    if not path.name or path.is_dir():
        raise OptionError(f"{option} is {str(path)!r}; it must be the name of a file to write")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"{option} is {str(path)!r}; {folder} is not a writable folder")


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError` instead of exiting."""
        raise OptionError(message)


def _add_link(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--bandwidth",
        type=float,
        metavar="B",
        help="bandwidth of an emulated link into each worker, in bytes per second (default: no "
        "link)",
    )
    group.add_argument(
        "--latency",
        type=float,
        metavar="S",
        help="latency of the emulated link, in seconds (default: 0)",
    )


def _add_workers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"number of workers, 2 to {MAX_WORKERS} (default: 2)",
    )
    group.add_argument(
        "--real-time",
        action="store_true",
        help="run with real-time priority; needs root or CAP_SYS_NICE",
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "tvm-ipc bench",
        description="Measure collectives by size and calls of workers on this machine. With "
        "--calibrate, measure the times that the cost model of overlap needs.",
        epilog="`tvm-ipc bench overlap --help` describes the comparison of programs with and "
        "without overlap. Exit code: 0 success, 1 failure, 2 invalid options.",
        allow_abbrev=False,
    )
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--device",
        choices=tuple(dict.fromkeys(BACKENDS.values())),
        help="device that the workers compute on (default: cpu)",
    )
    _add_workers(workers)
    results = parser.add_argument_group("results")
    for option, name, text in (
        ("--json", "json", "save the measurement as JSON"),
        ("--plot", "plot", "save a plot as SVG"),
        ("--compare", "compare", "print the speedup over this saved measurement"),
        ("--from", "load_from", "print this saved measurement instead of measuring"),
    ):
        results.add_argument(option, dest=name, type=Path, metavar="FILE", help=text)
    calibration = parser.add_argument_group("calibration")
    calibration.add_argument(
        "--calibrate",
        action="store_true",
        help="measure a calibration for the cost model instead",
    )
    _add_link(calibration)
    calibration.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to save the calibration in (default: {CalibrateOptions().out})",
    )
    return parser


def _overlap_parser() -> argparse.ArgumentParser:
    default = OverlapOptions()
    parser = _Parser(
        "tvm-ipc bench overlap",
        description="Time a collective and its matmul without overlap and in chunks, and report "
        "the share of the communication that each variant hides.",
        epilog="Exit code: 0 success, 1 failure, 2 invalid options.",
        allow_abbrev=False,
    )
    program = parser.add_argument_group("program")
    program.add_argument(
        "--kind",
        choices=COLLECTIVES,
        default=default.kind,
        help=f"collective of the program (default: {default.kind})",
    )
    for name, text in (
        ("rows", "number of rows of each worker"),
        ("inner", "inner extent of the matmul"),
        ("columns", "number of columns of the result"),
        ("rounds", "number of times that each variant is timed"),
    ):
        value = getattr(default, name)
        program.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
        )
    program.add_argument(
        "--blas",
        action=argparse.BooleanOptionalAction,
        help="run the matmul with OpenBLAS, or with kernels of TVM (default: OpenBLAS if it is "
        "installed)",
    )
    workers = parser.add_argument_group("workers")
    _add_workers(workers)
    _add_link(workers)
    results = parser.add_argument_group("cost model and output")
    results.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="calibration whose link is emulated and whose predictions and choice are printed",
    )
    results.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a timeline of each worker for Perfetto",
    )
    return parser
