# SPDX-License-Identifier: Apache-2.0
"""A function that runs in a process of its own, which is gone when it has returned.

It is for work that needs far more code and memory than the process that wants it done. What is
given and returned is JSON. The process has all of TVM, imports what the caller would, and never the
caller's main module. It ends with the caller, however that ends; what it is in the middle of, such
as a linker, is ended with it where the caller lives on.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, Final

from tvm_ipc import errors
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.runtime.starting import OWN_GROUP, import_path, passed

_MAIN: Final = """
import json, os, sys
parent, report, path, given = map(int, sys.argv[1:])
sys.path[:] = json.loads(os.pread(path, os.fstat(path).st_size, 0))
os.close(path)
from tvm_ipc.runtime.apart import main
main(parent, report, given)
"""
_PR_SET_PDEATHSIG: Final = 1
#: Seconds that the process has to end by itself when it has returned.
_TO_END: Final = 10.0


class ElsewhereError(Exception):
    """Where an error of the other process came from, as the cause of the one that is raised."""


def apart(
    function: str,
    given: Any,
    progress: Callable[[str], None] = lambda _: None,
    purpose: str = "to do a part of the work",
) -> Any:
    """Return what a function returns in another process; raise what it raises.

    Parameters
    ----------
    function : "module:name". It is called with what is given, and a function that tells progress.
    given : what JSON can say.
    progress : hears what the function tells.
    purpose : what the process is for, in messages: "to compile a model".

    Raises
    ------
    IPCError
        The process could not start, or was killed.
    """
    with _Process(function, given, purpose) as process:
        for line in process.report:
            if not line.endswith(b"\n"):  # it was killed in the middle
                break
            said = json.loads(line)
            if "progress" in said:
                progress(said["progress"])
            elif "error" in said:
                raise _error(said["error"]) from ElsewhereError(said["traceback"])
            else:
                return said["result"]
        raise IPCError(process.why_ended())


class _Process:
    """The other process, which is gone after the block, and its temporary files too."""

    def __init__(self, function: str, given: Any, purpose: str) -> None:
        self._purpose = purpose
        with contextlib.ExitStack() as stack:
            try:
                folder = tempfile.TemporaryDirectory(
                    prefix="tvm_ipc-apart-", ignore_cleanup_errors=True
                )
                environment = config.compiler_environment(stack.enter_context(folder))
                read, write = os.pipe()
                self.report = stack.enter_context(os.fdopen(read, "rb"))
                try:
                    self._process = _started(write, [function, given], environment)
                finally:
                    os.close(write)
            except OSError as error:
                raise IPCError(
                    f"a process is needed {purpose}, which cannot start: {error}"
                ) from error
            self._stack = stack.pop_all()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the process is gone; where it is not wanted any more, end all of it now."""
        with self._stack:
            try:
                if kind is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_TO_END)
            finally:
                if self._process.returncode is None:  # else its number may be another one's by now
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()

    def why_ended(self) -> str:
        """Say how it came to its end without a result."""
        code = self._process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code}"
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        hint = ", which the system does where memory is short" * (code == -signal.SIGKILL)
        return f"the process that was started {self._purpose} {how}{hint}; try again"


def _started(report: int, given: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with passed(import_path()) as path, passed(given) as text:
        numbers = (os.getpid(), report, path, text)
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, *map(str, numbers)],
            env=environment,
            pass_fds=numbers[1:],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **OWN_GROUP,
        )


def _error(mro: list[list[str]]) -> BaseException:
    """Return an error like the other process's: of its class, or the nearest base that is known."""
    (_, _, message), *_ = mro
    for module, name, _ in mro:
        known = {"builtins": builtins, errors.__name__: errors}.get(module)
        kind = getattr(known or sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                found = kind(message)
                if str(found):
                    return found
    return RuntimeError(message)


def main(parent: int, report: int, given: int) -> None:
    """Run the function; the program of the other process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before that
        return
    os.set_inheritable(report, False)
    name, value = json.loads(os.pread(given, os.fstat(given).st_size, 0))
    os.close(given)

    def tell(**said: Any) -> None:
        os.write(report, json.dumps(said).encode() + b"\n")

    try:
        module, _, function = name.partition(":")
        result = getattr(importlib.import_module(module), function)(
            value, lambda text: tell(progress=text)
        )
        tell(result=result)
    except Exception as error:
        message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        message = message if len(error.args) == 1 else str(error)
        mro = [[one.__module__, one.__qualname__, message] for one in type(error).__mro__]
        tell(error=mro, traceback="".join(traceback.format_exception(error)))
