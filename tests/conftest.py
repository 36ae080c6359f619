# SPDX-License-Identifier: Apache-2.0
"""The tests look at the installed package, and have fresh interpreters at hand."""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the checkout first on sys.path. There the package has no native library
# unless it was installed with `pip install -e`, which finds it without sys.path. Last on the path,
# the checkout provides the package `tests` alone.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
sys.path.append(str(ROOT))
os.environ["PYTHONSAFEPATH"] = "1"
# Programs that tests start import helpers as `tests.<folder>.<module>` too. Their path comes before
# the installed packages, so it has a folder with a link to the tests and nothing else.
_children_path = tempfile.TemporaryDirectory(prefix="tvm_ipc_tests-")
Path(_children_path.name, "tests").symlink_to(ROOT / "tests")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_children_path.name, os.environ.get("PYTHONPATH")])
)
# The pipeline checks each module after each phase, in this process and in those that tests start.
os.environ["TVM_IPC_VERIFY_EACH"] = "1"

# A shell starts background jobs with Ctrl-C ignored, and programs pass that on to their children;
# the tests of what Ctrl-C does need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


#: Random tests, by option: how many rounds by default, with `--full`, and of what.
ROUNDS = {
    "--fault-rounds": (4, 20, "rounds of the fault tests"),
    "--race-rounds": (10, 50, "runs of a safe plan with delays"),
    "--programs": (12, 240, "random programs for each kind of session"),
    "--shapes": (12, 120, "programs of random shape expressions"),
    "--operator-rounds": (1, 10, "random calls of each operator"),
    "--mutants": (60, 1000, "wrong programs that the verifier has to find"),
    "--graphs": (40, 400, "random graphs that are sharded by random plans"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="tests marked `slow` too, as in CI")
    parser.addoption(
        "--full",
        action="store_true",
        help="everything: slow tests, all models and layouts, many random programs",
    )
    for option, (few, many, rounds) in ROUNDS.items():
        parser.addoption(
            option, type=int, help=f"number of {rounds} (default: {few}; with --full: {many})"
        )
    parser.addoption(
        "--every-model", action="store_true", help="models of all types, on 1 to 8 workers"
    )
    parser.addoption(
        "--every-layout", action="store_true", help="2 and 4 nodes, of 1 to 3 workers each"
    )
    parser.addoption("--first-graph", type=int, default=0, help="seed of the first random graph")
    parser.addoption("--operator", help="only random calls of this operator, such as nn.conv2d")
    parser.addoption(
        "--packages", type=Path, help="folder of the built packages to test, instead of new ones"
    )
    parser.addoption("--program-seed", type=int, help="run this random program alone")
    parser.addoption("--program-size", type=int, help="statements of that program")
    parser.addoption("--program-ranks", help="of that program: 2, 3, or 4/2 for groups")
    parser.addoption(
        "--passed-to", type=Path, metavar="FILE", help="write the names of the tests that passed"
    )
    parser.addoption(
        "--not-passed-in",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="leave out tests that passed in the run with `--passed-to FILE`",
    )


def pytest_configure(config: pytest.Config) -> None:
    full = config.getoption("--full")
    for option, (few, many, _) in ROUNDS.items():
        name = option[2:].replace("-", "_")
        if getattr(config.option, name) is None:
            setattr(config.option, name, many if full else few)
    if full:
        config.option.slow = config.option.every_model = config.option.every_layout = True


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = {
        name
        for file in config.getoption("--not-passed-in")
        for name in file.read_text().splitlines()
    }
    if missing := sorted(passed - {item.nodeid for item in items}):
        raise pytest.UsageError(
            f"--not-passed-in: {len(missing)} tests of the other run are not in this one, such as "
            f"{missing[0]}; run all of tests/, with the packages that the other run had"
        )
    if passed:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    for item in items:
        # Tests on the fake CUDA driver build it first, which takes minutes.
        if hasattr(getattr(item, "module", None), "cuda_double"):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --slow or --full"))


_passed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--passed-to")
    if file and not hasattr(session.config, "workerinput"):  # not in a process of pytest-xdist
        file.write_text("".join(f"{name}\n" for name in _passed))


def pytest_report_header() -> str:
    import tvm_ipc

    return f"tvm_ipc: {Path(tvm_ipc.__file__).parent}"


def pytest_collection_finish() -> None:
    # What was imported stays: the collector need not look at it each time.
    gc.collect()
    gc.freeze()
    if "tvm" in sys.modules:
        _compile_quickly()
    _read_scripts_quickly()


def _read_scripts_quickly() -> None:
    """Let `inspect.stack` read the source lines of the first three frames alone.

    TVM calls it for each decorated function of a script, and uses the line of the third frame.
    `inspect` searches all modules for the line of each frame. Under pytest the stack has about
    seventy frames, and the search took half of the time of tests with scripts.
    """

    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            code, number = frame.f_code, frame.f_lineno
            line = linecache.getline(code.co_filename, number) if len(frames) < 3 else ""
            lines, index = ([line], 0) if line else (None, None)
            where = (frame, code.co_filename, number, code.co_name)
            frames.append(inspect.FrameInfo(*where, lines, index))
            frame = frame.f_back
        return frames

    inspect.stack = stack


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
        if "opt-level" not in config and not test.startswith(
            "tests/tools/demo/test_demo_command.py"
        ):
            config["opt-level"] = 0
            target = tvm.target.Target(config)
        return build(mod, target)

    tvm_ffi.register_global_func("target.build.llvm", quickly, override=True)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run code in a fresh interpreter, with variables such as TVM_USE_RUNTIME_LIB="1"."""

    from tests.child_python import output_of_code

    return lambda code, **environment: output_of_code(code, environment=environment, compiler=True)
