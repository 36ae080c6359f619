# SPDX-License-Identifier: Apache-2.0
"""Tuples of the virtual machine: packed parameters as lists and tuples of references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.runtime.disco_kinds import on_workers


@I.ir_module
class Packed:
    """Two layers `allreduce(x * w + b)`, whose parameters are pairs in one packed parameter."""

    @R.function
    def main(
        x: R.Tensor((2,), "float32"),
        params: R.Tuple(
            R.Tuple(R.Tensor((2,), "float32"), R.Tensor((2,), "float32")),
            R.Tuple(R.Tensor((2,), "float32"), R.Tensor((2,), "float32")),
        ),
    ):
        with R.dataflow():
            first = params[0]
            w0 = first[0]
            b0 = first[1]
            second = params[1]
            w1 = second[0]
            b1 = second[1]
            y = R.ccl.allreduce(R.add(R.multiply(x, w0), b0), "sum")
            z = R.ccl.allreduce(R.add(R.multiply(y, w1), b1), "sum")
            R.output(z)
        return z


@pytest.fixture(scope="module", params=[2, 3, 4])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(request.param, timeout=60) as session:
        yield session


@pytest.fixture
def main(session: tvm_ipc.Session) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", session.num_workers)
    return session.load_vm_module(tvm.compile(Packed, "llvm", relax_pipeline=pipeline))["main"]


@pytest.fixture
def given(session: tvm_ipc.Session) -> tuple[Any, Any]:
    """The arrays of each worker: x and four parameters, and what `main` returns of them."""
    rng = np.random.default_rng(session.num_workers)
    arrays = rng.integers(-4, 5, (5, session.num_workers, 2)).astype("float32")
    x, w0, b0, w1, b1 = arrays
    return arrays, ((x * w0 + b0).sum(0) * w1 + b1).sum(0)


@pytest.mark.parametrize("outer", [list, tuple])
@pytest.mark.parametrize("once", [True, False], ids=["session.tuple", "in the call"])
def test_packed_parameters(
    once: bool, outer: type, session: tvm_ipc.Session, main: Any, given: Any
) -> None:
    arrays, wanted = given
    x, *params = (session.scatter(array) for array in arrays)
    packed: Any = outer([(params[0], params[1]), [params[2], params[3]]])
    if once:
        packed = session.tuple(packed)
    for result in on_workers(main(x, packed), session.num_workers):
        np.testing.assert_array_equal(result, wanted)


def test_references_tuples_and_arrays_in_one_tuple(
    session: tvm_ipc.Session, main: Any, given: Any
) -> None:
    arrays, wanted = given
    x, w0, b0, w1, _ = (session.scatter(array) for array in arrays)
    pair = session.tuple([w0, b0])
    result = main(x, [pair, (w1, np.zeros(2, "float32"))])
    difference = arrays[4].sum(0)
    for array in on_workers(result, session.num_workers):
        np.testing.assert_array_equal(array + difference, wanted)


def test_a_result_is_a_field(session: tvm_ipc.Session) -> None:
    """Each worker's tuple has its own values; an empty tuple and values that are no tensors too."""
    rank = session.get_global_func("runtime.disco.worker_rank")
    packed = session.tuple([rank(), [], (3, 2.5, "text", None)])
    field = session.get_global_func("vm.builtin.tuple_getitem")
    for number in range(session.num_workers):
        assert field(packed, 0).debug_get_from_remote(number) == number
        assert len(field(packed, 1).debug_get_from_remote(number)) == 0
        assert list(field(packed, 2).debug_get_from_remote(number)) == [3, 2.5, "text", None]


def test_many_fields(session: tvm_ipc.Session) -> None:
    """More than one command holds."""
    x = session.put(np.arange(3.0))
    field = session.get_global_func("vm.builtin.tuple_getitem")
    packed = session.tuple([*[x] * 9999, session.put(np.ones(1))])
    assert session.get(field(packed, 9999), rank=1).tolist() == [1]
    assert session.get(field(packed, 9998), rank=1).tolist() == [0, 1, 2]


def test_refused_because_a_list_of_numbers_may_be_a_tensor_a_shape_or_a_tuple(
    session: tvm_ipc.Session,
) -> None:
    function = session.get_global_func("vm.builtin.make_tuple")
    for numbers in ([1, 2], [], (3, [4.5]), [np.float32(1)]):
        with pytest.raises(TypeError, match=r"argument 2 of a call is .*without arrays") as error:
            function(1, numbers)
        for way in (r"session.put(...)", r"tvm_ffi.Shape(...)", r"session.tuple(...)"):
            assert way in str(error.value)


def test_refused_with_the_place_of_the_field(session: tvm_ipc.Session) -> None:
    x = session.put(np.ones(2))
    function = session.get_global_func("vm.builtin.make_tuple")
    first = r"^argument 1 of a call, field \[1\]\[0\] is .*, not \{3\}"
    with pytest.raises(TypeError, match=first):
        function([x, [{3}]])
    with pytest.raises(TypeError, match=r"^tuple: fields\[1\]\[0\] is .*, not \{3\}"):
        session.tuple([x, [{3}]])
    with pytest.raises(TypeError, match=r"put: array is .*; session\.tuple makes a tuple of ref"):
        session.put([x, x])


def test_refused_because_a_field_is_of_another_session(session: tvm_ipc.Session) -> None:
    with tvm_ipc.Session(2, threads=True) as other:
        foreign = other.put(np.ones(2))
        with pytest.raises(ValueError, match="a value of another session has no meaning"):
            session.tuple([session.put(np.ones(2)), [foreign]])
