# SPDX-License-Identifier: Apache-2.0
"""Collectives that Disco does not have, in programs: their scopes and barriers, checked and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.collective_results import Array, results_of
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import (
    IPC_MEMORY,
    KINDS,
    PROGRAMS,
    CollectiveFlag,
    ReduceKind,
    Team,
)
from tvm_ipc.transform import collect_report, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

#: Elements of an input: more than are copied instead of shown where they lie.
COUNT = 4096


#: Programs with all-reduces are in other files of this folder.
COLLECTIVES = [
    kind.name for kind in KINDS.values() if kind.packed is None and kind.name != "allreduce"
]


def root_of(name: str, ranks: int) -> int:
    """The root: the first rank where only it has a result, which the programs below use."""
    return 0 if KINDS[name].result_on_root else ranks - 1


def arguments(name: str, ranks: int, send: Any, flags: int, recv: Any = None) -> list[Any]:
    """The arguments of a call, that of a result only if it is given."""
    given = {
        "send": send,
        "kind": ReduceKind.SUM,
        "root": root_of(name, ranks),
        "sources": relax.ShapeExpr([*range(1, ranks), 0]),
        "parts": relax.ShapeExpr([]),
        "team": Team.WORLD,
        "flags": flags,
        "recv": recv,
    }
    values = [given[parameter.name] for parameter in KINDS[name].function.parameters]
    return [relax.prim_value(int(v)) if isinstance(v, int) else v for v in values if v is not None]


def count_of(name: str, ranks: int) -> int:
    """The elements of a result."""
    return KINDS[name].result_shape((COUNT,), ranks)[0]


def results(name: str, xs: list[Array]) -> list[Array | None]:
    """Return the result of each rank; None where it has none."""
    ranks = len(xs)
    pairs = [((k + 1) % ranks, k) for k in range(ranks)]
    return results_of(name, xs, root=root_of(name, ranks), pairs=pairs)


def layers(name: str, ranks: int) -> tvm.IRModule:
    """Two calls, each of what was just computed; between them all ranks get all results."""
    function = KINDS[name].function
    result_type = relax.TensorType((count_of(name, ranks),), "float32")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((COUNT,), "float32"))

    def exchange(send: Any) -> Any:
        operands = arguments(name, ranks, send, CollectiveFlag.NONE)
        return builder.emit(relax.call_dps_packed(function.name, operands, out_ty=result_type))

    with builder.function("main", [x]):
        with builder.dataflow():
            first = exchange(builder.emit(relax.op.add(x, x)))
            every = builder.emit(relax.op.ccl.allgather(first, ranks, False))
            every = builder.emit(relax.op.strided_slice(every, [0], [0], [COUNT]))
            second = exchange(builder.emit(relax.op.multiply(every, x)))
            out = builder.emit_output(relax.op.add(second, second))
        builder.emit_func_output(out)
    return builder.get()


def test_every_collective_with_flags_is_here() -> None:
    with_flags = {name for name, one in PROGRAMS.items() if one.parameter_of_type("CollectiveFlag")}
    # Programs with all-reduces, alone and with a norm, and with rows by counts, are in other files
    # of this folder.
    elsewhere = {f"tvm_ipc.allreduce{rest}" for rest in ("", "_rms_norm", "_layer_norm")}
    elsewhere.add("tvm_ipc.ragged_all_to_all")
    assert {f"tvm_ipc.{name}" for name in COLLECTIVES} == with_flags - elsewhere


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_programs(name: str, ranks: int) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    with collect_report() as report:
        program = tvm.compile(layers(name, ranks), "llvm", relax_pipeline=pipeline)
    barriers = [
        (one.verdict, one.subject)
        for one in report.decisions
        if one.pass_name == "StaticPlanBlockMemory" and one.subject.startswith(name)
    ]
    # The second one is the last meeting, so nothing says when its input was read.
    assert [verdict for verdict, _ in barriers] == ["barrier left out", "barrier kept"], barriers
    random = np.random.default_rng(0)
    xs = [random.integers(-9, 9, COUNT).astype("float32") for _ in range(ranks)]
    first = results(name, [x + x for x in xs])
    every = np.concatenate([y for y in first if y is not None])[:COUNT]
    wanted = results(name, [every * x for x in xs])
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        argument = put_each(session, xs)
        for _ in range(3):
            out = main(argument)
            for rank in range(ranks):
                result = wanted[rank]
                if result is not None:
                    np.testing.assert_array_equal(session.get(out, rank=rank), 2 * result)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_program_with_unequal_parts(ranks: int) -> None:
    """Each worker gives the most to the next one, and as much in all as it takes."""
    widths = [17, COUNT - 17, *[0] * (ranks - 2)]
    parts = [[widths[(j - i) % ranks] for j in range(ranks)] for i in range(ranks)]
    shape = relax.ShapeExpr([number for row in parts for number in row])
    numbers = {"parts": shape, "team": Team.WORLD, "flags": CollectiveFlag.NONE}
    function = PROGRAMS["tvm_ipc.all_to_all"]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((COUNT,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            send = builder.emit(relax.op.add(x, x))
            given = [numbers.get(one.name, send) for one in function.parameters[:-1]]
            operands = [relax.prim_value(int(v)) if isinstance(v, int) else v for v in given]
            received = relax.call_dps_packed(function.name, operands, out_ty=x.ty)
            out = builder.emit_output(relax.op.negative(builder.emit(received)))
        builder.emit_func_output(out)
    pipeline = tvm_ipc.get_pipeline("llvm", ranks)
    program = tvm.compile(builder.get(), "llvm", relax_pipeline=pipeline)
    xs = np.random.default_rng(0).standard_normal((ranks, COUNT)).astype("float32")
    cut = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(xs, parts, strict=True)]
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        argument = put_each(session, xs)
        out = main(argument)
        for rank in range(ranks):
            wanted = -2 * np.concatenate([pieces[rank] for pieces in cut])
            np.testing.assert_array_equal(session.get(out, rank=rank), wanted)


def racing(name: str, flags: int, *, waits: bool) -> tvm.IRModule:
    """A call whose input is written again, after a meeting or not."""
    function = KINDS[name].function
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((COUNT,), "float32"))

    def tensor(count: int, scope: str) -> Any:
        shape = relax.ShapeExpr([count])
        return builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, scope))

    def packed(name: str, *operands: Any) -> None:
        nothing = relax.TupleType([])
        builder.emit(relax.Call(relax.ExternFunc(name), list(operands), ty_args=[nothing]))

    with builder.function("main", [x], pure=False):
        send, recv = tensor(COUNT, IPC_MEMORY), tensor(count_of(name, 2), "global")
        packed("tvm_ipc.copy", x, send)
        packed(function.name, *arguments(name, 2, send, flags, recv))
        if waits:
            small = tensor(1, "global")
            packed("runtime.disco.allgather", small, relax.prim_value(0), tensor(2, "global"))
        packed("tvm_ipc.copy", x, send)
        builder.emit_func_output(recv)
    return builder.get()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_race_is_found(name: str) -> None:
    def kinds(mod: tvm.IRModule) -> list[HazardKind]:
        return [hazard.kind for hazard in verify_cross_rank_safety(mod)]

    assert HazardKind.WRITE in kinds(racing(name, CollectiveFlag.NO_EXIT_BARRIER, waits=False))
    assert kinds(racing(name, CollectiveFlag.NO_EXIT_BARRIER, waits=True)) == []
    assert kinds(racing(name, CollectiveFlag.NONE, waits=False)) == []


@pytest.mark.parametrize("name", COLLECTIVES)
def test_inputs_are_placed_where_peers_read_them(name: str) -> None:
    mod = tvm_ipc.get_pipeline("llvm", 2)(layers(name, 2))
    named = [str(c.op.global_symbol) for c in calls(mod["main"]) if hasattr(c.op, "global_symbol")]
    assert named.count(f"tvm_ipc.{name}") == 2
    assert "tvm_ipc.copy" not in named
    assert "runtime.disco.cuda_ipc.alloc_storage" in named
