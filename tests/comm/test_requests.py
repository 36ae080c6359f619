# SPDX-License-Identifier: Apache-2.0
"""Works and views in programs: what they become, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from tests.comm.each_kind import collective_of
from tvm_ipc import comm
from tvm_ipc.comm import KINDS


def tensor(*shape: Any, dtype: str = "float32") -> relax.Var:
    return relax.Var("x", relax.TensorType(shape, dtype))


def text(call: relax.Call) -> str:
    return str(relax.BlockBuilder().normalize(call))


X = tensor(6, 4)
#: The arguments of packed functions between the tensor and the output, by parameter.
ARGUMENTS = {
    "kind": "3",
    "root": "1",
    "parts": "R.shape([])",
    "sources": "R.shape([-1, 0])",
    "team": "R.shape([2, 0, 1, 2, 3])",
    "strategy": "3",
    "flags": "0",
}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "take_shard"])
def test_a_posted_collective_is_a_call_of_its_function(name: str) -> None:
    collective = relax.BlockBuilder().normalize(collective_of(name, X, axis=0))
    found = text(comm.start(collective, relax.Var("out", collective.ty)))
    plain = re.sub(r"T\.int64\((-?\d+)\)|R\.prim_value\((-?\d+)\)", r"\1\2", found)
    function = KINDS[name].function
    arguments = ", ".join(ARGUMENTS[one.name] for one in function.parameters[1:-1])
    assert plain.startswith(
        f'R.call_packed("tvm_ipc.start", R.str("{function.name}"), x, {arguments}, out'
    ), plain


def test_a_wait() -> None:
    work = relax.Var("work", relax.AnyType())
    assert text(comm.wait(work)).startswith('R.call_packed("tvm_ipc.wait", work')


def test_a_view() -> None:
    n = tirx.Var("n", "int64")
    call = comm.view(tensor(n, 4, dtype="float16"), n * 2, (n, 2))
    assert call.ty_args[0] == relax.TensorType((n, 2), "float16")
    tvm.ir.assert_structural_equal(call.args[1], n * 2 * 2)
    assert int(comm.view(X, 5, (2,)).args[1].value) == 20


def test_a_view_ends_where_its_tensor_does() -> None:
    n = tirx.Var("n", "int64")
    comm.view(X, 20, (2, 2))
    comm.view(X, 24, (0, 7))
    comm.view(tensor(n, 4), n, (n, 3))
    comm.view(tensor(n, 4), n, (5, 5))  # which may be in it
    comm.view(relax.Var("x", relax.TensorType(ndim=2, dtype="float32")), 100, (5, 5))
    for x, start, shape, end in (
        (X, 20, (5,), 25),
        (X, 25, (0,), 25),
        (tensor(n, 4), n * 4, (1,), ""),
    ):
        with pytest.raises(
            ValueError, match=f"view: the slice ends after {end}.* but the tensor, of type"
        ):
            comm.view(x, start, shape)


def test_what_is_printed_parses_back() -> None:
    @I.ir_module
    class Written:
        @R.function(pure=False)
        def main(x: R.Tensor((6, 4), "float32")) -> R.Tensor((12, 4), "float32"):
            out = R.builtin.alloc_tensor(R.shape([12, 4]), R.dtype("float32"), 0, "global")
            part = R.comm.view(out, 8, (6, 4))
            work = R.comm.start(R.comm.allreduce(x), part)
            _ = R.comm.wait(work)
            return out

    tvm.ir.assert_structural_equal(tvm.script.from_source(Written.script()), Written)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: comm.start(comm.allgather(X, axis=1, workers=2), tensor(6, 8)),
            "start: allgather: the collective has uneven shards or an axis other than 0; expected "
            "equal shards along axis 0",
        ),
        (
            lambda: comm.start(comm.scatter(X, uneven=True, workers=4), tensor(2, 4)),
            "start: scatter: the collective has uneven shards or an axis other than 0; expected "
            "equal shards along axis 0",
        ),
        (
            lambda: comm.start(comm.allgather(X, workers=2), tensor(6, 4)),
            'start: out has the type R.Tensor((6, 4), dtype="float32"); expected',
        ),
        (
            lambda: comm.start(comm.allreduce(X), tensor(6, 4, dtype="float16")),
            'start: out has the type R.Tensor((6, 4), dtype="float16"); expected',
        ),
        (
            lambda: comm.start(comm.take_shard(X, workers=2), tensor(3, 4)),
            "start: collective is a collective of tvm_ipc.comm that communicates",
        ),
    ],
)
def test_what_cannot_be_posted(make: Callable[[], relax.Call], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_an_output_of_another_shape_with_as_many_elements() -> None:
    comm.start(comm.allgather(X, workers=2), tensor(2, 6, 4))
    n = tirx.Var("n", "int64")
    comm.start(comm.allgather(tensor(n, 4), workers=2), tensor(2 * n, 4))
