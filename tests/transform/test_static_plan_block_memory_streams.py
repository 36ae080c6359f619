# SPDX-License-Identifier: Apache-2.0
"""The memory plan of programs on several streams: what runs at the same time shares no memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx

from tests.verify.test_verify_streams import Streams
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.transform import (
    StaticPlanBlockMemory,
    collect_report,
    plan_memory,
    verify_cross_rank_safety,
)

PACKED = 4 * 4096


def planned(body: Callable[[Streams], Any], **options: Any) -> tvm.IRModule:
    program = Streams()
    with program.builder.function("main", [program.x], pure=False):
        program.builder.emit_func_output(body(program))
    mod = StaticPlanBlockMemory(**{"packed": True, **options})(program.builder.get())
    assert verify_cross_rank_safety(mod) == []
    return mod


def total(mod: tvm.IRModule) -> int:
    """The number of tensors that all storages have room for."""
    sizes = [
        int(call.args[0].values[0])
        for call in calls(mod["main"])
        if isinstance(call.op, tvm.ir.Op) and call.op.name == "relax.memory.alloc_storage"
    ]
    assert sum(sizes) % PACKED == 0
    return sum(sizes) // PACKED


def chunks(p: Streams, streams: list[int]) -> Any:
    """Each chunk, on its stream, copies the input through a tensor to one that is returned."""
    results = []
    for stream in sorted({*streams} - {0}):
        p.on(stream)
        p.after(0)
    for stream in streams:
        p.on(stream)
        through, result = p.tensor(), p.tensor()
        p.copy(p.x, through)
        p.copy(through, result)
        results.append(result)
    p.on(0)
    for stream in sorted({*streams} - {0}):
        p.after(stream)
    return relax.Tuple(results)


@pytest.mark.parametrize(
    ("streams", "tensors"),
    [([0, 0, 0], 1), ([1, 1, 1], 1), ([0, 1, 0, 1], 2), ([0, 1, 2, 0], 3), ([2, 1, 2], 2)],
)
def test_tensors_of_one_stream_share_memory(streams: list[int], tensors: int) -> None:
    assert total(planned(lambda p: chunks(p, streams))) == tensors


def test_each_tensor_of_whole_storages_is_apart() -> None:
    mod = planned(lambda p: chunks(p, [0, 1, 0, 1]), packed=False)
    assert total(mod) == 4


def test_tensors_before_and_after_share_memory_with_those_of_streams() -> None:
    def body(p: Streams) -> Any:
        before, after, result = p.tensor(), p.tensor(), p.tensor()
        p.copy(p.x, before)
        p.copy(before, result)
        others = chunks(p, [0, 1])
        p.copy(p.x, after)
        p.copy(after, result)
        return relax.Tuple([*others.fields, result])

    assert total(planned(body)) == 2


def test_a_tensor_of_two_streams_is_apart_from_both() -> None:
    def body(p: Streams) -> Any:
        both, results = p.tensor(), [p.tensor(), p.tensor()]
        p.copy(p.x, both)
        p.on(1)
        p.after(0)
        p.copy(both, results[0])
        own = p.tensor()
        p.copy(p.x, own)
        p.copy(own, results[0])
        p.on(0)
        p.copy(both, results[1])
        p.after(1)
        return relax.Tuple(results)

    assert total(planned(body)) == 2


def kills(mod: tvm.IRModule) -> list[str]:
    """The calls in order, by the last part of their names."""
    names = []
    for call in calls(mod["main"]):
        name = getattr(call.op, "global_symbol", None) or getattr(call.op, "name", "")
        names.append(str(name).rpartition(".")[2])
    return names


def test_storages_are_freed_after_the_join() -> None:
    names = kills(planned(lambda p: chunks(p, [0, 1])))
    assert names[-2:] == ["wait_stream", "kill_storage"]


def test_a_tensor_without_a_plan_is_freed_after_the_join() -> None:
    def body(p: Streams) -> Any:
        result = p.tensor()
        p.on(1)
        p.after(0)
        shape = p.builder.emit(
            relax.op.shape_of(p.x) if hasattr(relax.op, "shape_of") else relax.ShapeExpr([4096])
        )
        ty = relax.TensorType((4096,), "float32")
        loose = p.builder.emit(
            relax.Call(
                tvm.ir.Op.get("relax.builtin.alloc_tensor"),
                [
                    shape,
                    *relax.op.builtin.alloc_tensor(relax.ShapeExpr([1]), "float32", 0).args[1:],
                ],
                ret_ty=ty,
            )
        )
        p.copy(p.x, loose)
        p.copy(loose, result)
        p.on(0)
        p.after(1)
        return result

    assert kills(planned(body))[-2:] == ["wait_stream", "kill_tensor"]


def test_an_input_that_peers_read_on_several_streams_keeps_its_barrier() -> None:
    def body(p: Streams, streams: bool) -> Any:
        a, b, c = p.tensor(IPC_MEMORY), p.tensor(IPC_MEMORY), p.tensor()
        if streams:
            p.on(1)
            p.after(0)
        p.copy(p.x, a)
        p.packed("tvm_ipc.allreduce", a, 0, 0, 3, 0, c)
        if streams:
            p.on(0)
            p.after(1)
        p.copy(p.x, b)
        p.packed("tvm_ipc.allreduce", b, 0, 0, 3, 0, c)
        return c

    def verdicts(streams: bool) -> list[tuple[str, str]]:
        with collect_report() as report:
            planned(lambda p: body(p, streams))
        return [(one.verdict, one.reason) for one in report.decisions]

    assert verdicts(False)[0][0] == "barrier left out"
    assert verdicts(True)[0] == ("barrier kept", "its input is used while several streams run")


def test_an_unknown_stream_is_apart_from_all() -> None:
    """The number of a stream that is not a constant; the verifier refuses it too."""
    program = Streams()
    k = tirx.Var("k", "int64")
    shape = relax.Var("shape", relax.ShapeType([k]))
    with program.builder.function("main", [program.x, shape], pure=False):
        results = []
        for stream in (1, k):
            program.packed("tvm_ipc.set_stream", stream)
            through, result = program.tensor(), program.tensor()
            program.copy(program.x, through)
            program.copy(through, result)
            results.append(result)
        program.builder.emit_func_output(relax.Tuple(results))
    mod = program.builder.get()
    (plan,) = plan_memory(mod, packed=True)
    assert sum(storage.size.factor for storage in plan.storages) == 2 * PACKED
    related = [hazard.related for hazard in verify_cross_rank_safety(mod)]
    assert "its number is not a constant" in related


def drawn(p: Streams, seed: int) -> Any:
    """Copies between drawn tensors on drawn streams, some of them waiting for others."""
    rng = random.Random(seed)
    results: list[Any] = []
    for _ in range(rng.randint(1, 3)):  # each with a fork and a join
        streams = range(1, rng.randint(2, 4))
        shared, current = p.tensor(), 0
        p.copy(p.x, shared)
        for stream in streams:
            p.on(stream)
            p.after(0)
        for _ in range(rng.randint(2, 8)):
            before, current = current, rng.choice([0, *streams])
            p.on(current)
            source, count = rng.choice([p.x, shared]), rng.randint(1, 3)
            if results and rng.random() < 0.4:  # what another stream may have computed
                for other in {before, *streams, 0} - {current}:
                    p.after(other)
                source = rng.choice(results)
            for _ in range(count):
                target = p.tensor()
                p.copy(source, target)
                source = target
            results.append(source)
        p.on(0)
        for stream in streams:
            p.after(stream)
        last = p.tensor()
        p.copy(rng.choice(results), last)
        results.append(last)
    return relax.Tuple(rng.sample(results, min(2, len(results))))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_drawn_programs_are_safe_with_their_plans(seed: int, packed: bool) -> None:
    planned(lambda p: drawn(p, seed), packed=packed)


def test_the_verifier_finds_a_plan_that_ignores_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tvm_ipc.transform.memory_plan.plan_function_storages.find_stream_regions"
    monkeypatch.setattr(name, lambda _program: [])
    wrong = 0
    for seed in range(25):
        try:
            planned(lambda p, seed=seed: drawn(p, seed))
        except AssertionError:
            wrong += 1
    assert wrong > 15
