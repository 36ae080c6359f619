# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS
from tvm_ipc.tools.options import STRATEGIES, OptionError, Parser, number, option, switch

#: The target of `--target cuda`, which works on machines without a GPU.
_CUDA: Final = '{"kind": "cuda", "arch": "sm_90"}'


class ModuleError(Exception):
    """Raised for a module that cannot be loaded or explained, with the reason."""


def _budget(flag: str, count: int) -> None:
    if count < 0:
        raise OptionError(f"{flag} is {count}; it must be a number of bytes")


def _overlap(text: str) -> int | Path:
    if not text.isdecimal():
        return Path(text)
    if not 1 <= int(text) <= MAX_EXPOSED:
        raise OptionError(f"--overlap is {text}; it must be 1 to {MAX_EXPOSED} chunks, or a file")
    return int(text)


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdecimal():
        raise OptionError(f"--size is {text!r}; it must have the form n=64")
    return name, int(value)


def _target(text: str) -> str:
    return _CUDA if text == "cuda" else text


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    module: Path | None = option(
        "file with the result of tvm.ir.save_json(mod), or .py file with the result of "
        "mod.script()",
        group="module",
        flag="module",
        type=Path,
        nargs="?",
    )
    demo: bool = switch("explain the model of tvm-ipc demo")
    name: str | None = option(
        "name of the module in a .py file that defines several", flag="--module", metavar="NAME"
    )
    size: Sequence[tuple[str, int]] = option(
        "value of a symbolic size in the report (default: its upper bound, or 128)",
        (),
        type=_size,
        action="append",
        metavar="NAME=N",
    )
    target: str = option(
        "TVM target: llvm, c, cuda (which means sm_90), or a JSON object such as "
        '{"kind": "llvm", "mcpu": ...}',
        "llvm",
        group="pipeline",
        type=_target,
    )
    world_size: int = number(
        f"number of workers that the module is compiled for, 1 to {MAX_WORKERS}",
        2,
        most=MAX_WORKERS,
    )
    strategy: str = option(
        "algorithm of the all-reduces",
        "auto",
        choices=STRATEGIES,
    )
    barrier_budget: int | None = option(
        "memory that the planner may use to remove exit barriers (default: the pipeline's)",
        type=int,
        metavar="BYTES",
        check=_budget,
    )
    sequence_parallel: bool = switch(
        "with --demo: split the rows of the prompt over the workers, as tvm-ipc demo does"
    )
    async_collectives: bool = switch(
        "run collectives in a thread of each worker, concurrently with independent kernels"
    )
    #: A number of chunks, or the file of a calibration.
    overlap: int | Path | None = option(
        "overlap matmuls with communication: in N chunks, or where the calibration in a file "
        "predicts a gain",
        type=_overlap,
        metavar="N|FILE",
    )
    streams: int = number(
        "number of chunks that are communicated or computed at a time, for tensors that the module "
        "marks for streams",
        2,
    )
    output: Path | None = option(
        "file of the HTML page, or - for the standard output (default: explain-MODULE.html)",
        group="output",
        flag="--output -o",
        type=Path,
        metavar="FILE",
    )
    text: bool = switch(
        "print a text report; no page is written unless --output or --open is specified"
    )
    json: bool = switch(
        "print the figures, the memory plan and the decisions as JSON; no page is written "
        "unless --output or --open is specified"
    )
    open: bool = switch("open the page in a browser")
    traceback: bool = switch("print the traceback of an error")

    @property
    def to_stdout(self) -> bool:
        """Return whether the page is written to the standard output."""
        return self.output == Path("-")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the values of symbolic sizes by their names."""
        return dict(self.size)

    @property
    def page(self) -> Path | None:
        """Return the file of the page; None to print to the terminal only."""
        if self.output is None and (self.open or not (self.text or self.json)):
            return Path(f"explain-{'demo' if self.module is None else self.module.stem}.html")
        return self.output


def parser() -> Parser[Options]:
    """Return the parser of the command line."""
    return Parser(
        Options,
        "tvm-ipc explain",
        description="Compile a module with the pipeline, print its headline figures (collectives, "
        "bytes, memory per worker), and write a page with its memory plan over time, "
        "the overlap of communication and computation, the decision about each collective with "
        "its reason, and a comparison with the memory plan of TVM. The module is not run.",
        epilog="A .py file is executed as a Python program, so explain only files that you trust. "
        "Exit code: 0 success, 1 failure, 2 invalid options or a module that cannot be compiled.",
    )


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    options = parser().read(argv)
    if options.demo == (options.module is not None):
        raise OptionError("specify either the file of a module or --demo")
    if options.demo and options.name is not None:
        raise OptionError("--module selects a module of a file and conflicts with --demo")
    if options.sequence_parallel and not options.demo:
        raise OptionError(
            "--sequence-parallel needs --demo, because it changes how the demo's model is built"
        )
    to_stdout = ["--text"] * options.text + ["--json"] * options.json
    to_stdout += ["--output -"] * options.to_stdout
    if len(to_stdout) > 1:
        raise OptionError(
            f"{' and '.join(to_stdout[:2])} both write to the standard output; specify a file"
            if "--output -" in to_stdout
            else "--text and --json both write to the standard output; specify one of them"
        )
    if options.open and options.to_stdout:
        raise OptionError("--open needs a file, and --output is the standard output")
    return options
