# SPDX-License-Identifier: Apache-2.0
"""The check of order where ranks pass other sizes or types: equal, different, and not known."""

from __future__ import annotations

import pytest
import tvm

from tvm_ipc.transform import Hazard, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

DISAGREES, STUCK, BRANCHES = HazardKind.DISAGREES, HazardKind.STUCK, HazardKind.BRANCHES
CERTAIN, UNKNOWN = [(DISAGREES, False)], [(DISAGREES, True)]
PARAMETERS = 'x: R.Tensor(("n", 4), "float32"), k: R.Tensor(("m",), "float32")'
OTHER = """
    @R.function(pure=False, private=True)
    def part(a: R.Tensor(("rows", 4), "float32")):
        rows = T.int64()
        b = R.builtin.alloc_tensor(R.shape([rows, 4]), R.dtype("float32"), 0, "global")
        _ = R.call_packed("tvm_ipc.allreduce", a, 0, 0, 3, 0, b, ty_args=(R.Tuple([]),))
        return a

    @R.function(pure=False, private=True)
    def doubled(a: R.Tensor(("rows", 4), "float32")):
        rows = T.int64()
        twice: R.Prim("int64") = rows * 2
        b = R.builtin.alloc_tensor(R.shape([twice, 4]), R.dtype("float32"), 0, "global")
        _ = R.call_packed("tvm_ipc.allreduce", b, 0, 0, 3, 0, b, ty_args=(R.Tuple([]),))
        return a
"""


def tensor(name: str, shape: str, dtype: str = "float32") -> str:
    return f'{name} = R.builtin.alloc_tensor(R.shape([{shape}]), R.dtype("{dtype}"), 0, "global")'


def packed(name: str, *arguments: object) -> str:
    given = ", ".join([f'"{name}"', *map(str, arguments)])
    return f"_ = R.call_packed({given}, ty_args=(R.Tuple([]),))"


def allreduce(send: str, recv: str = "") -> str:
    return packed("tvm_ipc.allreduce", send, 0, 0, 3, 0, recv or send)


def broadcast(tensor_: str, root: int | str = 0) -> str:
    return packed("tvm_ipc.broadcast", tensor_, root, 0, 0, tensor_)


def scatter(send: str, recv: str) -> str:
    return packed("tvm_ipc.scatter", send, 0, 0, 0, recv)


def hazards(
    start: list[str], then: list[str], otherwise: list[str], **options: str
) -> list[Hazard]:
    """Verify a program in which rank 0 takes one branch, and the other ranks another one."""
    rank = 'q = R.call_packed("runtime.disco.worker_rank", ty_args=(R.Prim("int64"),))'
    lines = ["n, m = T.int64(), T.int64()", rank, *start]
    lines += [f"if {options.get('condition', 'q == 0')}:", *(f"    {one}" for one in then)]
    lines += ["    r = x", "else:", *(f"    {one}" for one in otherwise), "    r = x", "return x"]
    more = options.get("parameters", "")
    text = "\n@I.ir_module\nclass Module:" + OTHER + "    @R.function(pure=False)\n"
    text += f"    def main({PARAMETERS}{more}):\n" + "".join(f"        {one}\n" for one in lines)
    return verify_cross_rank_safety(tvm.script.from_source(text), world_size=3)


def kinds(start: list[str], then: list[str], otherwise: list[str], **options: str) -> list:
    return [(one.kind, one.unknown) for one in hazards(start, then, otherwise, **options)]


SYMBOLIC = [tensor("a", "n, 4"), tensor("b", "3 * n, 4")]


def test_symbolic_sizes_in_another_order() -> None:
    """The first all-reduce of rank 0 is the second one of the others."""
    a, b = allreduce("a"), allreduce("b")
    (hazard,) = hazards(SYMBOLIC, [a, b], [b, a])
    assert (hazard.kind, hazard.unknown) == (DISAGREES, False)
    assert "3 workers run it and n = 64" in str(hazard)
    assert kinds(SYMBOLIC, [a, b], [a, b]) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("n, 4", "4 * n", []),
        ("2 * (n + m)", "m * 2 + n * 2", []),
        ("n, 4", "m, 4", CERTAIN),
        ("n, 4", "64, 4", CERTAIN),
        ("T.max(n, n // 2)", "n", []),
        ("T.min(n, m)", "T.min(m, n)", []),
        ("n // 2 * 2", "n", CERTAIN),
    ],
)
def test_expressions_of_sizes(one: str, other: str, expected: list) -> None:
    start = [tensor("a", one), tensor("b", other)]
    assert kinds(start, [allreduce("a")], [allreduce("b")]) == expected


def test_types_are_compared_whatever_the_size() -> None:
    start = [tensor("a", "n, 4"), tensor("b", "n, 4", "float64")]
    assert kinds(start, [allreduce("a")], [allreduce("b")]) == CERTAIN
    unknown = ', u: R.Tensor(ndim=2, dtype="float64")'
    assert kinds(start, [allreduce("a")], [allreduce("u")], parameters=unknown) == CERTAIN


def test_a_size_that_is_not_known_is_not_equal() -> None:
    unknown = ', u: R.Tensor(ndim=2, dtype="float32"), v: R.Tensor(ndim=2, dtype="float32")'
    found = hazards([], [allreduce("u")], [allreduce("v")], parameters=unknown)
    assert [(one.kind, one.unknown) for one in found] == UNKNOWN
    assert "could not be proved" in str(found[0])
    # By a condition of which nothing is known, too.
    more = unknown + ', c: R.Tensor((), "bool")'
    options = {"parameters": more, "condition": "c"}
    assert kinds([], [allreduce("u")], [allreduce("v")], **options) == [(BRANCHES, True)]
    assert kinds(SYMBOLIC, [allreduce("a")], [allreduce("a")], **options) == []


@pytest.mark.parametrize("backend", ["runtime.disco.", "tvm_ipc."])
def test_broadcasts_and_scatters_in_another_order(backend: str) -> None:
    start = [tensor("a", "12"), tensor("b", "24"), tensor("c", "4"), tensor("d", "8")]

    def both(send: str, recv: str) -> tuple[str, str]:
        if backend == "tvm_ipc.":
            return broadcast(recv), scatter(send, recv)
        return (
            packed(f"{backend}broadcast_from_worker0", recv, "False", recv),
            packed(f"{backend}scatter_from_worker0", send, "False", recv),
        )

    for first, second in zip(both("a", "c"), both("b", "d"), strict=True):
        assert kinds(start, [first, second], [second, first]) == CERTAIN
        assert kinds(start, [first, second], [first, second]) == []
    # What others than the root give to be sent does not matter.
    assert kinds(start, [scatter("a", "c")], [scatter("b", "c")]) == []


def test_messages_of_another_size() -> None:
    start = [tensor("a", "n"), tensor("b", "m"), tensor("c", "n", "int32")]
    send = packed("runtime.disco.send_to_worker", "a", 1)

    def receive(name: str) -> list[str]:
        call = packed("runtime.disco.recv_from_worker", name, 0)
        return ["if q == 1:", f"    {call}", "    s = x", "else:", "    s = x"]

    assert kinds(start, [send], receive("a")) == []
    assert kinds(start, [send], receive("b")) == CERTAIN
    assert kinds(start, [send], receive("c")) == CERTAIN


def test_a_root_or_a_size_that_each_rank_computes() -> None:
    start = [tensor("a", "12")]
    assert kinds(start, [broadcast("a", "q")], [broadcast("a", "q")]) == CERTAIN
    own = [tensor("a", "q + 1")]
    assert kinds(own, [allreduce("a")], [allreduce("a")]) == CERTAIN
    assert kinds([tensor("a", "q * 0 + 2")], [allreduce("a")], [allreduce("a")]) == []


def test_a_receiver_that_is_not_known() -> None:
    given = ", w: R.Prim('int64')"
    send = packed("runtime.disco.send_to_worker", "a", "w")
    found = hazards([tensor("a", "4")], [send], [], parameters=given)
    assert [(one.kind, one.unknown) for one in found] == [(STUCK, True)]
    assert "its peer is unknown" in str(found[0])


def test_a_team_that_is_not_known() -> None:
    given = ", w: R.Prim('int64')"
    call = packed("tvm_ipc.allreduce", "a", 0, "w", 3, 0, "a")
    found = hazards([tensor("a", "4")], [call], [], parameters=given)
    assert [(one.kind, one.unknown) for one in found] == [(STUCK, True)]
    assert "its team is unknown" in str(found[0])


@pytest.mark.parametrize("function", ["part", "doubled"])
def test_a_function_that_is_called_with_other_sizes(function: str) -> None:
    """Its variable is one, and stands for other rows in each call."""
    calls = [f"{name}_ = Module.{function}({name})" for name in "ab"]
    assert kinds(SYMBOLIC, calls, [*reversed(calls)]) == CERTAIN
    assert kinds(SYMBOLIC, calls, calls) == []
    start = [*SYMBOLIC, tensor("c", "n, 4" if function == "part" else "2 * n, 4")]
    assert kinds(start, [calls[0]], [allreduce("c")]) == []
    assert kinds(start, [calls[1]], [allreduce("c")]) == CERTAIN


def test_sizes_that_a_check_relates_are_not_certain() -> None:
    cast = 's = R.match_cast(k, R.Tensor((n,), "float32"))'
    start = [cast, tensor("a", "n"), tensor("b", "m")]
    assert kinds(start, [allreduce("a")], [allreduce("b")]) == UNKNOWN
    # A new name of the same number is the same.
    renamed = ["p = T.int64()", 's = R.match_cast(k, R.Tensor((p,), "float32"))']
    start = [*renamed, tensor("a", "p"), tensor("b", "m")]
    assert kinds(start, [allreduce("a")], [allreduce("b")]) == []


def test_what_else_ranks_have_to_pass() -> None:
    start = [tensor(name, "12") for name in "abc"]

    def permute(sources: str) -> str:
        return packed("tvm_ipc.permute", "a", f"R.shape([{sources}])", 0, 0, "b")

    assert kinds(start, [permute("1, 2, 0")], [permute("1, 2, 0")]) == []
    assert kinds(start, [permute("1, 2, 0")], [permute("2, 0, 1")]) == CERTAIN

    def norm(epsilon: float) -> str:
        name, numbers = "tvm_ipc.allreduce_rms_norm", f"R.prim_value(T.float64({epsilon}))"
        return packed(name, "a", "a", "c", numbers, 0, 3, 0, "b", "a")

    assert kinds(start, [norm(1e-5)], [norm(1e-5)]) == []
    assert kinds(start, [norm(1e-5)], [norm(1e-6)]) == CERTAIN


def test_contents_that_nobody_wrote_are_not_alike() -> None:
    start = [tensor("u", "", "bool"), tensor("a", "4")]
    assert kinds(start, [allreduce("a")], [], condition="u") == [(BRANCHES, True)]


def test_a_tensor_of_unknown_size_may_overwrite_another_one() -> None:
    start = [
        's = R.memory.alloc_storage(R.shape([64]), 0, "global", "uint8")',
        'p = R.memory.alloc_tensor(s, 0, R.shape([16]), "float32", 0)',
        'o = R.memory.alloc_tensor(s, 0, w, "float32", 0)',
        *(packed("tvm_ipc.copy", *pair) for pair in (("k", "p"), ("k", "o"), ("p", "k"))),
    ]
    found = kinds(start, [], [], parameters=", w: R.Shape(ndim=1)")
    assert found == [(HazardKind.LOST, True)]
