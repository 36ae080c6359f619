# SPDX-License-Identifier: Apache-2.0
"""Without barriers, a plan that knows nothing of peers gives wrong numbers; ours does not.

    python -m pytest tests/end_to_end/test_race.py --race-rounds 1000

is the long run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import transform

import tvm_ipc
from tests.end_to_end.harness import AddDelays
from tests.end_to_end.mutations import Change, changed, packed_name, with_body
from tests.passes_of_tvm import ALLOCATE, LOWER
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, ReduceKind
from tvm_ipc.transform import (
    IPCAllReduceRewrite,
    LowerGPUIPCAllocStorage,
    LowerPackedAllocTensor,
    StaticPlanBlockMemory,
    verify_cross_rank_safety,
)

LAYERS = 40
SHAPE = (64, 512)
CUSTOM = "runtime.disco.cuda_ipc.custom_allreduce"
OWN = "tvm_ipc.allreduce"
FLAGS = 4  #: the place of the flags among the arguments of OWN

BEFORE = [transform.LegalizeOps(), *ALLOCATE]
AFTER = [LowerPackedAllocTensor(), LowerGPUIPCAllocStorage(), *LOWER]


def chain(world: int) -> tvm.IRModule:
    """40 times: multiply by 2 / N, sum over all. What is left over from a layer before is wrong."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(LAYERS):
                factor = relax.const(2 / world, "float32")
                y = builder.emit(relax.op.ccl.allreduce(relax.op.multiply(y, factor), "sum"))
            result = builder.emit_output(relax.op.add(y, y))
        builder.emit_func_output(result)
    return builder.get()


def changed_main(mod: tvm.IRModule, change: Change) -> tvm.IRModule:
    return relax.transform.Normalize()(with_body(mod, changed(mod["main"].body, change)))


def packed(*operands: Any) -> Any:
    arguments = [relax.prim_value(int(o)) if isinstance(o, int) else o for o in operands]
    return relax.Call(relax.ExternFunc(OWN), arguments, ty_args=[relax.AnyType()])


def without_barriers(mod: tvm.IRModule) -> tvm.IRModule:
    """Every custom all-reduce is a one-shot that may leave out its exit barrier."""

    def change(binding: Any) -> Any:
        if packed_name(binding.value) != CUSTOM:
            return binding
        send, _strategy, recv = binding.value.args
        way, flags = AllReduceStrategy.ONESHOT, CollectiveFlag.NO_EXIT_BARRIER
        call = packed(send, ReduceKind.SUM, False, way, flags, recv)
        return relax.VarBinding(binding.var, call)

    return changed_main(mod, change)


def planned(world: int, *passes: tvm.transform.Pass) -> tvm.IRModule:
    with tvm.target.Target("llvm"):
        return tvm.transform.Sequential([*BEFORE, *passes])(chain(world))


def upstreams(world: int) -> tvm.IRModule:
    """The plan of TVM's own passes."""
    strategy = int(AllReduceStrategy.ONESHOT)
    return planned(
        world, transform.IPCAllReduceRewrite(strategy), transform.StaticPlanBlockMemory()
    )


def ours(world: int) -> tvm.IRModule:
    return planned(
        world,
        IPCAllReduceRewrite(int(AllReduceStrategy.ONESHOT)),
        StaticPlanBlockMemory(packed=True, barrier_budget=1 << 30),
    )


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tvm_ipc.Session(request.param, timeout=60) as session:
        session.import_python_module("tests.end_to_end.race_worker")
        yield session


class Runner:
    """A program in the workers, with delays at every point."""

    def __init__(self, session: Any, mod: tvm.IRModule, path: Path) -> None:
        with tvm.target.Target("llvm"):
            lowered = tvm.transform.Sequential([AddDelays(), *AFTER])(mod)
        relax.build(lowered, "llvm", relax_pipeline=None).export_library(str(path))
        self._session = session
        self._main = session.load_vm_module(str(path))["main"]
        self._reset = session.get_global_func("tests.race_reset")
        self._x = np.random.default_rng(0).integers(1, 9, SHAPE).astype("float32")
        self._input = session.put(self._x)
        self._expected = self._x * np.float32(2) ** (LAYERS + 1)

    def wrong(self, rounds: int) -> int:
        """Return how many runs gave a wrong result on any rank."""
        wrong = 0
        for seed in range(rounds):
            self._reset(seed)
            result = self._main(self._input)
            ranks = range(self._session.num_workers)
            # Where 2 / N is no binary fraction, products are rounded, and so are sums.
            wrong += not all(
                np.allclose(self._session.get(result, rank), self._expected, rtol=1e-4)
                for rank in ranks
            )
        return wrong


def count_flags(mod: tvm.IRModule, flags: int) -> int:
    (block,) = mod["main"].body.blocks
    return sum(
        packed_name(binding.value) == OWN and int(binding.value.args[FLAGS].value) == flags
        for binding in block.bindings
    )


def test_upstreams_plan_gives_wrong_numbers_without_exit_barriers(session, tmp_path):
    mod = without_barriers(upstreams(session.num_workers))
    assert count_flags(mod, CollectiveFlag.NO_EXIT_BARRIER) == LAYERS
    hazards = verify_cross_rank_safety(mod)
    assert len(hazards) >= LAYERS - 1  # every layer but the first overwrites what peers may read
    assert Runner(session, mod, tmp_path / "upstreams.so").wrong(10) > 0


def test_upstreams_plan_is_right_with_them(session, tmp_path):
    mod = upstreams(session.num_workers)
    assert verify_cross_rank_safety(mod) == []
    assert Runner(session, mod, tmp_path / "upstreams.so").wrong(5) == 0


def test_our_plan_is_right_with_the_same_delays(session, tmp_path, request):
    mod = ours(session.num_workers)
    left_out = count_flags(mod, CollectiveFlag.NO_EXIT_BARRIER)
    assert left_out >= LAYERS - 2
    assert verify_cross_rank_safety(mod) == []
    rounds = request.config.getoption("--race-rounds")
    assert Runner(session, mod, tmp_path / "ours.so").wrong(rounds) == 0


def test_our_plan_is_unsafe_once_it_is_broken(session):
    mod = ours(session.num_workers)

    def at_the_start(binding: Any) -> Any:
        op = getattr(binding.value, "op", None)
        if not isinstance(op, tvm.ir.Op) or op.name != "relax.memory.alloc_tensor":
            return binding
        storage, _offset, *rest = binding.value.args
        call = relax.Call(op, [storage, relax.prim_value(0), *rest], ty_args=binding.value.ty_args)
        return relax.VarBinding(binding.var, call)

    def without_any_barrier(binding: Any) -> Any:
        if packed_name(binding.value) not in (CUSTOM, OWN):
            return binding
        send, recv = binding.value.args[0], binding.value.args[-1]
        return relax.VarBinding(binding.var, packed(send, 0, 0, 1, 1, recv))

    assert len(verify_cross_rank_safety(changed_main(mod, at_the_start))) >= LAYERS - 2
    assert len(verify_cross_rank_safety(changed_main(mod, without_any_barrier))) > 0
