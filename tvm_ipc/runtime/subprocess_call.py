# SPDX-License-Identifier: Apache-2.0
"""Call a function in a child process that ends when the function has returned.

This is for functions that need much more code and memory than the caller, such as a compilation.
Arguments and results are JSON. The child has all of TVM and the import path of the caller, and
never imports the caller's main module. It ends with the caller, however the caller ends. If the
call is interrupted, the child's own children, such as a linker, end with it.
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
from tvm_ipc.runtime import config, standard_fd_reservation
from tvm_ipc.runtime.start_child_process import (
    OWN_GROUP,
    ChildProcess,
    describe_exit_code,
    explain_crash,
    import_path,
    passed,
    python_with_path,
)

_MAIN: Final = """
from tvm_ipc.runtime.subprocess_call import main
main(*map(int, sys.argv[1:]))
"""
_PR_SET_PDEATHSIG: Final = 1
#: Seconds for the child to end after it has returned a result.
_EXIT_SECONDS: Final = 10.0


class ChildError(Exception):
    """The traceback of an error in the child; the cause of the error that is raised."""


def run_in_child(
    function: str,
    argument: Any,
    progress: Callable[[str], None] = lambda _: None,
    purpose: str = "to do a part of the work",
) -> Any:
    """Call a function in a child process; return its result or raise its exception.

    Parameters
    ----------
    function : "module:name". It is called with the argument and a function that reports progress.
    argument : a value that JSON can represent.
    progress : called with each progress report.
    purpose : the purpose of the child in messages, such as "to compile a model".

    Raises
    ------
    IPCError
        The child could not start, or was killed.
    """
    with _Child(function, argument, purpose) as child:
        for line in child.messages:
            if not line.endswith(b"\n"):  # the child was killed while it wrote
                break
            message = json.loads(line)
            if "progress" in message:
                progress(message["progress"])
            elif "error" in message:
                raise _rebuild_error(message["error"]) from ChildError(message["traceback"])
            else:
                return message["result"]
        raise IPCError(child.explain_end())


class _Child:
    """The child process and its temporary files, which are gone after the `with` block."""

    def __init__(self, function: str, argument: Any, purpose: str) -> None:
        self._purpose = purpose
        with contextlib.ExitStack() as stack:
            try:
                folder = tempfile.TemporaryDirectory(
                    prefix="tvm_ipc-apart-", ignore_cleanup_errors=True
                )
                environment = config.compiler_environment(stack.enter_context(folder))
                read, write = os.pipe()
                self.messages = stack.enter_context(os.fdopen(read, "rb"))
                try:
                    self._process = _start(write, [function, argument], environment)
                finally:
                    os.close(write)
            except OSError as error:
                raise IPCError(
                    f"a process is needed {purpose}, which cannot start: {error}"
                ) from error
            self._stack = stack.pop_all()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the child has ended; after an exception, kill it and its own children."""
        with self._stack:
            try:
                if kind is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_EXIT_SECONDS)
            finally:
                if self._process.returncode is None:  # else the id may belong to another process
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()

    def explain_end(self) -> str:
        """Return the message for a child that ended without a result."""
        code = self._process.wait()
        end = f"ended with {describe_exit_code(code)}"
        if code < 0:
            end = f"was killed by signal {-code}"
            with contextlib.suppress(ValueError):
                end = f"was killed by {signal.Signals(-code).name}"
        hint = ", which the system does where memory is short" * (code == -signal.SIGKILL)
        remedy = explain_crash(code) or "try again"
        return f"the process that was started {self._purpose} {end}{hint}; {remedy}"


def _start(messages: int, call: Any, environment: dict[str, str]) -> ChildProcess:
    with passed(import_path()) as path, passed(call) as call_file:
        return ChildProcess(
            python_with_path(path, _MAIN, os.getpid(), messages, call_file),
            env=environment,
            pass_fds=(messages, path, call_file),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **OWN_GROUP,
        )


def _rebuild_error(mro: list[list[str]]) -> BaseException:
    """Return an error of the child's class, or of its nearest base class that exists here."""
    (_, _, message), *_ = mro
    for module, name, _ in mro:
        always_imported = {"builtins": builtins, errors.__name__: errors}.get(module)
        kind = getattr(always_imported or sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                error = kind(message)
                if str(error):
                    return error
    return RuntimeError(message)


def main(parent: int, messages: int, call_file: int) -> None:
    """Run the function and report its result; the program of the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        return
    standard_fd_reservation.fill()
    os.set_inheritable(messages, False)
    name, argument = json.loads(os.pread(call_file, os.fstat(call_file).st_size, 0))
    os.close(call_file)

    def send(**message: Any) -> None:
        os.write(messages, json.dumps(message).encode() + b"\n")

    try:
        module, _, function = name.partition(":")
        result = getattr(importlib.import_module(module), function)(
            argument, lambda text: send(progress=text)
        )
        send(result=result)
    except Exception as error:
        message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        message = message if len(error.args) == 1 else str(error)
        mro = [[kind.__module__, kind.__qualname__, message] for kind in type(error).__mro__]
        send(error=mro, traceback="".join(traceback.format_exception(error)))
