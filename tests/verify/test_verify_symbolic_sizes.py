# SPDX-License-Identifier: Apache-2.0
"""verify_cross_rank_safety where sizes are symbolic: what is proved, refuted, and neither."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import tvm
from tvm import tirx

from tests.transform.memory_programs import prepared
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    StaticPlanBlockMemory,
    VerifyCrossRankSafety,
    collect_report,
    verify_cross_rank_safety,
)
from tvm_ipc.transform.verify_cross_rank_safety import HazardKind
from tvm_ipc.verify.symbolic_inequalities import Extents

#: Extents of tensors: none of them is negative where such a tensor is.
EXTENTS = [
    "n - 1",
    "n // 2",
    "T.max(n, m)",
    "T.min(n, m)",
    "n - m",
    "n * (m - 1)",
    "(n - 1) * (m - 2)",
    "(n + 3) // 4",
    "n // m",
    "n % m",
    "n * m // 8",
    "n // 2 - m // 3",
    "T.ceildiv(n, m)",
    "T.if_then_else(n < m, m - n, n - m - 1)",
    "T.Select(n < m, m - n, n - m - 1)",
    "T.shift_left(n, T.int64(2)) - m",
    "T.shift_right(n, T.int64(1))",
    "(n - m) * (n % 4)",
    "T.bitwise_and(n, m)",
    "T.bitwise_or(n, T.int64(5)) - 7",
    "T.bitwise_xor(n, m)",
    'T.Cast("int64", T.Cast("int32", n - m))',
    'T.Cast("int64", T.Cast("int32", n % 2 + 2) // 2) % m',
    "T.min(T.max(T.if_then_else(n < 1, n * 2 - 1, n - 1), T.int64(0)), n) - T.min(T.int64(1), n)",
]


def module(*lines: str, attributes: str = "{}") -> tvm.IRModule:
    head = f"""
@I.ir_module
class Module:
    @R.function(pure=False)
    def main(
        x: R.Tensor(("n", "m"), "float32"),
        s: R.Tensor((1,), "float32"),
        c: R.Tensor((), "bool"),
    ):
        R.func_attr({attributes})
        n, m = T.int64(), T.int64()
"""
    body = [*lines, "return x"] if not any("return" in line for line in lines) else lines
    return tvm.script.from_source(head + "".join(f"        {line}\n" for line in body))


def storage(size: str, scope: str = "ipc_memory") -> str:
    return f's = R.memory.alloc_storage(R.shape([{size}]), 0, "{scope}", "uint8")'


def tensor(name: str, extent: str, offset: str, dtype: str = "float32") -> str:
    return f'{name} = R.memory.alloc_tensor(s, {offset}, R.shape([{extent}]), "{dtype}", 0)'


def write(name: str) -> str:
    return f'_ = R.call_packed("tvm_ipc.copy", x, {name}, ty_args=(R.Any,))'


def allreduce(send: str, recv: str, flags: int) -> str:
    arguments = f"{send}, 0, 0, 1, {flags}, {recv}"
    return f'_ = R.call_packed("tvm_ipc.allreduce", {arguments}, ty_args=(R.Any,))'


def two_layers(extent: str, second: str, size: str, **options: str) -> tvm.IRModule:
    """Two tensors of one storage, of which peers may read the first while the second is written."""
    return module(
        storage(size),
        tensor("a", extent, "0"),
        write("a"),
        allreduce("a", "x", 1),
        tensor("b", extent, second),
        write("b"),
        allreduce("b", "x", 0),
        "R.memory.kill_storage(s)",
        **options,
    )


@pytest.mark.parametrize("extent", EXTENTS)
def test_right_plans_are_proved_and_wrong_ones_refuted(extent: str) -> None:
    assert verify_cross_rank_safety(two_layers(extent, f"({extent}) * 4", f"({extent}) * 8")) == []
    wrong = {
        HazardKind.WRITE: [("0", 8), ("({}) * 2", 8), ("({}) * 4 - 4", 8)],
        HazardKind.BOUNDS: [("({}) * 4", 7), ("({}) * 5", 8), ("4 - ({}) * 4", 8)],
    }
    for kind, plans in wrong.items():
        for second, size in plans:
            plan = two_layers(extent, second.format(extent), f"({extent}) * {size}")
            found = verify_cross_rank_safety(plan)
            assert kind in {hazard.kind for hazard in found if not hazard.unknown}, (second, size)
            assert all(re.match("[nm] = [0-9]+", hazard.example) for hazard in found)
            with pytest.raises(TransformError, match=r"for example where [nm] = "):
                VerifyCrossRankSafety()(plan)


@pytest.mark.parametrize("extent", EXTENTS)
def test_plans_of_tensors_of_several_types_are_proved(extent: str) -> None:
    mod = module(
        f"a = R.broadcast_to(s, R.shape([{extent}]))",
        "b = R.nn.relu(a)",
        'd = R.astype(b, "float16")',
        "e = R.negative(d)",
        'f = R.astype(e, "int8")',
        "g = R.add(f, f)",
        'h = R.astype(g, "float32")',
        "i = R.sum(h)",
        "return i",
    )
    planned = StaticPlanBlockMemory(packed=True)(prepared(mod))
    assert len(re.findall("memory.alloc_tensor", planned.script())) == 7
    assert verify_cross_rank_safety(planned) == []


def test_an_example_is_of_sizes_that_the_tensors_can_have() -> None:
    (hazard,) = verify_cross_rank_safety(two_layers("n - 100", "n * 2 - 200", "n * 8 - 800"))
    assert int(re.fullmatch("n = ([0-9]+)", hazard.example)[1]) > 100
    bounds = '{"tir_var_upper_bound": {"n": 9}, "tir_var_lower_bound": {"n": 8}}'
    (hazard,) = verify_cross_rank_safety(two_layers("n", "n", "n * 8", attributes=bounds))
    assert hazard.example in ("n = 8", "n = 9")
    # At 8 and 9 this is right.
    assert verify_cross_rank_safety(two_layers("n", "36", "72", attributes=bounds)) == []
    assert verify_cross_rank_safety(two_layers("9 - n", "4", "16", attributes=bounds)) == []


def test_what_is_lost_is_refuted_at_some_sizes() -> None:
    def program(second: str) -> tvm.IRModule:
        return module(
            storage("n * 8", "global"),
            tensor("a", "n - m", "0"),
            write("a"),
            tensor("b", "n - m", second),
            write("b"),
            '_ = R.call_packed("tvm_ipc.copy", a, x, ty_args=(R.Any,))',
        )

    assert verify_cross_rank_safety(program("4 * n")) == []
    assert verify_cross_rank_safety(program("4 * n - 4 * m")) == []
    (hazard,) = verify_cross_rank_safety(program("T.max(4 * n - 8 * m, T.int64(0))"))
    assert hazard.kind is HazardKind.LOST and hazard.example and not hazard.unknown


#: Nothing here can tell how many bits are set in a number.
UNKNOWN = two_layers("n", "4 * n", "T.popcount(n) * 8")


def test_what_is_neither_proved_nor_refuted_is_unknown() -> None:
    (hazard,) = verify_cross_rank_safety(UNKNOWN)[:1]
    assert hazard.unknown and hazard.kind is HazardKind.BOUNDS
    assert "may be outside of its storage" in str(hazard)
    with collect_report() as report:
        assert VerifyCrossRankSafety()(UNKNOWN).same_as(UNKNOWN)
    assert [one.verdict for one in report.decisions] == ["not proved"] * len(report.decisions)
    assert report.decisions[0].reason == str(hazard)
    with pytest.raises(TransformError, match="may be outside"):
        VerifyCrossRankSafety(refuse_unknown=True)(UNKNOWN)


def test_unknown_overwriting_does_not_hide_a_certain_one() -> None:
    mod = module(
        storage("n * 16", "global"),
        tensor("a", "n", "0"),
        write("a"),
        tensor("b", "n", "T.popcount(n) * 4"),
        write("b"),
        tensor("d", "n", "0"),
        write("d"),
        '_ = R.call_packed("tvm_ipc.copy", a, x, ty_args=(R.Any,))',
    )
    lost = [one for one in verify_cross_rank_safety(mod) if one.kind is HazardKind.LOST]
    assert [one.unknown for one in lost] == [False]


def quotient(n: Any, more: int, by: int) -> Any:
    return tirx.floordiv(n + more, by)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
def test_a_chunk_of_a_part_is_no_larger_than_the_part(ranks: int, chunks: int) -> None:
    n = tirx.Var("n", "int64")
    extents = Extents()
    part = quotient(n, ranks - 1, ranks)
    chunk = quotient(part, chunks - 1, chunks)
    one, whole = (extents.number(number * 64) for number in (chunk, part))
    assert one is not None and whole is not None
    assert extents.at_most(one, whole)
    assert extents.at_most(whole, one) == (chunks == 1)
    # Nor is what is left of it.
    rest = extents.number(tirx.min(tirx.min(n, chunk), part - chunk) * 64)
    assert rest is not None
    assert extents.at_most(rest, whole)


def test_what_is_proved_of_quotients_is_so() -> None:
    """Sums of quotients, of which many are equal at some sizes, and differ by one at others."""
    drawn = random.Random(0)
    proved = 0
    for _ in range(400):
        n = tirx.Var("n", "int64")
        extents = Extents()
        made: list[list[tuple[int, int, int]]] = [
            [
                (drawn.choice([1, 1, 2, 3]), drawn.randrange(-3, 9), drawn.randrange(1, 7))
                for _ in range(drawn.randrange(1, 3))
            ]
            for _ in range(2)
        ]
        sums = [sum(f * quotient(n, more, by) for f, more, by in terms) for terms in made]
        least, most = (extents.number(total) for total in sums)
        assert least is not None and most is not None
        if extents.at_most(least, most):
            proved += 1
            for value in range(200):
                small, large = (
                    sum(f * ((value + more) // by) for f, more, by in terms) for terms in made
                )
                assert small <= large, (made, value)
    assert proved > 100
