# SPDX-License-Identifier: Apache-2.0
"""Weights come into the memory of GPUs by way of the host's; on the doubles of CUDA and NCCL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import cuda_double
from tests.models.weights import weight_files

pytestmark = [
    pytest.mark.skipif(
        "not __import__('shutil').which('cmake')", reason="the double is built with cmake"
    ),
]

LOAD = """
import numpy as np
import tvm_ipc
from tests.models.weights import weight_files
from tvm_ipc.models.weights import safetensors_header

arrays = {{
    "w": np.arange(35, dtype="float32").reshape(5, 7),
    "v": np.arange(12).reshape(2, 6).astype("bfloat16"),
    "n": np.array(3, "int32"),
}}
with tvm_ipc.Session(2, device="cuda", backend="nccl", timeout=60) as session:
    cuts = weight_files.cuts_of(arrays, 2)
    for source in ({path!r}, arrays):
        weights = tvm_ipc.load_weights(session, source, cuts)
        for name, cut in cuts.items():
            for rank in range(2):
                found = session.get(weights[name], rank)
                np.testing.assert_array_equal(found, cut.shard(arrays[name], rank), strict=True)
print("right")
"""


def test_every_rank_has_its_part(tmp_path: Path) -> None:
    arrays = {
        "w": np.arange(35, dtype="float32").reshape(5, 7),
        "v": np.arange(12).reshape(2, 6).astype("bfloat16"),
        "n": np.array(3, "int32"),
    }
    path = weight_files.write(tmp_path / "model.safetensors", arrays)
    program = LOAD.format(path=str(path))
    out, report = cuda_double.run(program, devices=2)
    assert out == "right\n"
    assert report.violations == []
    assert any("cuMemcpyHtoD" in call for call in report.calls)
