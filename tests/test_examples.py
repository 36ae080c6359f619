# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run, and print what they say they show.

That of a model of transformers is in tests/models/hf/test_example.py, with the tests that want
PyTorch.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHOWN = {
    "allreduce_by_hand": "the same bits on all workers, both ways",
    "tensor_parallel_mlp": "allreduce of y along 'tp'",
    "overlap": "overlapped, 2 chunks",
    "passes_in_your_own_sequential": "allreduce of part (sum): rewritten",
    "your_own_compiler": "our compiler is given ['fused_relax_tanh_cpp']",
}


@pytest.mark.parametrize("name", SHOWN)
def test_example_shows_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out


def test_decoder_generates_the_same_tokens_on_two_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_module("tvm_ipc.examples.tensor_parallel_decoder", run_name="__main__")
    (one, two) = capsys.readouterr().out.splitlines()
    assert one.replace("workers: 1", "workers: 2") == two


def test_each_example_is_run_and_short() -> None:
    programs = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(programs) == {*SHOWN, "hugging_face_model"}
    assert [name for name, text in programs.items() if len(text.splitlines()) >= 60] == []
