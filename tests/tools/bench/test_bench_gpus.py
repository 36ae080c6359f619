# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc bench --calibrate --device cuda`, on the double of CUDA, whose times mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import cuda_double
from tvm_ipc.tools.bench.options import parse
from tvm_ipc.tools.options import OptionError

CODE = """
import tvm
import tvm_ipc
from tvm_ipc.tools.bench import calibrate_cost_model, overlap_programs
from tvm_ipc.calibration import Calibration
from tvm_ipc.tools.command_line import main
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.overlap.cost_model import Workload

if __name__ == "__main__":
    calibrate_cost_model._KERNELS = ((1, 8), (16,), (16,))
    calibrate_cost_model._BYTES = ((64, 1024),)
    calibrate_cost_model._PASSES = 1
    assert main(["bench", "--calibrate", "--device", "cuda", "--out", PATH]) == 0
    found = Calibration.load(PATH, workers=2, backend="cuda")
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    with collect_report() as report:
        pipeline = tvm_ipc.get_pipeline(target, 2, overlap=found)
        pipeline(overlap_programs.plain(Workload("allgather", 2, 64, 16, 16, 4, False)))
    for one in report.decisions:
        if one.pass_name == "OverlapCommunication":
            print(one.verdict, "|", one.reason)
    try:
        tvm_ipc.get_pipeline("llvm", 2, overlap=found)
    except ValueError as error:
        print(error)
"""


def test_a_calibration_of_gpus_decides_about_overlap(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    # The two workers share the device.
    out, report = cuda_double.run(f"PATH = {str(path)!r}\n{CODE}", devices=1, memory=1 << 30)
    found = json.loads(path.read_text())
    assert (found["backend"], found["workers"], found["blas_matmul"]) == ("cuda", 2, None)
    assert all(min(times["seconds"]) > 0 for times in found["collectives"].values())
    assert "2 workers, cuda" in out
    *_, decision, refusal = out.splitlines()
    assert "ms" in decision or "us" in decision, decision  # what was predicted with it
    assert "there is no calibration" not in decision
    assert "with the backend 'cuda', which does not apply to 'llvm'" in refusal
    assert report.violations == []


def test_no_link_is_emulated_between_gpus() -> None:
    with pytest.raises(OptionError, match="--bandwidth and --latency need --device cpu"):
        parse(["--calibrate", "--device", "cuda", "--bandwidth", "1e9"])
