# SPDX-License-Identifier: Apache-2.0
"""The command `tvm-ipc`, whose subcommands are in `tools/command_line.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        from tvm_ipc.tools import command_line

        return command_line.main(argv)
    except KeyboardInterrupt:  # before the command line handles it
        print("tvm-ipc: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
