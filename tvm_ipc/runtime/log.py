# SPDX-License-Identifier: Apache-2.0
"""What this package logs, to `logging.getLogger("tvm_ipc")` and the loggers below it.

Nobody sees it unless the program adds a handler, as for every logger, or the variable
`TVM_IPC_LOG` is set: then the controller and its worker processes print it on their error output.

    22:46:26.123 tvm_ipc [rank 1, pid 4711] DEBUG: ...

Threads of the native library log nothing, since they would need Python's lock for it: what they
hear of the workers is logged by the controller's thread that asks them.
"""

from __future__ import annotations

import logging
from typing import Final

from tvm_ipc.runtime import config, error_output

_logger: Final = logging.getLogger("tvm_ipc")
_logger.addHandler(logging.NullHandler())  # or Python would print warnings


class _Printer(logging.Handler):
    """Prints on what is the error output at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.who = "controller"
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print every line of a record with its time and process."""
        time = logging.Formatter().formatTime(record, "%H:%M:%S")
        who = f"{time}.{int(record.msecs):03d} tvm_ipc [{self.who}, pid {record.process}]"
        lines = self.format(record).splitlines() or [""]
        error_output.say("".join(f"{who} {record.levelname}: {line}\n" for line in lines))


_printer: Final = _Printer()


def start(who: str | None = None) -> None:
    """Print from now on what `TVM_IPC_LOG` asks for; `who` is what lines name this process.

    Raises
    ------
    IPCError
        The variable has a value that it cannot have.
    """
    if who is not None:
        _printer.who = who
    level = config.log_level()
    if level is None:
        if _printer in _logger.handlers:
            _logger.removeHandler(_printer)
            _logger.setLevel(logging.NOTSET)
        return
    _printer.setLevel(level)
    _logger.setLevel(min(level, _logger.level or level))  # the program's handlers may want more
    _logger.addHandler(_printer)  # once, however often it is added
