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


class OptionError(Exception):
    """The options make no sense; the message is one line."""


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


def parse(argv: Sequence[str]) -> CalibrateOptions | OverlapOptions:
    """Read the command line; `--help` prints and exits."""
    if argv and argv[0] == _OVERLAP:
        return _overlap(_overlap_parser().parse_args(argv[1:]))
    given = _parser().parse_args(argv)
    if not given.calibrate:
        raise OptionError("give one of --calibrate and overlap")
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


def _check_numbers(given: argparse.Namespace) -> None:
    if not 2 <= given.workers <= MAX_WORKERS:  # one has nobody to communicate with
        raise OptionError(f"--workers is {given.workers}; it must be 2 to {MAX_WORKERS}")
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


def _link(parser: argparse.ArgumentParser, default: float | None) -> None:
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=default,
        metavar="B",
        help="bytes a second over an emulated link into each worker (default: no link)",
    )
    parser.add_argument(
        "--latency", type=float, default=default, metavar="S", help="of that link, in seconds"
    )


def _common(parser: argparse.ArgumentParser, default: int | None) -> None:
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="run before all other programs, where the system lets us",
    )
    text = f"how many, 2 to {MAX_WORKERS} (default 2)"
    parser.add_argument("--workers", type=int, default=default, metavar="N", help=text)


def _parser() -> argparse.ArgumentParser:
    default = CalibrateOptions()
    parser = _Parser(
        "tvm-ipc bench",
        description="Measure what a cost model must know of this machine, to say which collectives "
        "and matmuls gain from overlap.",
        epilog="`tvm-ipc bench overlap --help`: compare programs with and without overlap. Exit "
        "code: 0 done, 1 a failure, 2 wrong options.",
        allow_abbrev=False,
    )
    parser.add_argument("--calibrate", action="store_true", help="measure, and write a calibration")
    parser.add_argument(
        "--device",
        choices=tuple(dict.fromkeys(BACKENDS.values())),
        default=default.device,
        help="what the workers compute on (default cpu)",
    )
    _common(parser, default.workers)
    _link(parser, default.bandwidth)
    parser.add_argument(
        "--out",
        type=Path,
        default=default.out,
        metavar="FILE",
        help=f"the file to write (default {default.out})",
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
    _common(parser, None)
    _link(parser, None)
    return parser
