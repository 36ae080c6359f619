# SPDX-License-Identifier: Apache-2.0
"""Which values may be the same memory: one answer, whichever pass asks."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.transform.script_forms import alloc
from tvm_ipc.analysis.alias_facts import AliasFacts
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts


@I.ir_module
class Names:
    """One tensor under many names, and tensors apart from it."""

    @R.function(private=True)
    def either(c: R.Tensor((), "bool"), p: R.Tensor((4,), "float32")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        R.func_attr({"relax.force_pure": True})
        own = alloc(4)
        return (p, own)

    @R.function(pure=False)
    def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        cls = Names
        a = alloc(4)
        b = alloc(4)
        same = a
        pair = (b, (a, x))
        inner = pair[1]
        field = inner[0]
        view = R.reshape(a, R.shape([2, 2]))
        slice_ = R.call_packed("tvm_ipc.view", a, 0, R.shape([2]), ty_args=(R.Tensor,))
        pure_slice = R.call_pure_packed("tvm_ipc.view", a, 0, R.shape([2]), ty_args=(R.Tensor,))
        cast = R.match_cast(a, R.Tensor((4,), "float32"))
        packed = R.call_packed("f", a, ty_args=(R.Tensor((4,), "float32"),))
        found = R.call_packed("g", ty_args=(R.Tensor((4,), "float32"),))
        if c:
            branch = a
        else:
            branch = b
        both = cls.either(c, a)
        given = both[0]
        made = both[1]
        outer = cls.either(c, x)
        given_x = outer[0]
        constant = R.const([1.0, 2.0, 3.0, 4.0], "float32")
        made_x = outer[1]
        return (
            same,
            field,
            view,
            slice_,
            pure_slice,
            cast,
            packed,
            found,
            branch,
            given,
            made,
            given_x,
            made_x,
            constant,
        )


@pytest.fixture(scope="module")
def facts() -> AliasFacts:
    found = ModuleAliasFacts(Names).of("main")
    assert found is not None
    return found


def variables() -> dict[str, relax.Var]:
    function = Names["main"]
    bound = [binding.var for block in function.body.blocks for binding in block.bindings]
    return {str(var.name): var for var in [*function.params, *bound]}


NAMES_OF_A = [
    *("a", "same", "pair", "inner", "field", "view", "slice_", "pure_slice", "cast", "packed"),
    *("branch", "both"),
]
FROM_OUTSIDE = ["x", "y", "packed", "found", "given_x", "constant", "pair", "inner", "outer"]


@pytest.mark.parametrize(
    ("one", "others"),
    [
        ("a", [*NAMES_OF_A, "given"]),
        ("given", [*NAMES_OF_A, "given"]),
        ("b", ["b", "pair", "branch"]),
        ("made", ["made", "both"]),
        ("made_x", ["made_x", "outer"]),
        *((one, FROM_OUTSIDE) for one in ("x", "y", "found", "constant", "given_x")),
    ],
)
def test_these_may_be_the_same_memory_and_no_others(facts: AliasFacts, one: str, others: list[str]):
    named = variables()
    found = {
        name
        for name, var in named.items()
        if name not in ("c", "gv", "cls") and facts.may_be_same(named[one], var)
    }
    assert found == set(others)


def test_what_a_closure_captured_may_come_back_from_anywhere():
    @I.ir_module
    class Captured:
        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32")):
            a = alloc(4)

            @R.function
            def local(y: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                z = R.add(a, y)
                return z

            b = local(x)
            return b

    found = ModuleAliasFacts(Captured).of("main")
    assert found is not None
    a, _, b = (binding.var for block in Captured["main"].body.blocks for binding in block.bindings)
    assert found.may_be_same(a, b)
    assert not any(found.may_overwrite(a, step) for step in found.program.points)
