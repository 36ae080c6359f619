# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in Python interpreters of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    compiler: bool = False,
    timeout: float = 120,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with arguments; without TVM's compiler it starts in half the time."""
    variables = {} if compiler else {"TVM_USE_RUNTIME_LIB": "1"}
    usual = {
        "env": {**os.environ, **variables, **(environment or {})},
        "capture_output": True,
    }
    return subprocess.run(
        [sys.executable, *arguments], timeout=timeout, text=True, check=False, **(usual | options)
    )


def run_code(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that is given as text."""
    return run("-c", code, *arguments, **options)


def output_of(*arguments: str | Path, **options: Any) -> str:
    """Return what a program prints, which must end as it should."""
    done = run(*arguments, **options)
    said = f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    assert done.returncode == 0, said
    return done.stdout


def output_of_code(code: str, *arguments: str, **options: Any) -> str:
    """Return what a program prints that is given as text, which must end as it should."""
    return output_of("-c", code, *arguments, **options)
