# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc bench`: what communication costs on this machine, and how much of it overlap hides.

options     the command line             stage      a session that takes the time of programs
worker      what its workers do          programs   what is timed: matmuls, plain and overlapped
suite       collectives by size          run        what was measured: saved, read, compared
words       sizes, times and tables      plot       a measurement as a picture
calibrate   all that a calibration has   overlap    plain and overlapped programs compared
trace       what each rank did when, as a picture
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ipc import terminal
from tvm_ipc.bench.options import CalibrateOptions, MeasureOptions, OptionError, parse


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        terminal.complain(f"tvm-ipc bench: {error} (see tvm-ipc bench --help)")
        return 2
    terminal.load_tvm()
    from tvm_ipc.bench import command

    if isinstance(options, MeasureOptions):
        return command.measure(options)
    if isinstance(options, CalibrateOptions):
        return command.calibrate(options)
    return command.compare(options)
