# SPDX-License-Identifier: Apache-2.0
"""Set up the logger `logging.getLogger("tvm_ipc")`, whose children log for the whole package.

The log is visible if the program adds a handler, as for every logger, or if `TVM_IPC_LOG` is set:
then the controller and its worker processes print it on stderr.

    22:46:26.123 tvm_ipc [rank 1, pid 4711] DEBUG: ...

Threads of the native library log nothing, because they would need the GIL for it. The thread of
the controller that queries them logs what they learned about the workers.
"""

from __future__ import annotations

import logging
from typing import Final

from tvm_ipc.runtime import config
from tvm_ipc.runtime.print_to_stderr_and_unraised_errors import print_err

_logger: Final = logging.getLogger("tvm_ipc")
_logger.addHandler(logging.NullHandler())  # otherwise Python prints warnings on stderr


class _Printer(logging.Handler):
    """A handler that prints to the current `sys.stderr`."""

    def __init__(self) -> None:
        super().__init__()
        self.process_name = "controller"
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print every line of a record with its time and process."""
        time = logging.Formatter().formatTime(record, "%H:%M:%S")
        process = f"[{self.process_name}, pid {record.process}]"
        prefix = f"{time}.{int(record.msecs):03d} tvm_ipc {process} {record.levelname}"
        lines = self.format(record).splitlines() or [""]
        print_err("".join(f"{prefix}: {line}\n" for line in lines))


_printer: Final = _Printer()


def start(process_name: str | None = None) -> None:
    """Print the log from now on, from the level in `TVM_IPC_LOG` on, if the variable is set.

    Parameters
    ----------
    process_name : the name of this process in log lines.

    Raises
    ------
    IPCError
        The value of the variable is invalid.
    """
    if process_name is not None:
        _printer.process_name = process_name
    level = config.log_level()
    if level is None:
        if _printer in _logger.handlers:
            _logger.removeHandler(_printer)
            _logger.setLevel(logging.NOTSET)
        return
    _printer.setLevel(level)
    _logger.setLevel(min(level, _logger.level or level))  # handlers may need a lower level
    _logger.addHandler(_printer)  # adding a handler twice has no effect
