# SPDX-License-Identifier: Apache-2.0
"""Sessions under fire: always a Python exception in time, and nothing left behind.

`--fault-rounds N` says how often; the ordinary run is a short one. Every scenario runs in an
interpreter of its own (fault_scenarios.py), with a time limit: an abort or a hang fails the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.child_python import output_of, run_code

pytestmark = pytest.mark.slow  # kills and stops workers for minutes

SCENARIOS = Path(__file__).with_name("fault_scenarios.py")
#: Seconds for the start, and for each round on a busy machine.
START_SECONDS, ROUND_SECONDS = 60, 12


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-rounds"))


def run(scenario: str, rounds: int, seed: int = 0) -> None:
    timeout = START_SECONDS + ROUND_SECONDS * rounds
    said = output_of(SCENARIOS, scenario, str(rounds), str(seed), timeout=timeout)
    assert said.endswith("done\n")


def test_a_worker_is_killed_while_all_are_busy(rounds):
    run("kill", 2 * rounds)


def test_a_worker_is_killed_during_start_or_end(rounds):
    run("kill_at_the_ends", rounds)


def test_a_stopped_worker_is_named_after_the_deadline(rounds):
    run("stop", 1 + rounds // 10)


def test_a_stopped_worker_takes_no_command_and_nobody_waits_for_that(rounds):
    run("stop_with_long_commands", 2 + rounds // 10)


def test_a_worker_that_pauses_is_waited_for(rounds):
    run("pause", rounds)


def test_sessions_one_after_the_other(rounds):
    run("sessions", 5 * rounds)


@pytest.mark.parametrize("load", range(4))
def test_workers_end_with_a_controller_that_is_killed(load):
    process = subprocess.Popen(
        [sys.executable, str(SCENARIOS), "controller", str(load), "0"],
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        workers = json.loads(process.stdout.readline())
        time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    end = time.monotonic() + 5
    while running := [pid for pid in workers if _runs(pid)]:
        assert time.monotonic() < end, f"still there: {running}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_killed_worker_does_not_hang_a_session_that_the_user_made():
    """Nor does it abort the program, though worker 0 is a thread of it and stops in an error."""
    code = """
import os, signal, threading
from tvm.runtime import disco
import tvm_ipc
from tests.runtime import fault_scenarios
session = disco.ProcessSession(2)
session.import_python_module("tests.runtime.fault_scenarios")
tvm_ipc.init_ccl(session)
[worker] = fault_scenarios.children()
threading.Timer(0.2, os.kill, (worker, signal.SIGKILL)).start()
session.get_global_func("tests.reduce_for_ever")(100)
session._sync_worker(0)
"""
    result = run_code(code, timeout=60)
    assert result.returncode == 1
    assert "WorkerDiedError: rank 1 (pid " in result.stderr
