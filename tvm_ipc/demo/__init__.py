# SPDX-License-Identifier: Apache-2.0
"""The demo: a tensor-parallel MLP, compiled with TVM's passes, on workers that share memory.

`options` reads the command line, `model` is the program, `lowering` compiles it with the help of
`schedule`, `run` runs it in a session, and `tour` leads through all that and judges the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tvm_ipc.demo.options import OptionError, parse
from tvm_ipc.demo.report import Report


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        print(f"tvm-ipc demo: {error} (see tvm-ipc demo --help)", file=sys.stderr)
        return 2
    report = Report()
    from tvm_ipc.demo import tour  # loads TVM, which takes a while

    try:
        return tour.lead(options, report)
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
