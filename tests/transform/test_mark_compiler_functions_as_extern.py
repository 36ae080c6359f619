# SPDX-License-Identifier: Apache-2.0
"""MarkCompilerFunctionsAsExtern: the signature stays, the rest goes."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.transform.byoc_modules import Elementwise, apply, functions, partitioned
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    ExistingGlobalSymbols,
    MarkCompilerFunctionsAsExtern,
    OutlineCompilerFunctions,
)


def test_a_function_becomes_a_declaration_and_its_callers_are_unchanged():
    after = apply(MarkCompilerFunctionsAsExtern("cc"), Elementwise)
    declaration = after["scaled"]
    assert isinstance(declaration, relax.ExternFunc)
    assert declaration.global_symbol == "scaled"
    assert tvm_ffi.structural_equal(declaration.ty, Elementwise["scaled"].ty)
    assert dict(declaration.attrs) == {"tvm_ipc.extern": True}
    assert after["main"].same_as(Elementwise["main"])
    assert after.get_global_var("scaled").same_as(Elementwise.get_global_var("scaled"))


def test_only_the_functions_of_one_compiler_are_marked():
    outlined = OutlineCompilerFunctions(cache=ExistingGlobalSymbols())(partitioned())
    after = apply(MarkCompilerFunctionsAsExtern("cutlass"), outlined)
    kinds = {name: type(function) for name, function in functions(after).items()}
    assert kinds == {
        "main": relax.Function,
        "tvmgen_cutlass_main_0": relax.ExternFunc,
        "tvmgen_cublas_main_3": relax.Function,
    }
    assert "Codegen" in after["tvmgen_cublas_main_3"].attrs
    again = apply(MarkCompilerFunctionsAsExtern("cutlass"), after)
    tvm.ir.assert_structural_equal(again, after)
    both = apply(MarkCompilerFunctionsAsExtern("cublas"), after)
    assert isinstance(both["tvmgen_cublas_main_3"], relax.ExternFunc)


def test_without_an_argument_the_functions_of_all_compilers_are_marked():
    outlined = OutlineCompilerFunctions(cache=ExistingGlobalSymbols())(partitioned())
    after = apply(MarkCompilerFunctionsAsExtern(), outlined)
    kinds = {name: type(function) for name, function in functions(after).items()}
    assert kinds == {
        "main": relax.Function,
        "tvmgen_cutlass_main_0": relax.ExternFunc,
        "tvmgen_cublas_main_3": relax.ExternFunc,
    }
    one_by_one = MarkCompilerFunctionsAsExtern("cublas")(
        MarkCompilerFunctionsAsExtern("cutlass")(outlined)
    )
    tvm.ir.assert_structural_equal(after, one_by_one)
    with pytest.raises(TransformError, match="'main' contains a function literal for a compiler"):
        MarkCompilerFunctionsAsExtern()(partitioned())


def test_a_declaration_survives_json_and_the_passes_of_tvm():
    after = apply(MarkCompilerFunctionsAsExtern("cc"), Elementwise)
    loaded = tvm.ir.load_json(tvm.ir.save_json(after))
    tvm.ir.assert_structural_equal(loaded, after)
    transform = relax.transform
    for one in [
        transform.Normalize(),
        transform.CanonicalizeBindings(),
        transform.EliminateCommonSubexpr(),
        transform.DeadCodeElimination(),
        transform.InlinePrivateFunctions(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.ToNonDataflow(),
        transform.RemovePurityChecking(),
        transform.CallTIRRewrite(),
    ]:
        after = apply(one, after)
        declaration = after["scaled"]
        tvm.ir.assert_structural_equal(declaration, loaded["scaled"], map_free_vars=True)


def test_what_a_type_cannot_say_is_kept():
    scopes = {
        "tvm_ipc.argument_scopes": ["ipc_memory", ""],
        "tvm_ipc.output_scopes": ["global"],
        "tvm_ipc.inplace_outputs": [0],
    }
    module = with_attrs(Elementwise, scopes)
    attrs = apply(MarkCompilerFunctionsAsExtern("cc"), module)["scaled"].attrs
    assert set(attrs.keys()) == {"tvm_ipc.extern", *scopes}
    assert list(attrs["tvm_ipc.argument_scopes"]) == ["ipc_memory", ""]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tvm_ipc.argument_scopes", ["global"], "argument_scopes has 1 entry; expected 2"),
        ("tvm_ipc.output_scopes", ["", ""], "output_scopes has 2 entries; expected 1"),
        (
            "tvm_ipc.inplace_outputs",
            [2],
            "has the index 2; expected an index of one of the 2",
        ),
        ("tvm_ipc.inplace_outputs", [1], "cannot overwrite parameter 1"),
    ],
)
def test_refused_declarations_that_the_signature_does_not_allow(key, value, reason):
    with pytest.raises(TransformError, match=f"function 'scaled': .*{reason}"):
        apply(MarkCompilerFunctionsAsExtern("cc"), with_attrs(Elementwise, {key: value}))


def test_refused_literals_that_have_no_symbol():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            @R.function
            def inner(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                R.func_attr({"Codegen": "cc"})
                b = R.exp(a)
                return b

            y = inner(x)
            return y

    with pytest.raises(TransformError, match=r"'main' contains .* run OutlineCompilerFunctions"):
        MarkCompilerFunctionsAsExtern("cc")(Module)
    tvm.ir.assert_structural_equal(MarkCompilerFunctionsAsExtern("dd")(Module), Module)


def with_attrs(module: tvm.IRModule, attrs: dict[str, object]) -> tvm.IRModule:
    result = module.clone()
    function = module["scaled"]
    for key, value in attrs.items():
        function = function.with_attr(key, value)
    result[module.get_global_var("scaled")] = function
    return result
