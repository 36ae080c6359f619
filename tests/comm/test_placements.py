# SPDX-License-Identifier: Apache-2.0
"""Placements, and the operator that says them: rules, types, how it prints, parses and compares."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import comm
from tvm_ipc.comm import Mesh, Partial, Replica, Shard, place
from tvm_ipc.comm.place_op import mesh_of
from tvm_ipc.comm.placements import placements_of

MESH = Mesh({"dp": 2, "tp": 4})
TURNED = Mesh({"tp": 2}, ranks=[1, 0])

EACH: dict[str, Callable[[Any], relax.Call]] = {
    "replica": lambda x: place(x, MESH, {}),
    "shard": lambda x: place(x, MESH, {"tp": Shard(1)}),
    "both": lambda x: place(x, MESH, {"tp": Shard(1), "dp": Shard(0)}),
    "partial": lambda x: place(x, MESH, {"dp": Partial("max")}),
    "stream": lambda x: place(x, MESH, {"tp": Shard(1)}, stream=0),
    "ranks": lambda x: place(x, TURNED, {"tp": Shard(1)}),
}


def tensor(*shape: Any, dtype: str = "float32") -> relax.Var:
    return relax.Var("x", relax.TensorType(shape, dtype))


def type_of(call: relax.Call) -> Any:
    return relax.BlockBuilder().normalize(call).ty


def module(make: Callable[[Any], relax.Call]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = tensor(6, tirx.Var("n", "int64"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(make(x))
        builder.emit_func_output(out)
    return builder.get()


def test_placements_are_values() -> None:
    assert Shard(1) == Shard(1) != Shard(0)
    assert len({Replica(), Replica(), Partial(), Partial("sum"), Partial("max")}) == 3
    assert list(map(str, (Replica(), Shard(2), Partial("min")))) == ["R", "S[2]", "P[min]"]


def test_placements_by_name_and_in_order() -> None:
    wanted = (Replica(), Shard(1))
    assert placements_of(MESH, {"tp": Shard(1)}) == wanted
    assert placements_of(MESH, {"tp": "S[1]", "dp": "R"}) == wanted
    assert placements_of(MESH, ["R", "S[1]"]) == placements_of(MESH, wanted) == wanted


@pytest.mark.parametrize("name", EACH)
def test_what_is_printed_parses_back(name: str) -> None:
    mod = module(EACH[name])
    assert "R.comm.place(x, mesh=[[" in mod.script()
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


@pytest.mark.parametrize("name", EACH)
def test_json(name: str) -> None:
    mod = module(EACH[name])
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


def test_equality_and_hashing_come_from_the_attributes() -> None:
    x = tensor(6, 8)
    for name, make in EACH.items():
        assert tvm_ffi.structural_hash(make(x)) == tvm_ffi.structural_hash(make(x))
        for other, different in EACH.items():
            assert tvm_ffi.structural_equal(make(x), different(x)) == (name == other)
    turned = place(x, Mesh({"tp": 4, "dp": 2}), {})
    assert not tvm_ffi.structural_equal(turned, place(x, MESH, {})), "the order of axes counts"


def test_scripts_have_the_operator_in_both_forms() -> None:
    @I.ir_module
    class Script:
        @R.function
        def main(x: R.Tensor((6, "n"), "float32")):
            with R.dataflow():
                y = R.comm.place(x, MESH, {"dp": comm.Shard(0), "tp": R.comm.Shard(1)})
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(Script, module(EACH["both"]))


@pytest.mark.parametrize("mesh", [MESH, TURNED])
def test_the_mesh_comes_back(mesh: Mesh) -> None:
    assert mesh_of(place(tensor(2), mesh, {})) == mesh


def test_attributes_with_their_defaults_are_not_printed() -> None:
    x = tensor(6)
    plain = place(x, Mesh({"tp": 2}), {"tp": Shard(0)})
    assert str(plain) == 'R.comm.place(x, mesh=[["tp", 2]], placements=["S[0]"])'
    attrs = comm.PlaceAttrs.of(plain)
    assert (attrs.ranks, attrs.stream, attrs.inserted) == (None, None, False)
    marked = place(x, Mesh({"tp": 2}, [1, 0]), {}, stream=0, inserted=True)
    assert str(marked) == (
        'R.comm.place(x, inserted=True, mesh=[["tp", 2]], placements=["R"], ranks=[1, 0], stream=0)'
    )


def test_the_type_is_that_of_the_whole() -> None:
    n = tirx.Var("n", "int64")
    for x in (tensor(6, 7), tensor(n, 7), relax.Var("x", relax.TensorType(ndim=2))):
        assert type_of(place(x, MESH, {"tp": Shard(1)})) == x.ty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # the mesh
        (lambda x: place(x, [["tp", 0]], ["R"]), "Mesh: axis 'tp' is a number of ranks, 1 to 64"),
        (lambda x: place(x, [["tp", 1], ["tp", 2]], ["R", "R"]), "each name once, not [['tp', 1]"),
        (lambda x: place(x, [["tp", 2]], ["R"], ranks=[0, 0]), "Mesh: ranks is 2 different ranks"),
        (lambda x: place(x, TURNED, ["R"], ranks=[1, 0]), "place: ranks is None if mesh is a Mesh"),
        # the placements
        (
            lambda x: place(x, MESH, {"pp": Shard(0)}),
            "but the mesh has no axis 'pp'; its axes are 'dp', 'tp'",
        ),
        (
            lambda x: place(x, MESH, [Shard(0)]),
            "expected one for each axis of Mesh({'dp': 2, 'tp': 4})",
        ),
        (
            lambda x: place(x, MESH, {"tp": "S"}),
            "place: placements, along 'tp' is comm.Replica(), comm.Shard(axis) or ",
        ),
        (lambda x: place(x, [["tp", 2]], ["S[x]"]), "or comm.Partial(reduction), not 'S[x]'"),
        (lambda x: place(x, MESH, {"tp": "P[avg]"}), "Partial: reduction is one of 'sum', 'prod'"),
        (lambda x: place(x, MESH, {"tp": Shard(2)}), "place: S[2]: there is no axis 2 in R.Tensor"),
        (
            lambda x: place(x, MESH, {"tp": Shard(1), "dp": Shard(1)}),
            "place: axis 1 is sharded along 'dp' and 'tp'; an axis of a tensor can be sharded once",
        ),
        (
            lambda x: place(x, MESH, {"tp": Partial(), "dp": Partial("max")}),
            "place: partial results have the reductions max and sum; expected the same reduction",
        ),
        # the axis for streams
        (lambda x: place(x, MESH, {}, stream=2), "place: stream: there is no axis 2 in R.Tensor"),
    ],
)
def test_each_rule_has_its_words(make: Callable[[Any], relax.Call], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        type_of(make(tensor(6, 8)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (tensor(4, dtype="float8_e4m3fn"), "place: the runtime has no sum of float8_e4m3fn"),
        (relax.Var("s", relax.ShapeType(ndim=1)), "place: the arguments have the types ['R.Shape"),
    ],
)
def test_what_is_not_reduced_is_not_partial(x: relax.Var, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        type_of(place(x, MESH, {"tp": Partial()}))


def test_rules_hold_in_modules_from_elsewhere() -> None:
    text = module(EACH["shard"]).script()
    with pytest.raises(tvm.error.DiagnosticError, match="placements, along 'tp' is "):
        tvm.script.from_source(text.replace('"S[1]"', '"S"'))
    with pytest.raises(tvm.error.DiagnosticError, match="not well-formed"):
        tvm.script.from_source(text.replace('"S[1]"', '"S[2]"'))


def test_gradients_are_refused() -> None:
    @I.ir_module
    class Loss:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.comm.place(x, MESH, {})
                z = R.sum(y)
                R.output(z)
            return z

    with pytest.raises(ValueError, match="has no gradient; differentiate the program before"):
        relax.transform.Gradient("main")(Loss)
