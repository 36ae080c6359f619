# SPDX-License-Identifier: Apache-2.0
"""What other processes do in `test_apart`."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_ipc.errors import ModelError

Tell = Callable[[str], None]


class OwnError(ModelError):
    """Of a module that the caller may not have."""

    __module__ = "somewhere_else"


def answer(given: Any, tell: Tell) -> Any:
    tell("one")
    tell(f"two, with {given['word']}")
    Path(tempfile.mkdtemp(), "left").touch()
    return {
        "pid": os.getpid(),
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "temporary": tempfile.gettempdir(),
        "given": given,
    }


def fail(given: str, _tell: Tell) -> None:
    if given == "own":
        raise OwnError("of a class of its own")
    if given == "unicode":
        b"\xff".decode()
    if given == "key":
        raise KeyError("a", 1)
    if given == "long":
        raise ValueError("a line\nand another")
    raise __builtins__[given]("this is wrong")  # type: ignore[index]


def end(given: int, _tell: Tell) -> None:
    if given < 0:
        os.kill(os.getpid(), -given)
    os._exit(given)


def wait(_given: None, tell: Tell) -> None:
    """Start a process, say who both are, and do nothing for long."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tell(f"{os.getpid()} {other.pid}")
    time.sleep(600)


def linger(given: float, tell: Tell) -> str:
    """Leave what would keep the interpreter from ending for some seconds."""
    atexit.register(time.sleep, given)
    logging.basicConfig(format="%(message)s")
    logging.error("logged")
    return "done"


def exit_code(program: str, _: Tell) -> int:
    return subprocess.run(["/bin/sh", "-c", program]).returncode
