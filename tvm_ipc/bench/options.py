# SPDX-License-Identifier: Apache-2.0
"""The command line of `tvm-ipc bench`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tvm_ipc import terminal
from tvm_ipc.calibration import COLLECTIVES
from tvm_ipc.contract import BACKENDS, MAX_WORKERS

_OVERLAP: Final = "overlap"
#: Numbers of an option that may not be given, because a calibration says them.
_OF_CALIBRATION: Final = ("workers", "bandwidth", "latency")
#: Options that say something with `--calibrate` alone, and those that say nothing with it.
_OF_CALIBRATING: Final = {"--out": "out", "--bandwidth": "bandwidth", "--latency": "latency"}
_OF_MEASUREMENTS: Final = {
    "--json": "json",
    "--plot": "plot",
    "--compare": "compare",
    "--from": "shown",
}


class OptionError(Exception):
    """The options make no sense; the message is one line."""


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure or read, what to compare it with, and where to write it."""

    workers: int = 2
    device: str = "cpu"
    real_time: bool = False
    json: Path | None = None
    plot: Path | None = None
    compare: Path | None = None
    shown: Path | None = None  #: a saved run, instead of a measurement
    #: Of `workers` and `device`, what was asked for in words; a saved run may say the rest.
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CalibrateOptions:
    """What to measure, and where to write it."""

    workers: int = 2
    bandwidth: float = 0.0
    latency: float = 0.0
    real_time: bool = False
    out: Path = Path("tvm-ipc-calibration.json")
    device: str = "cpu"


@dataclass(frozen=True)
class OverlapOptions:
    """What to compare."""

    workers: int = 2
    bandwidth: float = 0.0
    latency: float = 0.0
    real_time: bool = False
    calibration: Path | None = None
    kind: str = "allgather"
    rows: int = 256  #: of a worker
    inner: int = 512
    columns: int = 512
    rounds: int = 9
    blas: bool | None = None  #: None: where it is installed
    trace: Path | None = None


def parse(argv: Sequence[str]) -> MeasureOptions | CalibrateOptions | OverlapOptions:
    """Read the command line; `--help` prints and exits."""
    if argv and argv[0] == _OVERLAP:
        return _overlap(_overlap_parser().parse_args(argv[1:]))
    given = _parser().parse_args(argv)
    other = _OF_MEASUREMENTS if given.calibrate else _OF_CALIBRATING
    for option, name in other.items():
        if getattr(given, name) is not None:
            mode = "goes without" if given.calibrate else "is for"
            raise OptionError(f"{option} {mode} --calibrate")
    return _calibrate(given) if given.calibrate else _measure(given)


def _measure(given: argparse.Namespace) -> MeasureOptions:
    default = MeasureOptions()
    asked = frozenset(name for name in ("workers", "device") if getattr(given, name) is not None)
    for name in ("workers", "device"):
        if name not in asked:
            setattr(given, name, getattr(default, name))
    _check_workers(given)
    for option, name in (("--compare", "compare"), ("--from", "shown")):
        path = getattr(given, name)
        if path is not None and not path.is_file():
            raise OptionError(f"{option} is {str(path)!r}; there is no such file")
    if given.shown is not None:
        for name in (*sorted(asked), *(["real_time"] if given.real_time else [])):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is for a measurement; --from shows one that there is")
    for option, path in (("--json", given.json), ("--plot", given.plot)):
        if path is not None:
            _check_file(option, path)
    if given.plot is not None and given.plot.suffix.lower() != ".svg":
        raise OptionError(f"--plot is {str(given.plot)!r}; it must end in .svg")
    return MeasureOptions(
        given.workers,
        given.device,
        given.real_time,
        given.json,
        given.plot,
        given.compare,
        given.shown,
        asked,
    )


def _calibrate(given: argparse.Namespace) -> CalibrateOptions:
    default = CalibrateOptions()
    for name in ("workers", "device", "bandwidth", "latency", "out"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(default, name))
    _check_numbers(given)
    _check_file("--out", given.out)
    if given.device != "cpu" and (given.bandwidth or given.latency):
        raise OptionError("--bandwidth and --latency are of a link that is emulated between CPUs")
    return CalibrateOptions(
        given.workers, given.bandwidth, given.latency, given.real_time, given.out, given.device
    )


def _overlap(given: argparse.Namespace) -> OverlapOptions:
    default = OverlapOptions()
    for name in _OF_CALIBRATION:
        if getattr(given, name) is None:
            setattr(given, name, getattr(default, name))
        elif given.calibration is not None:
            raise OptionError(
                f"--{name} is {getattr(given, name)}; with --calibration it is what that says"
            )
    _check_numbers(given)
    for name in ("rows", "inner", "columns", "rounds"):
        if getattr(given, name) < 1:
            raise OptionError(f"--{name} is {getattr(given, name)}; it must be at least 1")
    if given.calibration is not None and not given.calibration.is_file():
        raise OptionError(f"--calibration is {str(given.calibration)!r}; there is no such file")
    if given.trace is not None:
        _check_file("--trace", given.trace)
    return OverlapOptions(**vars(given))


def _check_workers(given: argparse.Namespace) -> None:
    if not 2 <= given.workers <= MAX_WORKERS:  # one has nobody to communicate with
        raise OptionError(f"--workers is {given.workers}; it must be 2 to {MAX_WORKERS}")


def _check_numbers(given: argparse.Namespace) -> None:
    _check_workers(given)
    for name in ("bandwidth", "latency"):
        value = getattr(given, name)
        if not 0 <= value < math.inf:
            raise OptionError(f"--{name} is {value}; it must be a number, 0 or more")


def _check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before minutes were spent on what it is to hold."""
    folder = path.parent
    if not path.name or path.is_dir():
        raise OptionError(f"{option} is {str(path)!r}; it must be a file to write")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"{option} is {str(path)!r}; there is no folder {folder} to write to")


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing all options and exiting."""
        raise OptionError(message)


def _link(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--bandwidth",
        type=float,
        metavar="B",
        help="bytes a second over an emulated link into each worker (default: no link)",
    )
    parser.add_argument("--latency", type=float, metavar="S", help="of that link, in seconds")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="run before all other programs, where the system lets us",
    )
    text = f"how many, 2 to {MAX_WORKERS} (default 2)"
    parser.add_argument("--workers", type=int, metavar="N", help=text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "tvm-ipc bench",
        description="Measure collectives by size, and calls of workers, on this machine; or, with "
        "--calibrate, what a cost model must know to say what gains from overlap.",
        epilog="`tvm-ipc bench overlap --help`: compare programs with and without overlap. Exit "
        "code: 0 done, 1 a failure, 2 wrong options.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        choices=tuple(dict.fromkeys(BACKENDS.values())),
        help="what the workers compute on (default cpu)",
    )
    _common(parser)
    for option, name, text in (
        ("--json", "json", "write what was measured"),
        ("--plot", "plot", "draw it, as SVG"),
        ("--compare", "compare", "say how many times as fast it is as this saved run"),
        ("--from", "shown", "show this saved run instead of measuring"),
    ):
        parser.add_argument(option, dest=name, type=Path, metavar="FILE", help=text)
    calibration = parser.add_argument_group("calibration")
    calibration.add_argument(
        "--calibrate", action="store_true", help="measure for a cost model, and write that"
    )
    _link(calibration)
    calibration.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the file to write (default {CalibrateOptions().out})",
    )
    return parser


def _overlap_parser() -> argparse.ArgumentParser:
    default = OverlapOptions()
    parser = _Parser(
        "tvm-ipc bench overlap",
        description="Time a collective and its matmul without overlap and in chunks, and say how "
        "much of the communication each hides.",
        epilog="Exit code: 0 done, 1 a failure, 2 wrong options.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="show what is predicted with it and what would be chosen, over its link",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what each worker did when, for Perfetto"
    )
    parser.add_argument(
        "--kind", choices=COLLECTIVES, default=default.kind, help="(default allgather)"
    )
    for name, text in (
        ("rows", "of each worker"),
        ("inner", "what is summed over"),
        ("columns", "of the result"),
        ("rounds", "how often each is timed"),
    ):
        value = getattr(default, name)
        help_text = f"{text} (default {value})"
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=help_text)
    parser.add_argument(
        "--blas",
        action=argparse.BooleanOptionalAction,
        help="multiply with OpenBLAS, or with kernels of TVM (default: OpenBLAS if installed)",
    )
    _common(parser)
    _link(parser)
    return parser
