# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc bench`: measure collectives, and how much communication overlap hides.

options                    the command line
measure_calibrate_overlap  the three modes of the command
timing_session             a session that times its workers
worker_timing_functions    the code that runs in workers
collective_times           collectives by size
result_file                saved, loaded, compared runs
result_tables              a measurement as tables
plot_svg                   a measurement as SVG
calibrate_cost_model       calibration of the cost model
overlap_programs           the programs for overlap
overlap                    comparison with and without it
chrome_trace               a timeline for Perfetto
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ipc.tools import terminal
from tvm_ipc.tools.bench.options import OverlapOptions, parse
from tvm_ipc.tools.options import OptionError, refuse


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        return refuse("tvm-ipc bench", error)
    terminal.load_tvm()
    from tvm_ipc.tools.bench import measure_calibrate_overlap

    if isinstance(options, OverlapOptions):
        return measure_calibrate_overlap.compare(options)
    if options.calibrate:
        return measure_calibrate_overlap.calibrate(options)
    return measure_calibrate_overlap.measure(options)
