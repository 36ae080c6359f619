# SPDX-License-Identifier: Apache-2.0
"""Environment variables: what they mean, and what a wrong one says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.runtime.config import Config, parse_size, threads_per_worker, worker_environment

VARIABLES = ("TVM_IPC_TIMEOUT", "TVM_IPC_ARENA_LIMIT", "TVM_IPC_ISA")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert Config.from_environment() == Config(300.0, None, "auto")


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("2.5", "512M", "AVX2"), strict=True):
        monkeypatch.setenv(name, value)
    assert Config.from_environment() == Config(2.5, 512 << 20, "avx2")


def test_arguments_come_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_IPC_TIMEOUT", "1")
    monkeypatch.setenv("TVM_IPC_ARENA_LIMIT", "1")
    assert Config.from_environment(timeout=7, arena_limit=8) == Config(7, 8, "auto")
    assert Config.from_environment(timeout=7, arena_limit="8K") == Config(7, 8 << 10, "auto")


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("3k", 3 << 10), ("512M", 512 << 20), ("2GiB", 2 << 30), (" 1 TB ", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("TVM_IPC_TIMEOUT", value) for value in ("soon", "0", "-1", "inf", "nan")),
        *(("TVM_IPC_ARENA_LIMIT", value) for value in ("0", "lots", "-1", "2X", "1.5G", "M")),
        ("TVM_IPC_ISA", "sse9"),
    ],
)
def test_wrong_value_names_the_variable_and_the_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(IPCError, match=f"{name} is '{value}'"):
        Config.from_environment()


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert threads_per_worker(1) == cores
    assert threads_per_worker(cores) == threads_per_worker(2 * cores) == 1
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    assert threads_per_worker(2 * cores) == 3
    for wrong in ("one", "0", "-1", "2.0"):
        monkeypatch.setenv("TVM_NUM_THREADS", wrong)
        message = f"TVM_NUM_THREADS is '{wrong}'; it must be a number of threads above 0"
        with pytest.raises(IPCError, match=message):
            threads_per_worker(1)


def test_workers_load_the_compiler_only_if_asked() -> None:
    assert worker_environment(2, compiler=False)["TVM_USE_RUNTIME_LIB"] == "1"
    assert worker_environment(2, compiler=True)["TVM_USE_RUNTIME_LIB"] == "0"
    assert worker_environment(2, compiler=True)["TVM_NUM_THREADS"] == "2"


def test_queues_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TVM_IPC_CUDA_GRAPHS_OF_THREADS"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for text, queues in {"": 0, "0": 0, "1": 8}.items():
        monkeypatch.setenv(name, text)
        assert config.queues_for_graphs() == queues
    for text, queues in {"": 8, "16": 16, "32": 32, "64": 32, "0": 8, "many": 8}.items():
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", text)
        assert config.queues_for_graphs() == queues
    monkeypatch.setenv(name, "yes")
    with pytest.raises(IPCError, match=f"{name} is 'yes'; it must be 0 or 1"):
        config.queues_for_graphs()


# ---- unknown variables ---------------------------------------------------------------------


@pytest.fixture
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was reported, now and after the test."""
    monkeypatch.setenv(config._REPORTED, "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TVM_IPC_TIMOUT", "did you mean TVM_IPC_TIMEOUT?"),
        ("TVM_IPC_ARENA", "did you mean TVM_IPC_ARENA_LIMIT?"),
        ("TVM_IPC_LOG_LEVEL", "did you mean TVM_IPC_LOG?"),
        ("TVM_IPC_cache", "did you mean TVM_IPC_CACHE?"),
        ("TVM_IPC_XXXX", "the settings are TVM_IPC_TIMEOUT, "),
    ],
)
def test_an_unknown_variable_warns_once(
    name: str, hint: str, no_reports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning) as caught:
        Config.from_environment()
        Config.from_environment()
    [warning] = caught
    wanted = f"environment: {name} is not a setting of tvm_ipc and has no effect; {hint}"
    assert str(warning.message).startswith(wanted)


@pytest.mark.parametrize(
    "name",
    [
        *config.SETTINGS,
        *("TVM_IPC_FOLDER_OF_NODE", "TVM_IPC_ALLOCATION"),
        *("TVM_IPC_CUDA", "TVM_IPC_TEST_MARK", "TVM_IPC_DOUBLE_FAIL"),
    ],
)
def test_known_variables_do_not_warn(
    name: str, no_reports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert config.unknown_variables() == []


def test_a_report_is_no_setting(no_reports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_IPC_TIMOUT", "1")
    assert len(config.unknown_variables()) == 1
    assert config._REPORTED not in config.own_settings()
    assert config.settings_for_nodes()[config._REPORTED] == "TVM_IPC_TIMOUT"
    monkeypatch.setenv("TVM_IPC_TIMEOUTS", "1")  # a later one is reported too
    [message] = config.unknown_variables()
    assert "TVM_IPC_TIMEOUTS" in message


SESSIONS = """
import tvm_ipc
from tvm.runtime import disco
if __name__ == "__main__":
    for _ in range(2):
        with tvm_ipc.Session(2) as session:
            session.sync()
    plain = disco.ProcessSession(2)
    tvm_ipc.init_ccl(plain)
    plain.shutdown()
"""


@pytest.mark.parametrize("command", [False, True], ids=["program", "command"])
def test_workers_do_not_repeat_the_warning(command: bool) -> None:
    environment = {name: text for name, text in os.environ.items() if name != config._REPORTED}
    environment.update(TVM_IPC_TIMOUT="1", TVM_USE_RUNTIME_LIB="1")
    program = ["-m", "tvm_ipc", "doctor", "--json"] if command else ["-c", SESSIONS]
    result = subprocess.run(
        [sys.executable, *program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("TVM_IPC_TIMOUT is not a setting of tvm_ipc") == 1, result.stderr
    if command:
        assert result.stderr.startswith("tvm-ipc: warning: environment: TVM_IPC_TIMOUT ")
