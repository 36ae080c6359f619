# SPDX-License-Identifier: Apache-2.0
"""Start child processes, wait for them, and describe how they ended. Imports no TVM.

Each Python process that the package starts gets its command line from this file. A child never
imports a module from the current directory because it was started there: Python puts that directory
first on the import path of `-c` and `-m`, and a file `json.py` in it would run in every worker.

Children have a process group of their own, so that Ctrl-C in a terminal reaches only the
controller, and read nothing from the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

#: Options for a process group of its own. A new session would do too, but the system distributes
#: cores by session.
_OWN_GROUP: Final[dict[str, Any]] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)

#: Flags of an interpreter and the fields of `sys.flags` that hold how often they were specified.
_FLAGS: Final = {"-B": "dont_write_bytecode", "-O": "optimize", "-b": "bytes_warning"}
_ISOLATION: Final = {"-E": "ignore_environment", "-s": "no_user_site"}
_SAFE_PATH: Final = sys.version_info >= (3, 11)  # the flag -P
#: Removes the current directory from the import path, before the first import from a file.
_LEAVE_DIRECTORY: Final = "import sys; del sys.path[0]; "
#: Reads the import path from a descriptor. The child waits for its own children, so an ignored
#: SIGCHLD, which it inherits, must not hide how they ended.
_SET_PATH: Final = """
import json, os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
path = int(sys.argv.pop(1))
sys.path[:] = json.loads(os.pread(path, os.fstat(path).st_size, 0))
os.close(path)
"""
#: Makes the kernel kill the child when its parent ends, however the parent ends.
_DIE_WITH_PARENT: Final = """
import ctypes
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv.pop(1)):  # the parent ended before the line above
    sys.exit(1)
"""
#: The program text of a worker of `tvm_ipc.Session`, for `start_python`.
WORKER_PROGRAM: Final = """
from tvm_ipc.runtime.worker import main
main(*map(int, sys.argv[1:]))
"""
#: The exit code of a child that the program itself has waited for. No process ends with it.
UNKNOWN_EXIT_CODE: Final = 1 << 16
#: Bytes of stack below which a crash may come from the limit. Workers need about 100 KB.
_SMALL_STACK: Final = 1 << 20
_FIRST_DELAY: Final = 0.0005
_LONGEST_DELAY: Final = 0.05


def import_path() -> list[str]:
    """Return the import path of this process for a child.

    The empty entry of an interactive program means the current directory, and is replaced by its
    path. Entries that are not strings, such as pathlib paths, are left out: Python ignores them.
    """
    return [_absolute(entry) for entry in sys.path if isinstance(entry, str)]


def _absolute(entry: str) -> str:
    # Other entries may be names that a path hook knows.
    with contextlib.suppress(OSError):  # the current directory was removed
        if not entry or os.path.exists(entry):  # noqa: PTH110 - it may be no path
            return os.path.abspath(entry)  # noqa: PTH100
    return entry


def python_with_path(path: int, program: str, *arguments: object) -> list[str]:
    """Return the command of a child that runs a program text with a given import path.

    Parameters
    ----------
    path : an inherited descriptor of the import path, as `passed(import_path())` makes it.
    program : a program text as for `python -c`; its `sys.argv[1:]` is `arguments`.
    """
    flags = _inherited_flags() + ["-S"] * sys.flags.no_site
    return [*_python(flags, _SET_PATH + program), str(path), *map(str, arguments)]


def python_text(program: str, executable: str | None = None) -> list[str]:
    """Return the command of a child that runs a program text with the installed packages."""
    return _python(_inherited_flags(), program, executable)


def python_module(name: str) -> list[str]:
    """Return the command of a child that runs an installed module, as `python -m` does.

    The command has no line breaks, because MPI launchers pass it on.
    """
    flags = _inherited_flags()
    if _SAFE_PATH:
        return [sys.executable, *flags, "-m", name]
    run = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return _python(flags, run)


def python_script(path: str) -> list[str]:
    """Return the command of a child that runs a file with only the standard library."""
    return [sys.executable, "-I", "-S", path]


def _python(flags: list[str], program: str, executable: str | None = None) -> list[str]:
    leave = "" if "-I" in flags or "-P" in flags else _LEAVE_DIRECTORY
    return [executable or sys.executable, *flags, "-c", leave + program]


def _inherited_flags() -> list[str]:
    """Return the flags of this interpreter for its children, and -P if it is supported.

    `-S` is left out: a child without an import path of ours must find installed packages.
    """
    flags = [flag for flag, name in _FLAGS.items() for _ in range(getattr(sys.flags, name))]
    if sys.flags.isolated:
        flags.append("-I")  # includes the others
    else:
        flags += [flag for flag, name in _ISOLATION.items() if getattr(sys.flags, name)]
        flags += ["-P"] * _SAFE_PATH
    flags += [f"-W{option}" for option in sys.warnoptions]
    options = getattr(sys, "_xoptions", {}).items()  # CPython's
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in options]
    return flags


@contextlib.contextmanager
def passed(value: Any) -> Iterator[int]:
    """Yield the descriptor of a file with a value for a child; an argument may be too short."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(value).encode())
        file.flush()
        yield file.fileno()


class ChildProcess(subprocess.Popen[bytes]):
    """A child whose exit code is `UNKNOWN_EXIT_CODE` if the program has reaped it.

    A program reaps it by ignoring SIGCHLD, or by waiting for any child. `subprocess` reports 0
    then, as if the child had succeeded.

    Parameters
    ----------
    command : the command line.
    own_group : whether the child gets a process group of its own.
    **options : as for `subprocess.Popen`; by default the child reads nothing.
    """

    def __init__(self, command: Sequence[str], *, own_group: bool = True, **options: Any) -> None:
        self._poll_lock = threading.Lock()
        group = _OWN_GROUP if own_group else {}
        super().__init__(command, **{"stdin": subprocess.DEVNULL, **group, **options})

    def poll(self) -> int | None:
        """Return the exit code of the child; None while it runs."""
        with self._poll_lock:
            if self.returncode is None:
                code = self._code()
                if code is None:
                    return None
                super().poll()  # reaps the child
                self.returncode = code
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child to end, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if deadline is None and self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        delay = _FIRST_DELAY
        while (code := self.poll()) is None:
            left = delay if deadline is None else deadline - time.monotonic()
            if left <= 0.0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            delay = min(2 * delay, left, _LONGEST_DELAY)
            time.sleep(delay)
        return code

    def _code(self) -> int | None:
        """Return the exit code without reaping the child; None while it runs."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return UNKNOWN_EXIT_CODE
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def start_python(
    program: str,
    *arguments: object,
    path: int,
    files: Sequence[int] = (),
    dies_with_parent: bool = False,
    **options: Any,
) -> ChildProcess:
    """Start a child that runs a program text with a given import path.

    Parameters
    ----------
    program, arguments, path : as for `python_with_path`.
    files : other descriptors that the child inherits.
    dies_with_parent : whether the child is killed when this process ends.
    **options : as for `ChildProcess`.
    """
    if dies_with_parent:
        program, arguments = _DIE_WITH_PARENT + program, (os.getpid(), *arguments)
    command = python_with_path(path, program, *arguments)
    return ChildProcess(command, pass_fds=(*files, path), **options)


def end_within(seconds: float, processes: Iterable[ChildProcess]) -> None:
    """Wait for all of some children to end, and kill those that take longer."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def signal_name(code: int) -> str:
    """Return the name of the signal that an exit code stands for; "" for other exit codes."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def describe_exit_code(code: int) -> str:
    """Return a phrase for an exit code, for error messages."""
    if code == UNKNOWN_EXIT_CODE:
        return "exit code unknown: the program ignores SIGCHLD, or waits for all of its children"
    return f"exit code {code}"


def explain_crash(code: int) -> str:
    """Return why a child with the limits of this process may have crashed; "" if unknown.

    This process may work with the same stack limit, because its stack has grown before.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    crashed = code in (-signal.SIGSEGV, -signal.SIGBUS)
    if not crashed or limit == resource.RLIM_INFINITY or limit >= _SMALL_STACK:
        return ""
    return (
        f"the limit of the stack (RLIMIT_STACK) is {limit >> 10} KB, which may be too little for a "
        "process that loads TVM; raise it with `ulimit -s 8192` before the program starts"
    )
