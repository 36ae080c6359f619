# SPDX-License-Identifier: Apache-2.0
"""How the command `tvm-ipc` talks: results, errors, a line that says what it is doing, Ctrl-C.

What cannot be printed ends in one line on the error output, or in none if that is gone too, and
never in a traceback. All commands print with these functions, so that it holds for each of them.
"""

from __future__ import annotations

import _thread
import argparse
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, NoReturn

from tvm_ipc.runtime.config import log_level

#: Lines of ours are no longer, where a text in them does not force them to be.
WIDTH: Final = 80
_CLEAR: Final = "\r\x1b[K"
_BAR: Final = 30
#: Seconds for which nobody wants to see a bar.
_SOON: Final = 1.0

_shown = False  # whether the line of `progress` is on the screen
_interrupted = False
_again: threading.Timer | None = None  # repeats a Ctrl-C that came at a bad moment


class OutputError(Exception):
    """The standard output takes no more; there is no message where its reader has left."""


@contextlib.contextmanager
def _output() -> Iterator[Any]:
    """Give the standard output, and say in our words why it refuses what is written."""
    stop_if_interrupted()
    clear()
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputError from error
    except (OSError, ValueError) as error:  # a ValueError where it was closed
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write to the standard output: {why}") from error


def say(text: str = "") -> None:
    """Print on the standard output, at once."""
    with _output() as output:
        output.write(f"{text}\n")


def write(text: str) -> None:
    """Print a piece of text on the standard output, at once, without ending the line."""
    with _output() as output:
        output.write(text)


def say_bytes(data: bytes) -> None:
    """Write to the standard output, whatever its encoding."""
    with _output() as output:
        output.buffer.write(data)


def can_say(text: str) -> bool:
    """Whether the standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeError:
        return False
    return True


def complain(text: str) -> None:
    """Print on the error output, if that is possible."""
    clear()
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def load_tvm(*, compiler: bool = True) -> None:
    """Import TVM and make it ready; what is wrong with the environment is an error, no warning.

    Parameters
    ----------
    compiler : of TVM. Without it a process has half the memory, and no PyTorch; one that has
        imported TVM already has what it has.
    """
    progress("loading TVM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tvm_ipc import runtime
        from tvm_ipc.runtime.importing import runtime_only

        if not compiler and "tvm" not in sys.modules:
            runtime_only()
        import tvm  # noqa: F401
    runtime.ready()


def hush() -> None:
    """Let what is still written to the error output, by native code too, go nowhere."""
    with contextlib.suppress(OSError):
        _discard(2)


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def progress(text: str) -> None:
    """Show on the error output what is being done, until something is printed.

    Only a terminal is shown this, and in one line, which the next text replaces. Where the log is
    printed, it says more.
    """
    global _shown
    stop_if_interrupted()
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and log_level() is None:
            room = os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
            sys.stderr.write(_CLEAR + text[: room - 1])
            sys.stderr.flush()
            _shown = True


def progress_bar(done: float, text: str) -> None:
    """Show how much is done, 0 to 1, and what is being done, as `progress` does."""
    full = round(done * _BAR)
    progress(f"[{'#' * full}{'.' * (_BAR - full)}] {done:4.0%} {text}")


class Bar:
    """A progress bar for what may take long; it is shown after a second.

    Parameters
    ----------
    wanted : whether it is shown at all.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._from = time.monotonic() + _SOON

    def show(self, done: float, text: str) -> None:
        """Show how much is done, 0 to 1, and what is being done."""
        if self._wanted and time.monotonic() >= self._from:
            progress_bar(done, text)

    def end(self) -> None:
        """Remove it."""
        if self._wanted:
            clear()


def clear() -> None:
    """Remove the line of `progress`."""
    global _shown
    if _shown:
        _shown = False
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def columns() -> int | None:
    """Return the width of the terminal that the standard output is; None if it is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


class Parser(argparse.ArgumentParser):
    """A command line whose help and errors are printed like everything else."""

    def error(self, message: str) -> NoReturn:
        """Exit with one line."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        (say if file in (None, sys.stdout) else complain)(message.rstrip("\n"))


@contextlib.contextmanager
def command(*, of_process: bool) -> Iterator[None]:
    """Make the standard streams and Ctrl-C ours; `of_process` says that the process ends after it.

    A Ctrl-C is remembered, since code in between may take it for an error of its own, or lose it.
    """
    _open_missing_streams()
    # What an encoding lacks, or a name that is none, is printed with escapes.
    if hasattr(sys.stdout, "reconfigure") and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    ours = (
        threading.current_thread() is threading.main_thread()
        # Not where a shell started us in the background, and Ctrl-C is not for us.
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    global _interrupted
    _interrupted = False
    hook = sys.unraisablehook
    if ours:
        signal.signal(signal.SIGINT, _remember)
        sys.unraisablehook = _unraisable
        if of_process:
            # As the last thing that Python does with its modules still there.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except (OutputError, KeyboardInterrupt):
        # Python would write the rest when it ends, and wait for the reader or complain.
        with contextlib.suppress(OSError, ValueError):
            _discard(sys.stdout.fileno())
        raise
    finally:
        if _again is not None:
            _again.cancel()
            _again.join()
        if ours:
            signal.signal(signal.SIGINT, _leave if of_process else signal.default_int_handler)
            if not of_process:
                sys.unraisablehook = hook


def _remember(_number: int, frame: FrameType | None) -> None:
    global _again, _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            # An exception would end nothing but the destructor, with its work half done.
            _again = threading.Timer(0.01, _thread.interrupt_main)
            _again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(what: Any) -> None:
    """Say nothing of a Ctrl-C where Python cannot raise it: it is remembered."""
    if not issubclass(what.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(what)


def _leave(_number: int, _frame: Any) -> None:
    """End now: everything is done, and Python's own end would make a traceback of an exception."""
    os._exit(130)


def _open_missing_streams() -> None:
    """Fill the places of standard streams that were closed before we started.

    Else the next file that is opened, a pipe to a worker perhaps, would get that place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # To write to the standard output must fail as if it were closed: a result that nobody
            # gets is an error. What is written to the error output just goes nowhere.
            how = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            if os.open(os.devnull, how) == number and getattr(sys, name) is None:
                mode = "r" if name == "stdin" else "w"
                setattr(sys, name, os.fdopen(number, mode, closefd=False))


def was_interrupted() -> bool:
    """Whether there was a Ctrl-C since the command began."""
    return _interrupted


def forget_interruption() -> None:
    """The command has ended, and what the program does next is not to be stopped by it."""
    global _interrupted
    _interrupted = False


def stop_if_interrupted() -> None:
    """Raise a Ctrl-C that was lost."""
    if _interrupted:
        raise KeyboardInterrupt
