# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc demo`: compile and run a tensor-parallel decoder on several numbers of workers.

options                the command line
compile_model          compilation with the pipeline
step_printer           progress and results
format_speed_table     the speed of each run
compare_worker_counts  all steps, and the comparison of their results

The decoder is `examples/tensor_parallel_decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_ipc.tools import terminal
from tvm_ipc.tools.demo.options import parse
from tvm_ipc.tools.demo.step_printer import Report
from tvm_ipc.tools.options import OptionError, refuse

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        return refuse("tvm-ipc demo", error)
    report = Report()
    terminal.load_tvm()
    from tvm_ipc.tools.demo import compare_worker_counts

    return compare_worker_counts.run_demo(options, report)


def default_model(
    workers: int, sequence_parallel: bool = False, device: str = "cpu"
) -> tvm.IRModule:
    """Return the program of one of `workers` workers, in the default size of the demo."""
    from tvm_ipc.examples.tensor_parallel_decoder import decoder_model
    from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config

    return decoder_model.build(
        Config(), workers, sequence_parallel=sequence_parallel, device=device
    )
