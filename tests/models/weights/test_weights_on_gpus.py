# SPDX-License-Identifier: Apache-2.0
"""Weights come into the memory of GPUs by way of the host's; on the doubles of CUDA and NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cuda_double
from tests.models.weights import weight_files

pytestmark = [
    pytest.mark.skipif(
        "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
    ),
]

LOAD = """
import tvm_ipc
from tests.models.weights import weight_files
from tests.models.weights.weight_files import SMALL as arrays

with tvm_ipc.Session(2, device="cuda", backend="nccl", timeout=60) as session:
    cuts = weight_files.cuts_of(arrays, 2)
    for source in ({path!r}, arrays):
        weight_files.compare(session, tvm_ipc.load_weights(session, source, cuts), cuts, arrays)
print("right")
"""


def test_every_rank_has_its_part(tmp_path: Path) -> None:
    path = weight_files.write(tmp_path / "model.safetensors", weight_files.SMALL)
    program = LOAD.format(path=str(path))
    out, report = cuda_double.run(program, devices=2)
    assert out == "right\n"
    assert report.violations == []
    assert any("cuMemcpyHtoD" in call for call in report.calls)
