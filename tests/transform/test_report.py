# SPDX-License-Identifier: Apache-2.0
"""A report as text, in a prompt and in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.tools.explain.text_report import render
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Question, explain
from tvm_ipc.transform import collect_report
from tvm_ipc.transform.report import Decision, Report


@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((4, 32), "float32"), w: R.Tensor((32, 8), "float32")):
        with R.dataflow():
            part = R.matmul(x, w)
            total = R.ccl.allreduce(part, "sum")
            R.output(total)
        return total


def test_text_is_that_of_explain(tmp_path: Path) -> None:
    """`tvm-ipc explain --text` prints what `print(report)` prints, for the same passes."""
    with collect_report() as report:
        tvm_ipc.get_pipeline("llvm", 2)(Model)
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(Model))
    command = [sys.executable, "-m", "tvm_ipc", "explain", str(path), "--text"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = str(report).splitlines()
    assert lines[0] == "Decisions"
    assert len(lines) > 2
    assert all(len(line) < 80 for line in lines)
    assert str(report) in result.stdout
    explanation = explain(Model, Question("model", "llvm", 2, "auto", {}))
    assert str(explanation.report) == str(report)
    assert str(report) in render(explanation)


def test_an_empty_report() -> None:
    assert str(Report()) == "No pass had anything to decide."
    assert repr(Report()).startswith("<Report: 0 decisions and 0 memory plans")
    assert Report()._repr_html_() == (
        "<div>No pass had anything to decide.</div><table><tbody></tbody></table>"
    )


@pytest.mark.parametrize("count", [1, 3])
def test_texts(count: int) -> None:
    """Decisions with the same reason are one row; text of the program is escaped."""
    report = Report(
        [
            Decision("P", "f<1>", f"allreduce of lv{k} (a & b)", "skipped", "x < y")
            for k in range(count)
        ]
    )
    noun = "decision" if count == 1 else "decisions"
    assert repr(report) == (
        f"<Report: {count} {noun} and 0 memory plans; print(report) prints the decisions>"
    )
    about = "allreduce of lv0 (a & b)" + (" and 2 more" if count == 3 else "")
    assert str(report) == f"Decisions\n  f<1>: {about}: skipped\n      x < y (P)"
    html = report._repr_html_()
    assert html.count("<tr>") == 2
    about = about.replace("&", "&amp;")
    assert f"<td>f&lt;1&gt;</td><td>{about}</td><td>skipped</td><td>x &lt; y</td>" in html
