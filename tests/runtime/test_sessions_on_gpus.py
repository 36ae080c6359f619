# SPDX-License-Identifier: Apache-2.0
"""Sessions on GPUs, from the call in Python to the kernels, on the double of CUDA.

All of tests/runtime can be run there, or on real GPUs: see `places.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cuda_double
from tests.child_python import output_of

HERE = Path(__file__).parent


def run(
    scenario: str,
    workers: int,
    kind: str,
    tmp_path: Path,
    backend: str = "cuda",
    **settings: object,
) -> None:
    report = tmp_path / "report"
    environment = cuda_double.environment(memory=1 << 30, report=report, **settings)
    said = output_of(
        *(HERE / "sessions_on_gpus.py", scenario, str(workers), kind),
        # Without TVM's compiler it starts in half the time.
        env={**environment, "TVM_USE_RUNTIME_LIB": "1", "TVM_IPC_TEST_BACKEND": backend},
        timeout=150,
    )
    assert said.endswith("done\n")
    assert cuda_double.read_report(report).violations == []


@pytest.mark.parametrize(
    ("scenario", "workers", "kind", "devices"),
    [
        ("collectives", 2, "processes", 4),
        ("collectives", 3, "threads", 4),
        ("collectives", 4, "processes", 4),
        ("values", 3, "processes", 4),
        ("values", 2, "threads", 4),
        ("waits", 3, "threads", 1),
        ("waits", 2, "threads", 2),
        ("errors", 3, "processes", 4),
        ("errors", 3, "threads", 4),
        ("deadline", 2, "processes", 4),
        ("deadline", 2, "threads", 1),
        ("death", 3, "processes", 4),
        ("beside", 2, "threads", 4),
        ("of_disco", 2, "processes", 4),
        ("of_disco", 2, "threads", 4),
    ],
)
def test_session(scenario: str, workers: int, kind: str, devices: int, tmp_path: Path) -> None:
    run(scenario, workers, kind, tmp_path, devices=devices)


@pytest.mark.parametrize(
    ("scenario", "kind", "devices", "backend"),
    [
        ("request_beside_program", "processes", 2, "cuda"),
        ("requests_in_order", "processes", 2, "cuda"),
        ("requests_in_order", "threads", 1, "cuda"),
        ("requests_in_order", "processes", 2, "nccl"),
        ("requests_in_order", "threads", 2, "nccl"),
        ("requests_keep_inputs", "processes", 2, "cuda"),
        ("requests_in_graphs", "processes", 2, "cuda"),
        ("request_deadline", "processes", 2, "cuda"),
        ("request_deadline", "threads", 1, "cuda"),
        ("streams_beside", "processes", 2, "cuda"),
        ("streams_in_order", "processes", 2, "cuda"),
        ("streams_in_order", "threads", 1, "cuda"),
        ("streams_in_order", "processes", 2, "nccl"),
        ("streams_refused", "processes", 2, "cuda"),
    ],
)
def test_requests_and_streams(
    scenario: str, kind: str, devices: int, backend: str, tmp_path: Path
) -> None:
    """They have a stream of their own, and programs may use several, whose operations are late."""
    run(scenario, 2, kind, tmp_path, backend, devices=devices, delay="7:2000")


@pytest.mark.parametrize(
    ("files", "some"),
    [
        (("test_teams.py", "test_views.py"), ""),
        (
            ("test_session_disagreement.py",),
            "operations_that_differ or order_that_differs or nobody",
        ),
        (
            ("test_session_errors.py",),
            "vm_function or no_memory_holds or value_of_another or without_a_text",
        ),
        (
            ("test_async_operations.py",),
            "goes_on or twice or kept or comes_home or not_started or post_different or waited_for",
        ),
    ],
)
def test_tests_of_cpus_pass_there(files: tuple[str, ...], some: str) -> None:
    """Some of them, which take seconds; `places.py` says how to run others."""
    environment = cuda_double.environment(devices=4, memory=1 << 30)
    output_of(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *(HERE / file for file in files)),
        *("-k", some),
        env={**environment, "TVM_IPC_TEST_BACKEND": "cuda"},
        timeout=200,
    )
