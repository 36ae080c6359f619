# SPDX-License-Identifier: Apache-2.0
"""The command line of `tvm-ipc demo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from tvm_ipc.contract import MAX_WORKERS, AllReduceStrategy

DTYPES: Final = ("float32", "float16", "bfloat16")
#: The inner width of a layer, in units of `hidden`.
EXPANSION: Final = 4
_HIDDEN: Final = 512


class OptionError(Exception):
    """The options make no sense; the message is one line."""


@dataclass(frozen=True)
class Options:
    """What to compile and where to run it."""

    workers: int = 2
    layers: int = 4
    hidden: int = _HIDDEN
    batch: int = 16
    dtype: str = "float32"
    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    threads: bool = False
    steps: int = 30

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise OptionError(f"--workers is {self.workers}; it must be 1 to {MAX_WORKERS}")
        for name in ("layers", "hidden", "batch", "steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden % self.workers:
            near = _next_multiple(self.hidden, self.workers)
            raise OptionError(
                f"--hidden {self.hidden} cannot be divided among {self.workers} workers; "
                f"--hidden {near} can"
            )

    @property
    def inner(self) -> int:
        """The width between the two linears of a layer, all workers together."""
        return EXPANSION * self.hidden

    @property
    def weights(self) -> int:
        """The number of weights of the whole model."""
        return 2 * self.layers * self.hidden * self.inner


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    given = _parser().parse_args(argv)
    hidden = given.hidden
    if hidden is None:
        # Some room for vectors: each worker's part of a layer has a multiple of 64 columns.
        hidden = _next_multiple(_HIDDEN, max(1, given.workers) * 64 // EXPANSION)
    return Options(
        workers=given.workers,
        layers=given.layers,
        hidden=hidden,
        batch=given.batch,
        dtype=given.dtype,
        strategy=AllReduceStrategy[given.strategy.upper()],
        threads=given.threads,
        steps=given.steps,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing all options and exiting."""
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = _Parser(
        "tvm-ipc demo",
        description="Compile a tensor-parallel MLP with TVM's passes, run it on workers that share "
        "memory, and compare it with one worker and with NumPy.",
        epilog="Exit code: 0 right results, 1 wrong ones or a failure, 2 wrong options.",
        allow_abbrev=False,
    )

    def number(name: str, value: int | None, text: str) -> None:
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=text)

    number("workers", default.workers, f"1 to {MAX_WORKERS} (default {default.workers})")
    number("layers", default.layers, f"layers of two linears (default {default.layers})")
    number("hidden", None, f"width, a multiple of the workers (default {_HIDDEN} or a bit more)")
    number("batch", default.batch, f"rows of the input (default {default.batch})")
    number("steps", default.steps, f"runs to time, if they are short (default {default.steps})")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="(default float32)")
    parser.add_argument(
        "--strategy",
        choices=[strategy.name.lower() for strategy in AllReduceStrategy],
        default=default.strategy.name.lower(),
        help="of the all-reduces (default auto); the result has the same bits",
    )
    parser.add_argument(
        "--threads", action="store_true", help="workers are threads of this process"
    )
    return parser


def _next_multiple(number: int, of: int) -> int:
    return (number + of - 1) // of * of
