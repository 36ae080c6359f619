# SPDX-License-Identifier: Apache-2.0
"""What is said of a whole module."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc.tools.explain.summary_sentences import headline
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Question, explain


def test_the_headline_tells_what_is_returned_apart() -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((256,), "float32")):
            with R.dataflow():
                a = R.sort(x)
                b = R.sort(a)
                c = R.sort(b)
                R.output(b, c)
            return (b, c)

    explanation = explain(Module, Question("here", "llvm", 2, "auto", {}))
    assert headline(explanation) == (
        "The plan takes 1 KiB per worker, TVM's plan takes 1 KiB. At most 1 KiB are live at once, "
        "a lower bound for any plan. Results take another 2 KiB."
    )
