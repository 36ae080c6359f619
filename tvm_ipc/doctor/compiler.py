# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler that TVM links with: which one it is, and whether it links."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tvm_ipc.doctor.reason import reason_of
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

#: Nobody waits longer for a compiler.
_SECONDS = 60


def try_compiler(problem: str | None) -> dict[str, Any]:
    """Find the compiler that TVM would take, and link a library with it."""
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
            "there is none; without it load_vm_module takes paths of libraries only, and not what "
            "tvm.compile returned: install g++ or clang, or name one in the environment variable "
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
        facts["reason"] = reason_of(error)
    return facts


def _run(command: str, *arguments: str) -> str:
    """Run it and return what it prints."""
    try:
        done = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except OSError as error:
        hint = "; TVM takes all of it for one path" if " " in command else ""
        raise IPCError(f"{command!r} cannot be started: {error.strerror}{hint}") from error
    except subprocess.TimeoutExpired as error:
        raise IPCError(f"{command} took more than {_SECONDS} s for one line") from error
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0:
        raise IPCError(f"{command} ended with exit code {done.returncode}: {text or 'no words'}")
    return text
