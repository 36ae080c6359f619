# SPDX-License-Identifier: Apache-2.0
"""Loops over chunks: those that the passes make are safe, and changed ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tvm
from tvm import tirx

import tvm_ipc
from tests.end_to_end.test_chunks_in_loops import batched
from tests.end_to_end.test_marked_for_streams import linear
from tvm_ipc.comm import Mesh
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import VerifyCrossRankSafety, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

Change = Callable[[str], str]


def before_the_check(module: tvm.IRModule, **options: Any) -> tvm.IRModule:
    """A program as the verifier gets it from the pipeline."""
    found = []

    @tvm.instrument.pass_instrument
    class Keep:
        def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if str(info.name) == "VerifyCrossRankSafety":
                found.append(mod)

    with tvm.transform.PassContext(instruments=[Keep()]):
        tvm_ipc.get_pipeline("llvm", 2, blas=False, **options)(module)
    return found[0]


@cache
def planned(chunks: Any, streams: int = 2) -> tvm.IRModule:
    """A program in chunks."""
    module = linear(Mesh({"d": 2}), "d", (chunks, 2, 4, 32), 16)
    return before_the_check(module, streams=streams)


@pytest.mark.parametrize(
    ("chunks", "streams"), [(9, 2), (16, 2), (1024, 2), (9, 1), (12, 3), (41, 8)]
)
def test_loops_are_proved_safe(chunks: int, streams: int) -> None:
    module = planned(chunks, streams)
    assert verify_cross_rank_safety(module) == []
    assert verify_cross_rank_safety(tvm.script.from_source(module.script())) == []


def test_only_the_order_of_a_symbolic_number_is_not_proved() -> None:
    """Ranks that are called with other numbers of chunks would wait for each other."""
    hazards = verify_cross_rank_safety(planned(tirx.Var("n", "int64")))
    assert {one.kind for one in hazards} == {HazardKind.BRANCHES}
    assert all(one.unknown for one in hazards)
    assert "main_lv1_chunks" in "".join(one.binding for one in hazards)


@pytest.mark.parametrize("chunks", [16, None])
def test_lowered_loops_have_no_certain_hazard(chunks: int | None) -> None:
    """Later passes hide the numbers of iterations, but not the memory."""
    shape = (tirx.Var("n", "int64") if chunks is None else chunks, 2, 4, 32)
    lowered = tvm_ipc.get_pipeline("llvm", 2)(linear(Mesh({"d": 2}), "d", shape, 16))
    hazards = verify_cross_rank_safety(lowered)
    assert {one.kind for one in hazards} <= {HazardKind.BRANCHES}
    assert all(one.unknown for one in hazards)


def in_function(name: str, old: str, new: str) -> Change:
    """Replace a text in a function, where it occurs first."""

    def change(script: str) -> str:
        begin = script.index(f"def {name}(")
        position = script.index(old, begin)
        return script[:position] + new + script[position + len(old) :]

    return change


WAIT = 'R.call_packed("tvm_ipc.wait", request, ty_args=(R.Tuple,))'
SECOND_SLOT = 'R.call_packed("tvm_ipc.view", gathered, 1024'
FIRST_SLOT = 'R.call_packed("tvm_ipc.view", gathered, 0'
COPY = 'R.call_packed("tvm_ipc.copy", weight, weight, ty_args=(R.Tuple,))\n        '
LOOP = "_: R.Shape([]) = cls.main_lv1_chunks("

CHANGES: dict[str, tuple[Change, str]] = {
    "a request of a step is not waited for": (
        in_function("main_lv1_chunk_step", WAIT, "None"),
        "the request request is not waited for",
    ),
    "a step gathers into the slot that it multiplies": (
        in_function("main_lv1_chunk_step", SECOND_SLOT, FIRST_SLOT),
        "is read before the request that writes it has ended",
    ),
    "the loop begins before its first chunk is there": (
        in_function("main", WAIT, "None"),
        "is read before the request that writes it has ended",
    ),
    "a step leaves the next one a slot that is being written": (
        in_function("main_lv1_chunk_step", WAIT.replace("request", "request_1"), "None"),
        "the request request_1 is not waited for",
    ),
    "a step reads beyond the gathered chunks": (
        in_function("main_lv1_chunk_step", SECOND_SLOT, SECOND_SLOT.replace("1024", "1088")),
        "is outside of its storage",
    ),
    "the function does more than to call the body": (
        in_function("main_lv1_chunks", "if begin", COPY + "if begin"),
        "before the request that",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_loops_are_refused(name: str) -> None:
    change, message = CHANGES[name]
    module = tvm.script.from_source(change(planned(16).script()))
    with pytest.raises(TransformError, match=message):
        VerifyCrossRankSafety(world_size=2)(module)


def test_ranks_must_run_a_loop_equally_often() -> None:
    rank = 'rank = R.call_packed("runtime.disco.worker_rank", ty_args=(R.Prim("int64"),))\n        '
    begin = in_function("main", LOOP, rank + LOOP)
    count = in_function("main", "R.shape([7])", "R.shape([rank])")
    module = tvm.script.from_source(count(begin(planned(16).script())))
    hazards = verify_cross_rank_safety(module, world_size=2)
    assert HazardKind.BRANCHES in {one.kind for one in hazards}


def line_with(lines: list[str], text: str) -> int:
    """The only line with a text."""
    (found,) = [number for number, line in enumerate(lines) if text in line]
    return found


@pytest.mark.parametrize(
    ("kind", "text", "target", "message"),
    [
        # The call of the loop that computes what a peer reads moves behind the statement.
        ("reduce_scatter", "R.shape([0, 1]), products", "tvm_ipc.expose", "while it is exposed"),
        # The call of the loop that reads the rows of a peer.
        ("allgather", "R.shape([0, 1]), rows", "tvm_ipc.release", "used after its release"),
    ],
)
def test_loops_that_use_exposed_tensors_too_late_are_refused(
    kind: str, text: str, target: str, message: str
) -> None:
    module = before_the_check(batched(kind, 2, tirx.Var("n", "int64"), 8, flat=False), overlap=1)
    assert verify_cross_rank_safety(module) == []
    # TVM does not parse the type arguments of allocations that it prints.
    script = re.sub(r"(builtin\.alloc_tensor\(.*), ty_args=.*", r"\1)", module.script())
    lines = script.splitlines()
    moved = lines.pop(line_with(lines, text))
    lines.insert(line_with(lines, target) + 1, moved)
    with pytest.raises(TransformError, match=message):
        VerifyCrossRankSafety(world_size=2)(tvm.script.from_source("\n".join(lines)))


IN_A_FUNCTION = """
@I.ir_module
class Viewed:
    @R.function(private=True, pure=False)
    def last(x: R.Tensor(("m", 16), "float32"), out: R.Tensor((16,), "float32")) -> R.Shape([]):
        m = T.int64()
        row = R.call_packed(
            "tvm_ipc.view", x, (m - ROW) * 64, R.shape([16]), ty_args=(R.Tensor((16,), "float32"),)
        )
        R.call_packed("tvm_ipc.copy", row, out, ty_args=(R.Tuple,))
        return R.shape([])

    @R.function(pure=False)
    def main(x: R.Tensor(("n", 16), "float32"), out: R.Tensor((16,), "float32")):
        n = T.int64()
        cls = Viewed
        y = R.builtin.alloc_tensor(R.shape([n + 1, 16]), R.dtype("float32"), 0, "global")
        a: R.Shape([]) = cls.last(y, out)
        return out
"""


@pytest.mark.parametrize(("row", "is_inside"), [(1, True), (0, False)])
def test_extents_of_a_function_are_those_of_its_only_call(row: int, is_inside: bool) -> None:
    module = tvm.script.from_source(IN_A_FUNCTION.replace("ROW", str(row)))
    kinds = [one.kind for one in verify_cross_rank_safety(module)]
    assert kinds == ([] if is_inside else [HazardKind.BOUNDS])


REPEATED = """
@I.ir_module
class Repeated:
    @R.function(private=True, pure=False)
    def step(
        index: R.Shape(["i"]),
        x: R.Tensor((64,), "float32"),
        send: R.Tensor((64,), "float32"),
        out: R.Tensor((64,), "float32"),
    ) -> R.Shape([]):
        R.call_packed("tvm_ipc.copy", x, send, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.allreduce", send, 0, 0, 1, FLAG, out, ty_args=(R.Tuple,))
        return R.shape([])

    @R.function(private=True, pure=False)
    def loop(
        bounds: R.Shape(["begin", "end"]),
        x: R.Tensor((64,), "float32"),
        send: R.Tensor((64,), "float32"),
        out: R.Tensor((64,), "float32"),
    ) -> R.Shape([]):
        begin = T.int64()
        end = T.int64()
        cls = Repeated
        if begin < end:
            a: R.Shape([]) = cls.step(R.shape([begin]), x, send, out)
            if begin + 1 < end:
                b: R.Shape([]) = cls.loop(R.shape([begin + 1, MIDDLE]), x, send, out)
                if begin + 2 < end:
                    c: R.Shape([]) = cls.loop(R.shape([MIDDLE, end]), x, send, out)
                    third: R.Shape([]) = R.shape([])
                else:
                    third: R.Shape([]) = R.shape([])
                second: R.Shape([]) = R.shape([])
            else:
                second: R.Shape([]) = R.shape([])
            first: R.Shape([]) = R.shape([])
        else:
            first: R.Shape([]) = R.shape([])
        return R.shape([])

    @R.function(pure=False)
    def main(x: R.Tensor((64,), "float32")):
        cls = Repeated
        storage = R.memory.alloc_storage(R.shape([256]), 0, "ipc_memory", "uint8")
        send = R.memory.alloc_tensor(storage, 0, R.shape([64]), "float32")
        out = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, "global")
        a: R.Shape([]) = cls.loop(R.shape([0, COUNT]), x, send, out)
        R.call_packed("tvm_ipc.allreduce", x, 0, 0, 3, 0, out, ty_args=(R.Tuple,))
        R.call_packed("tvm_ipc.copy", send, out, ty_args=(R.Tuple,))
        return out
""".replace("MIDDLE", "(begin + 2 + end) // 2")


@pytest.mark.parametrize(
    ("count", "flag", "kinds"),
    [
        (0, 1, set()),
        (1, 1, set()),
        (2, 1, {HazardKind.WRITE}),
        (1000, 1, {HazardKind.WRITE}),
        (1000, 0, set()),  # with an exit barrier
    ],
)
def test_an_iteration_must_not_spoil_what_peers_read_of_the_last_one(
    count: int, flag: int, kinds: set[HazardKind]
) -> None:
    text = REPEATED.replace("COUNT", str(count)).replace("FLAG", str(flag))
    hazards = verify_cross_rank_safety(tvm.script.from_source(text), world_size=2)
    assert {one.kind for one in hazards} == kinds
