# SPDX-License-Identifier: Apache-2.0
"""The demo: a tensor-parallel decoder, compiled for several numbers of workers that must agree.

options     the command line             config      the size of a model, how to compile it
model       the program of one worker    residual    which rows of its stream each worker has
kernels     loops that TVM has not       schedule    how the program's loops run on a CPU
kernels_gpu the same for GPUs            gpu         those that there are
compiling   it through our pipeline      weights     random weights, in parts
generating  a prompt in, tokens out      report      lines and a bar
tour        all of it in turn, and the verdict
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_ipc import terminal
from tvm_ipc.demo.options import OptionError, parse
from tvm_ipc.demo.report import Report

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        terminal.complain(f"tvm-ipc demo: {error} (see tvm-ipc demo --help)")
        return 2
    report = Report()
    terminal.load_tvm()
    from tvm_ipc.demo import tour

    return tour.lead(options, report)


def default_model(
    workers: int, sequence_parallel: bool = False, device: str = "cpu"
) -> tvm.IRModule:
    """Return the program of one of `workers` workers, of the size that the demo has by default."""
    from tvm_ipc.demo import model
    from tvm_ipc.demo.config import Config

    return model.build(Config(), workers, sequence_parallel=sequence_parallel, device=device)
