# SPDX-License-Identifier: Apache-2.0
"""Environment variables: what they mean, and what a wrong one says."""

from __future__ import annotations

import os

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


def test_workers_load_the_compiler_only_if_asked() -> None:
    assert worker_environment(2, compiler=False)["TVM_USE_RUNTIME_LIB"] == "1"
    assert worker_environment(2, compiler=True)["TVM_USE_RUNTIME_LIB"] == "0"
    assert worker_environment(2, compiler=True)["TVM_NUM_THREADS"] == "2"


def test_graphs_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TVM_IPC_CUDA_GRAPHS_OF_THREADS"
    for text, value in {"": False, "0": False, "1": True}.items():
        monkeypatch.setenv(name, text)
        assert config.graphs_of_threads() is value
    monkeypatch.setenv(name, "yes")
    with pytest.raises(IPCError, match=f"{name} is 'yes'; it must be 0 or 1"):
        config.graphs_of_threads()
