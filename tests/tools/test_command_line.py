# SPDX-License-Identifier: Apache-2.0
"""The command `tvm-ipc` as a process: whatever its streams are, one line and no traceback."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tvm_ipc.__main__ import main
from tvm_ipc.tools import terminal

pytestmark = pytest.mark.slow  # runs each command

COMMAND = (sys.executable, "-m", "tvm_ipc")
DEMO = ("demo", "--workers", "1", "--tokens", "2", "--prompt-length", "4", "--layers", "1")
QUICK = [(), ("--version",), *((name, "--help") for name in ("demo", "explain", "run"))]
SLOW = [("doctor",), DEMO, ("explain", "--demo", "--text"), ("explain", "--demo", "-o", "-")]
BENCH = ("bench", "overlap", "--rows", "8", "--rounds", "1")


def run(*arguments: str, shell: str = "", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command, with redirections as a shell has them."""
    environment = {**os.environ, **options.pop("env", {})}
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", *COMMAND, *arguments]
    return subprocess.run(line, capture_output=True, env=environment, timeout=120, **options)


@pytest.mark.parametrize("arguments", [*QUICK, *SLOW], ids=" ".join)
def test_full_output_is_one_line(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, shell=">/dev/full")
    message = b"tvm-ipc: cannot write to the standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, message)


@pytest.mark.parametrize("arguments", [*QUICK, *SLOW], ids=" ".join)
def test_ascii_is_enough(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii() or arguments[-1] == "-"  # the page says what it is


@pytest.mark.parametrize("arguments", [*QUICK, DEMO], ids=" ".join)
def test_closed_streams(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, shell=">&-")
    message = b"tvm-ipc: cannot write to the standard output: Bad file descriptor\n"
    assert (result.returncode, result.stderr) == (1, message)
    others = run(*arguments, shell="2>&- <&-")
    assert others.returncode == 0
    assert others.stdout


@pytest.mark.parametrize("arguments", [*QUICK, DEMO], ids=" ".join)
def test_reader_that_leaves_is_no_news(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_alone_it_prints_help() -> None:
    result = run()
    assert result.returncode == 0
    assert result.stdout == run("--help").stdout
    for name in (b"doctor", b"demo", b"explain"):
        assert name in result.stdout


@pytest.mark.parametrize(
    "arguments", [("no-such",), ("doctor", "--no-such"), ("--no-such",), ("doctor", "more"), ("",)]
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, b"")
    assert re.fullmatch(rb"tvm-ipc[^\n]*--help\)\n", result.stderr)


@pytest.mark.parametrize("columns", ["1", "-3", "1000", "wide"])
def test_help_at_any_width(columns: str) -> None:
    for command in ((), ("bench",), ("bench", "overlap"), ("demo",), ("explain",)):
        assert run(*command, "--help", env={"COLUMNS": columns}).returncode == 0


def test_an_error_that_nobody_expected_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise OSError(30, "Read-only file system", "/tmp")

    monkeypatch.setattr("tvm_ipc.tools.demo.main", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "tvm-ipc: OSError: [Errno 30] Read-only file system: '/tmp' (more with --traceback)\n"
    )
    with pytest.raises(OSError, match="Read-only"):
        main(["--traceback", "demo"])


@pytest.mark.parametrize("command", ["demo", "explain"])
def test_a_wrong_variable_is_one_line(command: str) -> None:
    options = ("--demo", "--text") if command == "explain" else ()
    result = run(command, *options, env={"TVM_IPC_LOG": "loud"})
    assert result.returncode == 1
    assert result.stdout == b""
    assert re.fullmatch(rb"tvm-ipc: TVM_IPC_LOG is 'loud'; it must be one of .*\n", result.stderr)


@pytest.mark.parametrize(
    ("compiler", "reason"), [("ccache g++", b"No such file"), ("false", b"Command line: false")]
)
def test_a_compiler_that_does_not_link_is_one_line(compiler: str, reason: bytes) -> None:
    result = run(*DEMO, env={"CXX": compiler})
    assert result.returncode == 1
    assert result.stderr.startswith(b"tvm-ipc: the executable could not be linked into a library")
    assert reason in result.stderr
    assert result.stderr.endswith(b"`tvm-ipc doctor` tries the one that it would take\n")


@pytest.mark.parametrize("width", [80, 20])
def test_a_terminal_is_told_what_is_being_done(width: int) -> None:
    controller, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "explain", "--demo", "--text"], stdout=subprocess.PIPE, stderr=screen
    )
    os.close(screen)
    drawn = read_all(controller)
    process.communicate(timeout=120)
    os.close(controller)
    assert process.returncode == 0
    *shown, end = drawn.split("\r\x1b[K")[1:]
    assert end == ""
    assert "loading TVM" in shown
    assert "StaticPlanBlockMemory"[: width - 1] in shown
    assert max(map(len, shown)) < width


def read_all(controller: int) -> str:
    parts = []
    try:
        while part := os.read(controller, 1 << 16):
            parts.append(part)
    except OSError:  # nobody has the terminal open any more
        pass
    return b"".join(parts).decode()


#: Long enough for a start, an import of TVM, a compilation, a session.
MOMENTS = (0.1, 0.6, 1.4)
#: An interrupt while Python itself starts is not ours to hear.
STARTED = "import sys, tvm_ipc.__main__ as m; print('up', flush=True); sys.exit(m.main())"
#: What TVM says by itself where an exception of Python ends its building of a function.
OF_TVM = re.compile(rb".*Warning: BlockBuilder destroyed with remaining blocks!\n")


@pytest.mark.parametrize("arguments", [("doctor",), DEMO, ("explain", "--demo", "--text"), BENCH])
def test_interrupt_at_any_moment_is_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for moment in MOMENTS:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTED, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        time.sleep(moment)
        # As a terminal does it: to the C++ compiler, too.
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
        done = (process.returncode, OF_TVM.sub(b"", error))
        assert done in ((130, b"tvm-ipc: interrupted\n"), (0, b"")), f"after {moment} s"
        assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_was_taken_for_an_error_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []

    class Cleaner:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)

    def lose(arguments: list[str]) -> int:
        if arguments == ["in-destructor"]:
            Cleaner()
        else:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                if arguments == ["as-error"]:
                    raise RuntimeError("something else") from error
        terminal.print_out("a result")
        return 0

    monkeypatch.setattr("tvm_ipc.tools.demo.main", lose)
    for arguments in (["demo"], ["demo", "as-error"], ["demo", "in-destructor"]):
        assert main(arguments) == 130
        assert capsys.readouterr() == ("", "tvm-ipc: interrupted\n")
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    terminal.print_out("the program goes on")
    assert capsys.readouterr().out == "the program goes on\n"
