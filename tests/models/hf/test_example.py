# SPDX-License-Identifier: Apache-2.0
"""The example of a model of transformers says what PyTorch says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]


def test_example_says_what_pytorch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path))
    program = ROOT / "examples" / "hugging_face_model.py"
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "the same tokens"
