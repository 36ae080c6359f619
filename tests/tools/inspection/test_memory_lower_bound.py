# SPDX-License-Identifier: Apache-2.0
"""How many bytes are live at once, in functions small enough to count by hand."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import UNKNOWN, evaluate, variables
from tvm_ipc.tools.inspection.peak_live_bytes import Allocation, allocations


def peak(mod: tvm.IRModule, **sizes: int) -> dict[str, int]:
    return allocations(mod, sizes)["main"].peak


def test_two_tensors_of_a_chain_are_live_at_a_time() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, a)
            b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float16"), 0, R.str("global"))
            _ = R.call_packed("f", a, b)
            c = R.builtin.alloc_tensor(R.shape([32]), R.dtype("float32"), 0, R.str("ipc_memory"))
            _ = R.call_packed("f", b, c)
            return R.tuple()

    assert peak(Module) == {"global": 256 + 128, "ipc_memory": 128}


def test_an_allocation_counts_from_its_first_use_and_a_result_apart() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            late = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, R.str("global"))
            a = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, R.str("global"))
            out = R.builtin.alloc_tensor(R.shape([1000]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, a)
            _ = R.call_packed("f", a, out)
            _ = R.call_packed("f", out, late)
            return out

    assert peak(Module) == {"global": 256}
    assert allocations(Module, {})["main"].results == {"global": 4000}


def test_results_are_live_together() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32"), choose: R.Tensor((), "bool")):
            a = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, a)
            b = R.builtin.alloc_tensor(R.shape([16]), R.dtype("int8"), 0, R.str("ipc_memory"))
            _ = R.call_packed("f", a, b)
            if choose:
                c = R.builtin.alloc_tensor(R.shape([100]), R.dtype("float32"), 0, R.str("global"))
                _ = R.call_packed("f", x, c)
                y = c
            else:
                d = R.builtin.alloc_tensor(R.shape([30]), R.dtype("float32"), 0, R.str("global"))
                _ = R.call_packed("f", x, d)
                y = d
            return ((a, x), R.reshape(a, R.shape([2, 4])), b, y)

    found = allocations(Module, {})["main"]
    assert found == Allocation({}, {}, {"global": 4 * (8 + 100), "ipc_memory": 16})
    assert found.total() == {}


def test_a_tensor_lives_as_long_as_what_stands_for_it() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, a)
            other = R.builtin.alloc_tensor(R.shape([1]), R.dtype("int8"), 0, R.str("global"))
            _ = R.call_packed("f", x, other)
            pair = (other, R.reshape(a, R.shape([8, 8])))
            view = pair[1]
            b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, b)
            _ = R.call_packed("f", view, b)
            return R.tuple()

    # `other` is dead: the tuple's first field is not used.
    assert peak(Module) == {"global": 512}


def test_of_two_branches_one_runs() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32"), choose: R.Tensor((), "bool")):
            kept = R.builtin.alloc_tensor(R.shape([1]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", x, kept)
            if choose:
                a = R.builtin.alloc_tensor(R.shape([100]), R.dtype("float32"), 0, R.str("global"))
                _ = R.call_packed("f", x, a)
                y = a
            else:
                b = R.builtin.alloc_tensor(R.shape([30]), R.dtype("float32"), 0, R.str("global"))
                _ = R.call_packed("f", kept, b)
                c = R.builtin.alloc_tensor(R.shape([50]), R.dtype("float32"), 0, R.str("global"))
                _ = R.call_packed("f", b, c)
                y = c
            d = R.builtin.alloc_tensor(R.shape([10]), R.dtype("float32"), 0, R.str("global"))
            _ = R.call_packed("f", y, d)
            return R.tuple()

    # After the branches y, which may be a, and d. `kept` is not needed where `a` is.
    assert peak(Module) == {"global": 4 * (100 + 10)}


def test_symbolic_sizes_count_as_their_bound_or_as_given() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor(("n",), "float32")):
            R.func_attr({"tir_var_upper_bound": {"n": 1024}})
            n = T.int64()
            a = R.builtin.alloc_tensor(R.shape([n * 2]), R.dtype("float16"), 0, R.str("global"))
            _ = R.call_packed("f", x, a)
            return R.tuple()

    assert peak(Module) == {"global": 4096}
    assert peak(Module, n=3) == {"global": 12}


def test_storages_of_a_plan_and_what_tvm_makes_of_those_in_ipc_memory() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float16")):
            s = R.memory.alloc_storage(R.shape([128]), 0, "ipc_memory", "float16")
            a = R.memory.alloc_tensor(s, 0, R.shape([64]), "float16", 0)
            _ = R.call_packed("f", x, a)
            return R.tuple()

    assert allocations(Module, {})["main"] == Allocation({"ipc_memory": 128}, {})
    assert allocations(Module, {}, typed_ipc=True)["main"].total() == {"ipc_memory": 256}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("n * T.int64(4096) + T.int64(3)", 5 * 4096 + 3),
        ("T.min(n, m) // T.int64(2)", 2),
        ("(n + T.int64(64) - T.int64(1)) // T.int64(64) * T.int64(64)", 64),
        ("T.if_then_else(n > T.int64(3), n, m)", 5),
        ('T.Cast("int32", n) + 1', 6),
        ("T.Div(n, m)", 0),
        ("other", UNKNOWN),
        ("n // 0", None),
        ("__import__('os').getcwd()", None),
        ("no size", None),
        ("(" * 500, None),
    ],
)
def test_sizes_are_read_as_tvm_prints_them(text: str, value: int | None) -> None:
    assert evaluate(text, {"n": 5, "m": 7}) == value


def test_names_of_symbolic_variables() -> None:
    assert variables("n * T.int64(4) + m") == {"n", "m"}
    assert variables("no size") == set()
