# SPDX-License-Identifier: Apache-2.0
"""ElideConcatCopies: which parts are made where they are joined, and where what was shown is
hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.transform import ElideConcatCopies, collect_report, verify_cross_rank_safety

ROW = 16  #: elements, of 64 bytes


class Program:
    """Builds a function in destination-passing style; its kernel adds 1."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()
        self.x = relax.Var("x", relax.TensorType((2, ROW), "float32"))

        @T.prim_func(private=True, s_tir=True)
        def one_more(
            a: T.Buffer((2, ROW), "float32"), b: T.Buffer((2, ROW), "float32")
        ):  # fmt: skip
            for i, j in T.grid(2, ROW):
                with T.sblock("one_more"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj] + T.float32(1)

        self.kernel = self.builder.add_func(one_more, "one_more")

    def tensor(self, rows: int = 2) -> Any:
        shape = relax.ShapeExpr([rows, ROW])
        return self.builder.emit(relax.op.builtin.alloc_tensor(shape, "float32", 0, "global"))

    def packed(self, name: str, *operands: Any, ty: Any = None) -> Any:
        types = [relax.TupleType([]) if ty is None else ty]
        given = [
            relax.prim_value(one) if isinstance(one, int) else one
            for one in (relax.ShapeExpr(one) if isinstance(one, list) else one for one in operands)
        ]
        return self.builder.emit(relax.Call(relax.ExternFunc(name), given, ty_args=types))

    def add(self, source: Any) -> Any:
        target = self.tensor()
        call = relax.Call(self.kernel, [source, target], ty_args=[relax.TupleType([])])
        self.builder.emit(call)
        return target

    def join(self, places: list[int], *parts: Any, rows: int = 4) -> Any:
        whole = self.tensor(rows)
        self.packed("tvm_ipc.assemble", 0, places, *parts, whole)
        return whole

    def show(self, tensor: Any) -> Any:
        return self.packed("tvm_ipc.expose", tensor, 0, ty=relax.AnyType())

    def peer(self, shown: Any) -> Any:
        return self.packed("tvm_ipc.peer_view", shown, 1, [2, ROW], ty=self.x.ty)


def run(body: Any) -> tuple[tvm.IRModule, list[str], list[str]]:
    """The module, the calls in it in order, and what is said of joins."""
    program = Program()
    with program.builder.function("main", [program.x], pure=False):
        program.builder.emit_func_output(body(program))
    with collect_report() as report:
        module = ElideConcatCopies()(program.builder.get())
    assert relax.analysis.well_formed(module) in (None, True)
    names = [
        str(call.op.global_symbol if isinstance(call.op, relax.ExternFunc) else call.op.name)
        if not isinstance(call.op, tvm.ir.GlobalVar)
        else "kernel"
        for call in calls(module["main"])
    ]
    return (
        module,
        [name.rpartition(".")[2] for name in names],
        [one.verdict for one in report.decisions],
    )


def values(module: tvm.IRModule, ranks: int = 2) -> list[Any]:
    program = tvm.compile(module, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", ranks))
    given = np.arange(2 * ROW, dtype="float32").reshape(2, ROW)
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        x = session.empty((2, ROW), "float32")
        for rank in range(ranks):
            x.debug_copy_from(rank, given + 100 * rank)
        out = session.load_vm_module(program)["main"](x)
        return [session.get(out, rank) - given for rank in range(ranks)]


def test_parts_are_made_where_they_are_joined() -> None:
    def body(program: Program) -> Any:
        first = program.add(program.x)
        second = program.add(first)
        return program.join([1, 128, 0, 0, 128, 0], first, second)

    _, names, said = run(body)
    assert names == ["alloc_tensor", "own_slice", "kernel", "own_slice", "kernel"]
    assert said == ["2 of 2 slices in place"]


def joined(program: Program, *parts: Any, **options: int) -> Any:
    places = [n for k in range(len(parts)) for n in (k, 128, 0)]
    return program.join(places, *parts, **options)


def used_later(program: Program) -> Any:
    part = program.add(program.x)
    whole = joined(program, program.add(program.x), part)
    program.add(part)
    return whole


def returned(program: Program) -> Any:
    part = program.add(program.x)
    return program.builder.emit(relax.Tuple([joined(program, program.add(program.x), part), part]))


def shown(program: Program) -> Any:
    part = program.add(program.x)
    whole = joined(program, program.add(program.x), part)
    program.packed("tvm_ipc.release", 0, program.show(part))
    return whole


def twice(program: Program) -> Any:
    part = program.add(program.x)
    return joined(program, part, part)


def of_the_caller(program: Program) -> Any:
    return joined(program, program.add(program.x), program.x)


def not_aligned(program: Program) -> Any:
    return program.join(
        [0, 0, 0, 0, 0, 132], program.add(program.x), program.add(program.x), rows=5
    )


@pytest.mark.parametrize(
    ("body", "placed"),
    [(used_later, 1), (returned, 1), (shown, 1), (twice, 0), (of_the_caller, 1), (not_aligned, 1)],
)
def test_other_parts_stay_apart(body: Any, placed: int) -> None:
    _, names, said = run(body)
    assert said == [f"{placed} of 2 slices in place"]
    assert names.count("assemble") == 1
    assert names.count("own_slice") == placed


def test_values_are_the_same_where_one_part_is_copied() -> None:
    module, names, _ = run(used_later)
    assert "assemble" in names
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    assert verify_cross_rank_safety(pipeline(module)) == []
    program = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        x = session.put(np.zeros((2, ROW), "float32"))
        out = session.load_vm_module(program)["main"](x)
        assert (session.get(out, rank=1) == 1).all()


def test_what_is_shown_is_hidden_after_its_last_use() -> None:
    def body(program: Program) -> Any:
        mine = program.add(program.x)
        rows = program.peer(program.show(mine))
        first = program.add(rows)
        program.add(first)
        second = program.add(rows)
        return program.add(second)

    module, names, _ = run(body)
    assert names.count("release") == 1
    after = [name for name in names[names.index("release") :] if name == "kernel"]
    assert len(after) == 1  # the fifth kernel; the fourth reads rows
    differences = values(module)
    assert [set(one.ravel()) for one in differences] == [{103.0}, {3.0}]


def test_shows_that_overlap_are_hidden_at_once() -> None:
    def body(program: Program) -> Any:
        first, second = program.show(program.x), program.show(program.add(program.x))
        program.add(program.peer(first))
        out = program.add(program.peer(second))
        program.add(program.peer(program.show(out)))
        return out

    module, names, _ = run(body)
    assert names.count("release") == 2
    hides = [call for call in calls(module["main"]) if "release" in str(call.op)]
    assert [len(call.args) for call in hides] == [3, 2]


def test_what_the_program_hides_is_left_to_it() -> None:
    def body(program: Program) -> Any:
        one = program.show(program.x)
        program.add(program.peer(one))
        program.packed("tvm_ipc.release", 0, one)
        return program.add(program.x)

    _, names, _ = run(body)
    assert names.count("release") == 1


def test_what_neither_joins_nor_shows_stays_the_object_that_it_was() -> None:
    @I.ir_module
    class Plain:
        @R.function
        def main(x: R.Tensor((2, 2), "float32")):
            return x

    assert ElideConcatCopies()(Plain).same_as(Plain)


def test_what_teams_of_several_kinds_show_is_hidden() -> None:
    """Two groups of the whole session that overlap are hidden at once, and those of ranks apart."""
    x = relax.Var("x", relax.TensorType((32, ROW), "float32"))
    w = relax.Var("w", relax.TensorType((ROW, ROW), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            gathers = [
                comm.allgather(x, team=((0, 1), (2, 3))),
                comm.allgather(x, workers=4),
                comm.allgather(x, workers=4),
            ]
            wholes = [builder.emit(one) for one in gathers]
            products = [builder.emit(relax.op.matmul(one, w)) for one in wholes]
            out = builder.emit_output(relax.Tuple(products))
        builder.emit_func_output(out)
    module = tvm_ipc.get_pipeline("llvm", 4, overlap=2, blas=False)(builder.get())
    assert verify_cross_rank_safety(module) == []
    names = [
        str(call.op.global_symbol)
        for call in calls(module["main"])
        if isinstance(call.op, relax.ExternFunc)
    ]
    assert names.count("tvm_ipc.expose") == 6
    assert names.count("tvm_ipc.release") == 2
