# SPDX-License-Identifier: Apache-2.0
"""Modules for external compilers, and how the tests run their passes."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


def apply(one: tvm.transform.Pass, module: tvm.IRModule) -> tvm.IRModule:
    """Run a pass: well-formed before and after, and the module that was given is untouched."""
    relax.analysis.well_formed(module)
    # Runtime modules, which attributes may hold, cannot be compared.
    plain = tvm.IRModule(dict(module.functions_items()), global_infos=module.global_infos)
    before = tvm.ir.load_json(tvm.ir.save_json(plain))
    after = one(module)
    relax.analysis.well_formed(after)
    plain = tvm.IRModule(dict(module.functions_items()), global_infos=module.global_infos)
    tvm.ir.assert_structural_equal(plain, before)
    return after


def functions(module: tvm.IRModule) -> dict[str, object]:
    return {global_var.name_hint: function for global_var, function in module.functions_items()}


def literal(
    body,
    *params: relax.Var,
    attrs: dict[str, object] | None = None,
    compiler: str | None = "cc",
) -> relax.Function:
    """A function literal, which TVMScript cannot write in a dataflow block or with a symbol."""
    builder = relax.BlockBuilder()
    with builder.function("f", list(params), attrs={"global_symbol": "f"}):
        with builder.dataflow():
            result = builder.emit_output(body(*params))
        builder.emit_func_output(result)
    function = builder.get()["f"].without_attr("global_symbol")
    if compiler is not None:
        function = function.with_attr("Codegen", compiler)
    for name, value in (attrs or {}).items():
        function = function.with_attr(name, value)
    return function


def tensor(name: str, *shape: object, dtype: str = "float32") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def partitioned(*, bound: bool = True) -> tvm.IRModule:
    """Two compilers' functions with a composite in each, as a partitioner leaves them in `main`."""
    rng = np.random.default_rng(0)
    weight = relax.const(rng.random((12, 8), dtype=np.float32))
    bias = relax.const(rng.random(12, dtype=np.float32))
    other = relax.const(rng.random((6, 4, 8), dtype=np.float32))

    def dense_bias(x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Function:
        def composite(*args):
            product = relax.op.matmul(args[0], relax.op.permute_dims(args[1]))
            return relax.op.add(product, args[2])

        inside = literal(
            composite,
            tensor("a", 16, 8),
            tensor("b", 12, 8),
            tensor("c", 12),
            attrs={"Composite": "cutlass.dense_bias", "PartitionedFromPattern": "dense_add_"},
            compiler=None,
        )
        return _calling(inside, [x, w, b], "cutlass", "tvmgen_cutlass_main_0")

    def batch_matmul(x: relax.Var, y: relax.Var) -> relax.Function:
        inside = literal(
            lambda a, b: relax.op.matmul(a, relax.op.permute_dims(b, [0, 2, 1])),
            tensor("a", 6, 4, 8),
            tensor("b", 6, 4, 8),
            attrs={"Composite": "cublas.batch_matmul", "PartitionedFromPattern": "batch_matmul_"},
            compiler=None,
        )
        return _calling(inside, [x, y], "cublas", "tvmgen_cublas_main_3")

    builder = relax.BlockBuilder()
    x0, x3 = tensor("x0", 16, 8), tensor("x3", 6, 4, 8)
    with builder.function("main", [x0, x3]):
        one = dense_bias(tensor("y0", 16, 8), tensor("y1", 12, 8), tensor("y2", 12))
        two = batch_matmul(tensor("z0", 6, 4, 8), tensor("z1", 6, 4, 8))
        if bound:
            one, two = builder.emit(one, "dense"), builder.emit(two, "batch")
        first = builder.emit(relax.Call(one, [x0, weight, bias]))
        second = builder.emit(relax.Call(two, [x3, other]))
        builder.emit_func_output([first, second])
    return builder.get()


def _calling(
    inside: relax.Function, params: list[relax.Var], compiler: str, symbol: str
) -> relax.Function:
    builder = relax.BlockBuilder()
    with builder.function("f", params, attrs={"global_symbol": "f"}):
        composite = builder.emit(inside, "composite")
        builder.emit_func_output(builder.emit(relax.Call(composite, params)))
    function = builder.get()["f"].with_attr("global_symbol", symbol)
    return function.with_attr("Codegen", compiler).with_attr("Inline", True)


@I.ir_module
class Elementwise:
    """One function for the compiler `cc`, with a symbolic shape."""

    @R.function
    def scaled(a: R.Tensor(("m", 4), "float32"), b: R.Tensor((4,), "float32")) -> R.Tensor(
        ("m", 4), "float32"
    ):
        R.func_attr({"Codegen": "cc", "Inline": True})
        m = T.int64()
        with R.dataflow():
            c: R.Tensor((m, 4), "float32") = R.multiply(a, b)
            d: R.Tensor((m, 4), "float32") = R.nn.relu(c)
            R.output(d)
        return d

    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4,), "float32")) -> R.Tensor(
        ("n", 4), "float32"
    ):
        n = T.int64()
        cls = Elementwise
        with R.dataflow():
            y: R.Tensor((n, 4), "float32") = R.exp(x)
            z: R.Tensor((n, 4), "float32") = cls.scaled(y, w)
            r: R.Tensor((n, 4), "float32") = R.add(z, x)
            R.output(r)
        return r
