# SPDX-License-Identifier: Apache-2.0
"""A parallelized model as text, in a prompt and in a notebook."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.one_function_modules import one_function
from tvm_ipc import parallelize


def chain(*widths: int, name: str = "w{}") -> tvm.IRModule:
    """Return a chain of matmuls, whose weights have these widths."""
    shapes = {name.format(k): pair for k, pair in enumerate(pairwise(widths))}

    def result(emit: Any, y: relax.Expr, *weights: relax.Var) -> relax.Expr:
        for weight in weights:
            y = emit(op.matmul(y, weight))
        return y

    return one_function(result, {"x": (tirx.Var("n", "int64"), widths[0]), **shapes}, num_input=1)


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


def test_one_rank_runs_the_program_as_it_is() -> None:
    program = chain(6, 8, 6, 2)
    made = parallelize(program, {"w0": "colwise", "w1": "rowwise"}, 1)
    tvm.ir.assert_structural_equal(made.module, program)
    tvm.ir.assert_structural_equal(made.placed, program)


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


def test_a_tuple_of_a_tensor_and_something_else() -> None:
    mod = tvm.script.from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
        R.func_attr({"num_input": 1})
        both = R.call_pure_packed(
            "f", x, ty_args=(R.Tuple(R.Shape(ndim=2), R.Tensor((4, 8), "float32")),)
        )
        return R.matmul(both[1], w)
""")
    assert parallelize(mod, {"w": "colwise"}, 2).collectives == {"allgather": 1}
