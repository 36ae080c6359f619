# SPDX-License-Identifier: Apache-2.0
"""Without barriers, a plan that knows nothing of peers gives wrong numbers; ours does not.

    python -m pytest tests/end_to_end/test_race.py --race-rounds 1000

is the long run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import transform

import tvm_ipc
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

BEFORE = [
    transform.LegalizeOps(),
    transform.ToNonDataflow(),
    transform.RemovePurityChecking(),
    transform.CallTIRRewrite(),
]
AFTER = [
    LowerPackedAllocTensor(),
    LowerGPUIPCAllocStorage(),
    transform.LowerAllocTensor(),
    transform.KillAfterLastUse(),
    transform.LowerRuntimeBuiltin(),
    transform.ComputePrimValue(),
    transform.VMShapeLower(),
    transform.AttachGlobalSymbol(),
]


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


def changed(mod: tvm.IRModule, change: Callable[[Any], list[Any]]) -> tvm.IRModule:
    """Replace every binding of `main`."""
    main = mod["main"]
    (block,) = main.body.blocks
    bindings = [new for binding in block.bindings for new in change(binding)]
    body = relax.SeqExpr([relax.BindingBlock(bindings)], main.body.body)
    result = mod.clone()
    result.update_func(
        mod.get_global_var("main"),
        relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs),
    )
    return relax.transform.Normalize()(result)


def packed(name: str, *arguments: Any) -> Any:
    return relax.Call(relax.ExternFunc(name), list(arguments), ty_args=[relax.AnyType()])


def callee(binding: Any) -> str | None:
    op = getattr(binding.value, "op", None)
    return str(op.global_symbol) if isinstance(op, relax.ExternFunc) else None


def without_barriers(mod: tvm.IRModule) -> tvm.IRModule:
    """Every custom all-reduce is a one-shot that may leave out its exit barrier."""
    numbers = (
        ReduceKind.SUM,
        False,
        AllReduceStrategy.ONESHOT,
        CollectiveFlag.NO_EXIT_BARRIER,
    )

    def change(binding: Any) -> list[Any]:
        if callee(binding) != CUSTOM:
            return [binding]
        send, _strategy, recv = binding.value.args
        call = packed(OWN, send, *(relax.prim_value(int(n)) for n in numbers), recv)
        return [relax.VarBinding(binding.var, call)]

    return changed(mod, change)


def with_delays(mod: tvm.IRModule) -> tvm.IRModule:
    """Any rank may be late before any kernel and any collective."""
    count = 0

    def change(binding: Any) -> list[Any]:
        nonlocal count
        if callee(binding) is None and not isinstance(
            getattr(binding.value, "op", None), tvm.ir.GlobalVar
        ):
            return [binding]
        count += 1
        call = packed("tests.race_wait", relax.prim_value(count))
        return [relax.VarBinding(relax.Var(f"wait{count}", relax.AnyType()), call), binding]

    return changed(mod, change)


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


@pytest.fixture(scope="module", params=[2, 3])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tvm_ipc.Session(request.param, timeout=60) as session:
        session.import_python_module("tests.end_to_end.race_worker")
        yield session


class Runner:
    """A program in the workers, with delays at every point."""

    def __init__(self, session: Any, mod: tvm.IRModule, path: Path) -> None:
        with tvm.target.Target("llvm"):
            lowered = tvm.transform.Sequential(AFTER)(with_delays(mod))
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
        callee(binding) == OWN and int(binding.value.args[FLAGS].value) == flags
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

    def at_the_start(binding: Any) -> list[Any]:
        op = getattr(binding.value, "op", None)
        if not isinstance(op, tvm.ir.Op) or op.name != "relax.memory.alloc_tensor":
            return [binding]
        storage, _offset, *rest = binding.value.args
        call = relax.Call(op, [storage, relax.prim_value(0), *rest], ty_args=binding.value.ty_args)
        return [relax.VarBinding(binding.var, call)]

    def without_any_barrier(binding: Any) -> list[Any]:
        if callee(binding) not in (CUSTOM, OWN):
            return [binding]
        send, recv = binding.value.args[0], binding.value.args[-1]
        call = packed(OWN, send, *map(relax.prim_value, (0, 0, 1, 1)), recv)
        return [relax.VarBinding(binding.var, call)]

    assert len(verify_cross_rank_safety(changed(mod, at_the_start))) >= LAYERS - 2
    assert len(verify_cross_rank_safety(changed(mod, without_any_barrier))) > 0
