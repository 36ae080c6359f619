# SPDX-License-Identifier: Apache-2.0
"""Check the C++ compiler that TVM links compiled modules with, for `tvm-ipc doctor`."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.tools.format import error_text

_TIMEOUT_SECONDS = 60


def try_compiler(problem: str | None) -> dict[str, Any]:
    """Link a library with the compiler that TVM uses; `problem` is why TVM itself does not load."""
    facts: dict[str, Any] = {
        "command": None,
        "version": None,
        "works": False,
        "reason": problem,
        "settings": config.compiler_settings(),
    }
    if problem is not None:
        return facts
    from tvm.support import cc

    facts["command"] = command = cc.get_cc()
    if command is None:
        facts["reason"] = (
            "no C++ compiler was found, so load_vm_module accepts paths of libraries but not the "
            "result of tvm.compile; install g++ or clang, or name one in the environment variable "
            "CXX"
        )
        return facts
    try:
        with tempfile.TemporaryDirectory(prefix="tvm_ipc-") as folder:
            source, linked = Path(folder, "answer.cc"), Path(folder, "answer.so")
            source.write_text('extern "C" int Answer() { return 42; }\n')
            _run(command, "-shared", "-fPIC", "-o", str(linked), str(source))
            facts["works"] = ctypes.CDLL(str(linked)).Answer() == 42
        facts["version"] = _run(command, "--version").partition("\n")[0]
    except Exception as error:
        facts["reason"] = error_text(error)
    return facts


def _run(command: str, *arguments: str) -> str:
    """Run the compiler and return its output."""
    try:
        process = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except OSError as error:
        hint = "; TVM treats the whole text as one path" if " " in command else ""
        raise IPCError(f"{command!r} cannot be started: {error.strerror}{hint}") from error
    except subprocess.TimeoutExpired as error:
        raise IPCError(
            f"{command} took more than {_TIMEOUT_SECONDS} s to compile one line"
        ) from error
    text = process.stdout.decode("utf-8", "replace").strip()
    if process.returncode != 0:
        raise IPCError(
            f"{command} ended with exit code {process.returncode}: {text or 'it printed nothing'}"
        )
    return text
