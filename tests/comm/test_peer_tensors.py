# SPDX-License-Identifier: Apache-2.0
"""Shows in programs: what they become, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import comm

X = relax.Var("x", relax.TensorType((6, 4), "float16"))
Y = relax.Var("y", relax.TensorType((12, 4), "float16"))
S = relax.Var("s", relax.AnyType())


def text(call: relax.Call) -> str:
    found = str(relax.BlockBuilder().normalize(call))
    return re.sub(r"T\.int64\((-?\d+)\)|R\.prim_value\((-?\d+)\)", r"\1\2", found)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: comm.expose(X), '"tvm_ipc.expose", x, 0'),
        (lambda: comm.expose(X, team="group"), '"tvm_ipc.expose", x, 1'),
        (lambda: comm.expose(X, team=[[0, 1], [2, 3]]), "x, R.shape([2, 0, 1, 2, 3])"),
        (
            lambda: comm.peer_view(S, -1, (3, 8), "float16"),
            '"tvm_ipc.peer_view", s, -1, R.shape([3, 8])',
        ),
        (lambda: comm.release(S), '"tvm_ipc.release", 0, s'),
        (lambda: comm.release([S, S], team=[1, 0]), '"tvm_ipc.release", R.shape([2, 1, 0]), s, s'),
        (
            lambda: comm.own_slice(Y, 1, (6, 4)),
            '"tvm_ipc.own_slice", y, 0, 1, 48, 0, R.shape([6, 4])',
        ),
        (
            lambda: comm.own_slice(Y, -2, (3, 4), stride=24, start=12, team="group"),
            '"tvm_ipc.own_slice", y, 1, -2, 48, 24, R.shape([3, 4])',
        ),
        (
            lambda: comm.reduce_slices([X, X], X, "max", team=[[0, 1]]),
            '"tvm_ipc.reduce_slices", 3, R.shape([2, 0, 1]), x, x, x',
        ),
        (
            lambda: comm.assemble([X, X], [(0, 24, 0), (-1, 24, 2)], Y),
            '"tvm_ipc.assemble", 0, R.shape([0, 48, 0, -1, 48, 4]), x, x, y',
        ),
    ],
)
def test_what_each_becomes(make: Callable[[], relax.Call], wanted: str) -> None:
    found = text(make())
    assert found.startswith('R.call_packed("tvm_ipc.')
    assert wanted in found, found


def test_types() -> None:
    n = tirx.Var("n", "int64")
    assert comm.peer_view(S, 1, (n, 4), "bfloat16").ty_args[0] == relax.TensorType(
        (n, 4), "bfloat16"
    )
    part = comm.own_slice(Y, 0, (n, 2), start=n)
    assert part.ty_args[0] == relax.TensorType((n, 2), "float16")
    tvm.ir.assert_structural_equal(part.args[3], tirx.IntImm("int64", 1) * n * 2 * 2)
    tvm.ir.assert_structural_equal(part.args[4], n * 2)


def test_what_is_printed_parses_back() -> None:
    @I.ir_module
    class Written:
        @R.function(pure=False)
        def main(x: R.Tensor((6, 4), "float32")) -> R.Tensor((12, 4), "float32"):
            out = R.builtin.alloc_tensor(R.shape([12, 4]), R.dtype("float32"), 0, "global")
            total = R.builtin.alloc_tensor(R.shape([6, 4]), R.dtype("float32"), 0, "global")
            mine = R.comm.expose(x, team=[[0, 1]])
            other = R.comm.peer_view(mine, 1, (6, 4), "float32")
            part = R.comm.own_slice(out, 1, (6, 4), team=[[0, 1]])
            _ = R.comm.reduce_slices([x, other], total, team=[[0, 1]])
            _1 = R.comm.assemble([total, part], [(0, 24, 0), (1, 24, 0)], out, team=[[0, 1]])
            _2 = R.comm.release(mine, team=[[0, 1]])
            return out

    tvm.ir.assert_structural_equal(tvm.script.from_source(Written.script()), Written)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: comm.release([]),
            "release: exposed is the result of expose, or a list of such results, not []",
        ),
        (
            lambda: comm.peer_view(S, 1, (2,), "half"),
            "peer_view: dtype is 'half'; expected the name of an element type",
        ),
        (
            lambda: comm.assemble([X], [(0, 24, 0), (1, 24, 0)], Y),
            "assemble: positions is shift, stride and start of each of 1 slices, not [(0, 24, 0), "
            "(1, 24",
        ),
        (lambda: comm.expose(X, team="all"), "expose: team is one of"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
