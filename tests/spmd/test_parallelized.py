# SPDX-License-Identifier: Apache-2.0
"""A parallelized model as text, in a prompt and in a notebook."""

from __future__ import annotations

import re

import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_ipc import parallelize


def chain(*widths: int, name: str = "w{}") -> tvm.IRModule:
    """Return a chain of matmuls, whose weights have these widths."""
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, widths[0]), "float32"))
    weights = [
        relax.Var(name.format(k), relax.TensorType(widths[k : k + 2], "float32"))
        for k in range(len(widths) - 1)
    ]
    with builder.function("main", [x, *weights], attrs={"num_input": 1}):
        with builder.dataflow():
            y: relax.Expr = x
            for weight in weights:
                y = builder.emit(op.matmul(y, weight))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def test_what_is_sharded() -> None:
    made = parallelize(chain(6, 8, 6, 2), {"w0": "colwise", "w1": "rowwise"}, 2)
    assert repr(made) == (
        "<Parallelized: Mesh({'tp': 2}); sharded: w0 S[1] along 'tp', w1 S[0] along 'tp'; "
        "collectives: 1 allreduce; 240 bytes of parameters on each rank>"
    )
    assert str(made).startswith("on Mesh({'tp': 2}), 240 bytes of parameters on each rank, of 432")


def test_nothing_is_sharded() -> None:
    made = parallelize(chain(6, 8), {}, 2)
    assert "; sharded: nothing; collectives: none; " in repr(made)
    assert "Collectives" not in made._repr_html_()


def test_many_weights() -> None:
    """It is one line also of a model with many layers."""
    made = parallelize(chain(*[8] * 31), {"w*": "colwise"}, 2)
    assert "w3 S[1] along 'tp', 26 more; collectives: 30 allgather" in repr(made)
    assert "\n" not in repr(made)


def test_html() -> None:
    made = parallelize(chain(6, 8, 6, name="w<{}>"), {"w<0>": "colwise", "w<1>": "rowwise"}, 2)
    html = made._repr_html_()
    assert (
        "<tr><td>w&lt;0&gt;</td><td>(6, 8)</td><td>float32</td><td>S[1] along &#x27;tp&#x27;</td>"
        "<td></td><td>96</td></tr>"
    ) in html
    assert "<th>collective</th><th>reason</th>" in html
    assert "<td>allreduce of " in html
    assert re.findall(r"<(?!/?(?:div|table|thead|tbody|tr|th|td)>)", html) == []
