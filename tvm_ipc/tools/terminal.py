# SPDX-License-Identifier: Apache-2.0
"""Print results, errors and progress for all `tvm-ipc` commands, and handle Ctrl-C.

Output that cannot be written ends the command with one line on the error output, never with a
traceback. If the error output is closed too, nothing is printed.
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
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from tvm_ipc.runtime import standard_fd_reservation, terminal_progress_line

WIDTH = terminal_progress_line.WIDTH
clear = terminal_progress_line.clear
progress = terminal_progress_line.progress
progress_bar = terminal_progress_line.progress_bar

_interrupted = False
_repeat_timer: threading.Timer | None = None  # repeats a Ctrl-C that a destructor would lose


class OutputError(Exception):
    """Raised if the standard output cannot be written; has no message for a closed pipe."""


@contextlib.contextmanager
def _checked_stdout() -> Iterator[Any]:
    """Yield the standard output, and convert its errors to `OutputError`."""
    stop_if_interrupted()
    clear()
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputError from error
    except (OSError, ValueError) as error:  # a ValueError if it was closed
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write to the standard output: {reason}") from error


def print_out(text: str = "") -> None:
    """Print a line on the standard output, and flush it."""
    with _checked_stdout() as output:
        output.write(f"{text}\n")


def write(text: str) -> None:
    """Print a text on the standard output without a newline, and flush it."""
    with _checked_stdout() as output:
        output.write(text)


def print_bytes(data: bytes) -> None:
    """Write bytes to the standard output, independently of its encoding."""
    with _checked_stdout() as output:
        output.buffer.write(data)


def can_print(text: str) -> bool:
    """Return whether the encoding of the standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeError:
        return False
    return True


def print_err(text: str) -> None:
    """Print a line on the error output, if it is open."""
    clear()
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def load_tvm(*, compiler: bool = True) -> None:
    """Import TVM and load the native library; problems of the environment raise errors.

    Parameters
    ----------
    compiler : whether to import TVM's compiler. A process without it uses half the memory and does
        not import PyTorch. This has no effect if TVM is already imported.
    """
    progress("loading TVM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tvm_ipc import runtime
        from tvm_ipc.runtime.import_tvm_without_compiler import runtime_only

        if not compiler and "tvm" not in sys.modules:
            runtime_only()
        import tvm  # noqa: F401
    runtime.ready()


def discard_output() -> None:
    """Redirect the error output to /dev/null, also for native code."""
    with contextlib.suppress(OSError):
        _redirect_to_null(2)


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def columns() -> int | None:
    """Return the width of the standard output's terminal; None if it is not a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


class Parser(argparse.ArgumentParser):
    """An argument parser that prints help and errors with the functions of this module."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error message of one line."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        (print_out if file in (None, sys.stdout) else print_err)(message.rstrip("\n"))


@contextlib.contextmanager
def command(*, ends_process: bool) -> Iterator[None]:
    """Prepare the standard streams and Ctrl-C for a command, and restore Ctrl-C after it.

    A Ctrl-C is recorded, because other code may convert or swallow its exception. `ends_process`
    specifies whether the process ends after the command.
    """
    _open_missing_streams()
    # Print characters that the encoding lacks, and undecodable file names, with escapes.
    if hasattr(sys.stdout, "reconfigure") and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    handles_sigint = (
        threading.current_thread() is threading.main_thread()
        # A shell that starts a background process ignores Ctrl-C for it.
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    global _interrupted
    _interrupted = False
    hook = sys.unraisablehook
    if handles_sigint:
        signal.signal(signal.SIGINT, _record_interrupt)
        sys.unraisablehook = _ignore_unraisable_interrupt
        if ends_process:
            # Runs last, while the modules still exist.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except (OutputError, KeyboardInterrupt):
        # Python would flush the buffer at exit, and block or print an error.
        with contextlib.suppress(OSError, ValueError):
            _redirect_to_null(sys.stdout.fileno())
        raise
    finally:
        if _repeat_timer is not None:
            _repeat_timer.cancel()
            _repeat_timer.join()
        if handles_sigint:
            handler = _exit_now if ends_process else signal.default_int_handler
            signal.signal(signal.SIGINT, handler)
            if not ends_process:
                sys.unraisablehook = hook


def _record_interrupt(_number: int, frame: FrameType | None) -> None:
    """Record a Ctrl-C and raise it, later if a destructor is running."""
    global _repeat_timer, _interrupted
    _interrupted = True
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            # An exception would only abort the destructor.
            _repeat_timer = threading.Timer(0.01, _thread.interrupt_main)
            _repeat_timer.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _ignore_unraisable_interrupt(unraisable: Any) -> None:
    """Ignore a Ctrl-C that Python cannot raise, because it is recorded."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _exit_now(_number: int, _frame: Any) -> None:
    """Exit at once: the command is done, and Python would print a traceback at exit."""
    os._exit(130)


def _open_missing_streams() -> None:
    """Replace standard streams that were closed before this process started.

    Writing to the standard output then fails, because results must not be lost silently. The error
    output is discarded.
    """
    standard_fd_reservation.fill()
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


class InterruptibleCommand:
    """Ctrl-C in a command that goes on after it; use it in a `with` block.

    In `wait_for_line`, Ctrl-C raises a `KeyboardInterrupt`. Elsewhere the first Ctrl-C is only
    recorded as `pressed`, so that it cannot interrupt a command of a session; unless `clear` is
    called, the next `wait_for_line` raises it. A second Ctrl-C before `clear` ends the program, as
    in other commands.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._waiting = False
        self._handles = False

    def __enter__(self) -> InterruptibleCommand:
        """Handle Ctrl-C, if the command records interrupts."""
        self._handles = signal.getsignal(signal.SIGINT) is _record_interrupt
        if self._handles:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Record interrupts again."""
        if self._handles:
            signal.signal(signal.SIGINT, _record_interrupt)

    def clear(self) -> None:
        """Forget a Ctrl-C."""
        self.pressed = False

    def wait_for_line(self, prompt: str) -> str | None:
        """Return the next line of the standard input, or None at its end.

        The prompt is printed if the standard input is a terminal.
        """
        try:
            self._waiting = True
            if self.pressed:  # since the last `clear`
                self.pressed = False
                raise KeyboardInterrupt
            return _read_line(prompt)
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            raise KeyboardInterrupt
        if self.pressed:
            _record_interrupt(number, frame)
        self.pressed = True


def _read_line(prompt: str) -> str | None:
    clear()
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    if not sys.stdout.isatty():  # it has the answers only
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(prompt)
            sys.stderr.flush()
        return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the function `input` then edits lines
    try:
        return input(prompt)
    except EOFError:
        return None


def was_interrupted() -> bool:
    """Return whether there was a Ctrl-C since the command began."""
    return _interrupted


def forget_interruption() -> None:
    """Clear the record of a Ctrl-C at the end of a command."""
    global _interrupted
    _interrupted = False


def stop_if_interrupted() -> None:
    """Raise a `KeyboardInterrupt` if there was a Ctrl-C that other code swallowed."""
    if _interrupted:
        raise KeyboardInterrupt


terminal_progress_line.before_output = stop_if_interrupted
