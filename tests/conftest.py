# SPDX-License-Identifier: Apache-2.0
"""The tests look at the installed package, and have fresh interpreters at hand."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the checkout first on sys.path. There the package has no native library
# unless it was installed with `pip install -e`, which finds it without sys.path.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"

# A shell starts background jobs with Ctrl-C ignored, and programs pass that on to their children;
# the tests of what Ctrl-C does need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-rounds", type=int, default=6, help="how often the fault tests do their worst"
    )
    parser.addoption(
        "--race-rounds", type=int, default=20, help="how often a safe plan is run with delays"
    )
    parser.addoption(
        "--programs", type=int, default=24, help="how many random programs for each kind of session"
    )
    parser.addoption(
        "--shapes", type=int, default=24, help="how many programs of random shape expressions"
    )
    parser.addoption(
        "--operator-rounds", type=int, default=1, help="how many random calls of each operator"
    )
    parser.addoption(
        "--every-model", action="store_true", help="models of all types, on 1 to 8 workers"
    )
    parser.addoption(
        "--every-layout", action="store_true", help="2 and 4 nodes, of 1 to 3 workers each"
    )
    parser.addoption(
        "--graphs", type=int, default=16, help="how many random graphs are cut by random plans"
    )
    parser.addoption("--first-graph", type=int, default=0, help="the seed of the first of these")
    parser.addoption("--operator", help="only random calls of this operator, such as nn.conv2d")
    parser.addoption(
        "--packages", type=Path, help="folder of the built packages to test, instead of new ones"
    )
    parser.addoption("--program-seed", type=int, help="run this random program alone")
    parser.addoption("--program-size", type=int, help="statements of that program")
    parser.addoption("--program-ranks", help="of that program: 2, 3, or 4/2 for groups")


def pytest_report_header() -> str:
    import tvm_ipc

    return f"tvm_ipc: {Path(tvm_ipc.__file__).parent}"


def pytest_collection_finish() -> None:
    # What was imported stays: the collector need not look at it each time.
    gc.collect()
    gc.freeze()
    if "tvm" in sys.modules:
        _compile_quickly()


def _compile_quickly() -> None:
    """Let LLVM optimize nothing in this process where a target does not say how much it is to.

    What our passes make of programs is the same, and LLVM takes half of the time. Programs that
    other processes compile, and the demo's command, are optimized as users have them, and so is a
    part of the random programs, which have `"opt-level": 3`. (That command's tests look at all that
    is printed, and modules that are not optimized print a warning of TVM's when they are loaded.)
    """
    import tvm
    import tvm_ffi

    build = tvm_ffi.get_global_func("target.build.llvm", allow_missing=True)
    if build is None:
        return  # TVM's runtime alone

    def quickly(mod: Any, target: Any) -> Any:
        config = dict(target.export())
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if "opt-level" not in config and not test.startswith("tests/demo/test_demo_command.py"):
            config["opt-level"] = 0
            target = tvm.target.Target(config)
        return build(mod, target)

    tvm_ffi.register_global_func("target.build.llvm", quickly, override=True)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run code in a fresh interpreter, with variables such as TVM_USE_RUNTIME_LIB="1"."""

    def run(code: str, **environment: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
