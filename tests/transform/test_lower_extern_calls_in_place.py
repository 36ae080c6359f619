# SPDX-License-Identifier: Apache-2.0
"""LowerExternCalls: outputs that overwrite arguments, where nobody looks at these again."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.transform.byoc_modules import apply
from tests.transform.extern_programs import TO_CALLS, declared, lowered_calls, run
from tvm_ipc.transform import (
    LowerExternCalls,
)

# Outputs in place.


@I.ir_module
class InPlace:
    @R.function
    def bump(a: R.Tensor(("m",), "float32"), b: R.Tensor(("m",), "float32")) -> R.Tuple(
        R.Tensor(("m",), "float32"), R.Tensor(("m",), "float32")
    ):
        R.func_attr({"Codegen": "cc"})
        c = R.add(a, b)
        d = R.subtract(a, b)
        return (c, d)

    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        cls = InPlace
        dead = R.exp(x)
        kept = R.exp(dead)
        first = cls.bump(dead, kept)
        one = first[0]
        second = cls.bump(x, kept)
        two = second[0]
        third = cls.bump(kept, x)
        three = third[0]
        four = third[1]
        return (one, two, three, four, kept)


def bump(a, b, difference):
    """The sum is in place of `a`."""
    one, two = a.numpy(), b.numpy()
    difference.copyfrom(one - two)
    a.copyfrom(one + two)


@pytest.mark.parametrize("late", [False, True])
def test_an_output_overwrites_what_nobody_looks_at_again_and_a_copy_of_the_rest(register, late):
    register("bump", bump)
    module = declared(InPlace, inplace_outputs=[0, -1])
    if late:
        module = TO_CALLS(module)
    after = apply(LowerExternCalls(), module)
    copies = [text for text in lowered_calls(after) if text.startswith("tvm_ipc.copy")]
    copied = [text.split("(")[1].split(",")[0] for text in copies]
    # Before outputs are allocated nothing is known of `dead`, so that is copied too.
    assert copied == (["x", "kept"] if late else ["dead", "x", "kept"])
    value = np.random.rand(5).astype("float32")
    one, two, three, four, kept = (result.numpy() for result in run(after, value))
    exp, expexp = np.exp(value), np.exp(np.exp(value))
    np.testing.assert_allclose(one, exp + expexp, rtol=1e-5)
    np.testing.assert_allclose(two, value + expexp, rtol=1e-5)
    np.testing.assert_allclose(three, expexp + value, rtol=1e-5)
    np.testing.assert_allclose(four, expexp - value, rtol=1e-5)
    np.testing.assert_allclose(kept, expexp, rtol=1e-5)


def test_a_chain_in_place_uses_one_buffer(register):
    @I.ir_module
    class Chain:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(x: R.Tensor(("n",), "float32")):
            cls = Chain
            y = R.exp(x)
            a = cls.negated(y)
            b = cls.negated(a)
            c = cls.negated(b)
            return c

    register("negated", lambda a: a.copyfrom(-a.numpy()))
    after = apply(LowerExternCalls(), TO_CALLS(declared(Chain, inplace_outputs=[0])))
    assert [t for t in lowered_calls(after) if "alloc" in t and "=" in t] == [
        "alloc = alloc (n) global"
    ]
    value = np.random.rand(5).astype("float32")
    np.testing.assert_allclose(run(after, value).numpy(), -np.exp(value), rtol=1e-5)


def test_what_a_tuple_a_view_or_a_branch_holds_is_not_overwritten(register):
    @I.ir_module
    class AliasedInputs:
        @R.function
        def negated(a: R.Tensor(("m",), "float32")) -> R.Tensor(("m",), "float32"):
            R.func_attr({"Codegen": "cc"})
            b = R.negative(a)
            return b

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
            cls = AliasedInputs
            y = R.exp(x)
            pair = (y, x)
            a = cls.negated(y)
            z = R.exp(a)
            view = R.reshape(z, R.shape([2, 2]))
            b = cls.negated(z)
            w = R.exp(b)
            if c:
                d = cls.negated(w)
                e = R.add(d, w)
            else:
                e = w
            return (pair, view, e)

    register("negated", lambda a: a.copyfrom(-a.numpy()))
    after = apply(LowerExternCalls(), TO_CALLS(declared(AliasedInputs, inplace_outputs=[0])))
    value = np.random.rand(4).astype("float32")
    for condition in (True, False):
        pair, view, e = run(after, np.array(condition), value)
        exp = np.exp(value)
        np.testing.assert_allclose(pair[0].numpy(), exp, rtol=1e-5)
        np.testing.assert_allclose(view.numpy().ravel(), np.exp(-exp), rtol=1e-5)
        last = np.exp(-np.exp(-exp))
        np.testing.assert_allclose(e.numpy(), 0 * last if condition else last, atol=1e-5)


SHARED = {
    "one argument twice, of which it overwrites the first": (
        [0, -1],
        """
        a = R.exp(x)
        r = cls.bump(a, a)
        """,
        ["a"],
    ),
    "one argument twice, of which it overwrites both": (
        [0, 1],
        """
        a = R.exp(x)
        r = cls.bump(a, a)
        """,
        ["a"],
    ),
    "what a packed function has returned, read later": (
        [0, -1],
        """
        a = R.exp(x)
        y = R.call_packed("last", x, a, ty_args=(R.Tensor((4,), "float32"),))
        one = cls.bump(a, x)
        r = (one, y)
        """,
        ["a"],
    ),
    "what a packed function has returned, overwritten": (
        [0, -1],
        """
        y = R.call_packed("last", x, ty_args=(R.Tensor((4,), "float32"),))
        r = cls.bump(y, x)
        """,
        ["y"],
    ),
    "what a function of the module has returned": (
        [0, -1],
        """
        a = R.exp(x)
        y = cls.same(a)
        one = cls.bump(a, x)
        two = cls.bump(y, x)
        r = (one, two)
        """,
        ["a"],
    ),
    "a view beside what it views": (
        [0, -1],
        """
        a = R.exp(x)
        v = R.memory.view(a, R.shape([2, 2]))
        w = R.memory.view(v, R.shape([4]))
        r = cls.bump(a, w)
        """,
        ["a"],
    ),
    "what one of two branches returns": (
        [0, -1],
        """
        a = R.exp(x)
        if c:
            b = a
        else:
            b = x
        one = cls.bump(a, x)
        r = (one, b)
        """,
        ["a"],
    ),
    "a field of a tuple": (
        [0, -1],
        """
        a = R.exp(x)
        p = (x, (a, a))
        q = p[1]
        b = q[0]
        d = R.match_cast(q[1], R.Tensor((4,), "float32"))
        r = cls.bump(b, d)
        """,
        ["b"],
    ),
    "nothing but itself": (
        [0, 1],
        """
        a = R.exp(x)
        b = R.exp(a)
        p = (a, b)
        d = p[0]
        e = R.match_cast(b, R.Tensor((4,), "float32"))
        r = cls.bump(d, e)
        """,
        [],
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_may_be_the_same_memory_is_copied(register, name: str):
    inplace, body, copied = SHARED[name]
    module = tvm.script.from_source(
        f"""
@I.ir_module
class Module:
    @R.function
    def bump(a: R.Tensor((4,), "float32"), b: R.Tensor((4,), "float32")) -> R.Tuple(
        R.Tensor((4,), "float32"), R.Tensor((4,), "float32")
    ):
        R.func_attr({{"Codegen": "cc"}})
        c = R.add(a, b)
        d = R.subtract(a, b)
        return (c, d)

    @R.function(private=True)
    def same(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        return a

    @R.function(pure=False)
    def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
        cls = Module{body}
        return r
"""
    )

    def overwriting(*given):
        params = given[:2]
        values = [one.numpy() for one in params]
        for index in (one for one in inplace if one != -1):
            values[index] = params[index].numpy()
            params[index].copyfrom(np.full(4, np.nan, "float32"))
        values = [
            values[index] if index in inplace else one.numpy() for index, one in enumerate(params)
        ]
        places = [params[0], given[-1] if inplace[1] == -1 else params[1]]
        for place, value in zip(
            places, (values[0] + values[1], values[0] - values[1]), strict=True
        ):
            place.copyfrom(value)

    def flat(result):
        if isinstance(result, tvm.runtime.Tensor):
            return [result.numpy()]
        return [one for part in result for one in flat(part)]

    register("last", lambda *given: given[-1])
    value = np.random.rand(4).astype("float32")
    results = []
    for attrs, bump in (({}, plain), ({"inplace_outputs": inplace}, overwriting)):
        register("bump", bump)
        after = apply(LowerExternCalls(), TO_CALLS(declared(module, **attrs)))
        results.append(flat(run(after, np.array(True), value)))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    copies = [text for text in lowered_calls(after) if text.startswith("tvm_ipc.copy")]
    assert [text.split("(")[1].split(",")[0] for text in copies] == copied


def plain(a, b, total, difference):
    total.copyfrom(a.numpy() + b.numpy())
    difference.copyfrom(a.numpy() - b.numpy())
