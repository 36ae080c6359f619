# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc demo`: compile and run a tensor-parallel decoder on several numbers of workers.

options                       the command line
decoder_and_build_config      model sizes and compile options
model                         the program of one worker
weights                       random weights and their shards
residual_stream_sharding      the rows that each worker has
attention_kernels_cpu         TIR kernels for CPUs
attention_kernels_gpu         TIR kernels for GPUs
schedule_matmul_and_norm_cpu  CPU schedules of matmul and norm
compile_model                 compilation with the pipeline
gpu_assignment                the GPU of each worker, and checks
generate                      generation of tokens
step_printer                  progress and results
format_speed_table            the speed of each run
compare_worker_counts         all steps, and the comparison of their results
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_ipc.tools import terminal
from tvm_ipc.tools.demo.options import OptionError, parse
from tvm_ipc.tools.demo.step_printer import Report

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        terminal.print_err(f"tvm-ipc demo: {error} (see tvm-ipc demo --help)")
        return 2
    report = Report()
    terminal.load_tvm()
    from tvm_ipc.tools.demo import compare_worker_counts

    return compare_worker_counts.run_demo(options, report)


def default_model(
    workers: int, sequence_parallel: bool = False, device: str = "cpu"
) -> tvm.IRModule:
    """Return the program of one of `workers` workers, in the default size of the demo."""
    from tvm_ipc.tools.demo import model
    from tvm_ipc.tools.demo.decoder_and_build_config import Config

    return model.build(Config(), workers, sequence_parallel=sequence_parallel, device=device)
