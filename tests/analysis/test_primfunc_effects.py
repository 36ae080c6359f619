# SPDX-License-Identifier: Apache-2.0
"""What the body of a PrimFunc does with its parameters."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from tvm_ipc.analysis.primfunc_effects import find_parameters


@T.prim_func
def moves(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    for i in range(4):
        b[i] = a[i]


@T.prim_func
def increments(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    for i in range(4):
        b[i] = b[i] + T.float32(1)


@T.prim_func(s_tir=True)
def matches(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("copy"):
            vi = T.axis.spatial(4, i)
            T.reads(a[vi])
            T.writes(b[vi])
            source = T.match_buffer(a[vi], (), "float32")
            target = T.match_buffer(b[vi], (), "float32")
            target[()] = source[()]


@T.prim_func
def declares(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    source = T.decl_buffer((4,), "float32", data=a.data)
    target = T.decl_buffer((4,), "float32", data=b.data)
    for i in range(4):
        target[i] = source[i]


@T.prim_func
def hands_out_a_pointer(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    T.evaluate(T.call_extern("void", "look", a.data))
    for i in range(4):
        b[i] = a[i]


@T.prim_func
def hands_out_an_address(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    T.evaluate(T.call_extern("void", "look", T.address_of(a[2])))
    for i in range(4):
        b[i] = T.float32(1)


@pytest.mark.parametrize("function", [moves, matches, declares], ids=lambda one: one.__name__)
def test_what_is_only_read_under_any_name_is_not_written(function: Any) -> None:
    source, target = find_parameters(function)
    assert (source.read, source.written, source.may_be_written) == (True, False, False)
    assert (target.read, target.written, target.may_be_written) == (False, True, True)
    assert not source.escapes
    assert not target.escapes


def test_what_is_read_and_written_is_both_and_what_is_not_used_is_neither() -> None:
    unused, both = find_parameters(increments)
    assert (unused.read, unused.may_be_written) == (False, False)
    assert (both.read, both.written) == (True, True)


@pytest.mark.parametrize(("function", "names"), [(moves, 1), (matches, 2), (declares, 2)])
def test_names_of_a_parameter_are_all_known(function: Any, names: int) -> None:
    assert [len(parameter.aliases) for parameter in find_parameters(function)] == [names, names]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (hands_out_a_pointer, "has its pointer passed to unknown code"),
        (hands_out_an_address, "has the address of an element taken"),
    ],
)
def test_what_leaves_the_body_may_be_written(function: Any, why: str) -> None:
    source, target = find_parameters(function)
    assert (source.escapes, source.written, source.may_be_written) == (why, False, True)
    assert not target.escapes
