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
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

from tvm_ipc import errors
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config, standard_fd_reservation
from tvm_ipc.runtime.scratch_dir import ScratchDir
from tvm_ipc.runtime.start_child_process import (
    ChildProcess,
    describe_exit_code,
    explain_crash,
    import_path,
    passed,
    signal_name,
    start_python,
)

_MAIN: Final = """
from tvm_ipc.runtime.subprocess_call import main
main(*map(int, sys.argv[1:]))
"""
_is_child = False  # whether `main` runs in this process
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
    with _child([function, argument], purpose) as (process, messages):
        for line in messages:
            if not line.endswith(b"\n"):  # the child was killed while it wrote
                break
            message = json.loads(line)
            if "progress" in message:
                progress(message["progress"])
            elif "error" in message:
                raise _rebuild_error(message["error"]) from ChildError(message["traceback"])
            else:
                return message["result"]
        raise IPCError(_explain_end(process.wait(), purpose))


@contextlib.contextmanager
def _child(call: Any, purpose: str) -> Iterator[tuple[ChildProcess, IO[bytes]]]:
    """Yield a child and its messages, and wait until it has ended.

    After an exception, kill the child and its own children. Their temporary files are gone then.
    """
    with contextlib.ExitStack() as files:
        folder = ScratchDir()
        files.callback(folder.remove)
        try:
            environment = config.compiler_environment(str(folder.path()))
            read, write = os.pipe()
            messages = files.enter_context(os.fdopen(read, "rb"))
            try:
                process = _start(write, call, environment)
            finally:
                os.close(write)
        except OSError as error:
            raise IPCError(f"a process is needed {purpose}, which cannot start: {error}") from error
        try:
            yield process, messages
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
        finally:
            if process.returncode is None:  # else the id may belong to another process
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _explain_end(code: int, purpose: str) -> str:
    """Return the message for a child that ended without a result."""
    killer = signal_name(code)
    end = f"was killed by {killer}" if killer else f"ended with {describe_exit_code(code)}"
    hint = ", which the system does where memory is short" * (code == -signal.SIGKILL)
    remedy = explain_crash(code) or "try again"
    return f"the process that was started {purpose} {end}{hint}; {remedy}"


def _start(messages: int, call: Any, environment: dict[str, str]) -> ChildProcess:
    with passed(import_path()) as path, passed(call) as call_file:
        return start_python(
            _MAIN,
            messages,
            call_file,
            path=path,
            files=(messages, call_file),
            dies_with_parent=True,
            env=environment,
            stdout=subprocess.DEVNULL,
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


def is_child() -> bool:
    """Return whether `run_in_child` started this process."""
    return _is_child


def main(messages: int, call_file: int) -> None:
    """Run the function and report its result; the program of the child.

    The child then ends at once. The interpreter would take seconds to destroy the objects of
    PyTorch and of TVM's compiler, and the caller waits until its temporary files can be removed.
    """
    _main(messages, call_file)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _main(messages: int, call_file: int) -> None:
    global _is_child
    _is_child = True
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
