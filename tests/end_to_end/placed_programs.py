# SPDX-License-Identifier: Apache-2.0
"""Runs programs for all ranks: cuts what they are given and what NumPy computes, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import tvm
from tvm import relax

import tvm_ipc
from tests import collective_results
from tests.runtime.tensors_of_ranks import put_each as put
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard, place

Array = np.ndarray[Any, Any]
Given = dict[str, Placement]


@dataclass
class Program:
    """A program for all ranks.

    Attributes
    ----------
    make : given the placed parameters, the results.
    given : where each parameter lies.
    shapes : of the parameters, extents are numbers or expressions.
    wanted : where each result is to lie, None where nothing is said.
    numpy : what the results are.
    """

    make: Callable[..., Sequence[relax.Expr]]
    given: list[Given]
    shapes: list[tuple[Any, ...]]
    wanted: list[Given | None]
    numpy: Callable[..., Sequence[Array]]
    dtype: str = "float32"


def add(builder: relax.BlockBuilder, name: str, program: Program, mesh: Mesh) -> None:
    """Add a function."""
    params = [
        relax.Var(f"p{k}", relax.TensorType(shape, program.dtype))
        for k, shape in enumerate(program.shapes)
    ]
    with builder.function(name, params):
        with builder.dataflow():
            xs = [
                builder.emit(place(x, mesh, given))
                for x, given in zip(params, program.given, strict=True)
            ]
            results = []
            for y, wanted in zip(program.make(*xs), program.wanted, strict=True):
                y = builder.emit(y)
                results.append(y if wanted is None else builder.emit(place(y, mesh, wanted)))
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)


def module(mesh: Mesh, programs: dict[str, Program]) -> tvm.IRModule:
    """Return a module of programs."""
    builder = relax.BlockBuilder()
    for name, program in programs.items():
        add(builder, name, program, mesh)
    return builder.get()


@contextmanager
def session_of(mesh: Mesh) -> Iterator[Any]:
    """A session of as many workers as the mesh has ranks."""
    with tvm_ipc.Session(len(mesh.ranks), threads=True, timeout=60) as session:
        yield session


def run(session: Any, mesh: Mesh, programs: dict[str, Program], *sizes: Any) -> None:
    """Compile programs, call each with each list of shapes, and compare with NumPy.

    Parameters
    ----------
    sizes : given a name, the shapes of the parameters; those of the program if there are none.
    """
    pipeline = tvm_ipc.get_pipeline("llvm", len(mesh.ranks))
    executable = tvm.compile(module(mesh, programs), "llvm", relax_pipeline=pipeline)
    loaded = session.load_vm_module(executable)
    for name, program in programs.items():
        for shapes in sizes or (program.shapes,):
            call(session, mesh, program, loaded[name], shapes)


def call(session: Any, mesh: Mesh, program: Program, function: Any, shapes: Any) -> None:
    """Call a function and compare what each rank gets."""
    random = np.random.default_rng(0)
    wholes = [_values(random, shape, program.dtype) for shape in shapes]
    arguments = []
    for whole, given in zip(wholes, program.given, strict=True):
        arguments.append(put(session, cut(mesh, whole, given, random)))
    results = function(*arguments)
    expected = program.numpy(*wholes)
    found = {rank: results.debug_get_from_remote(rank) for rank in mesh.ranks}
    for k, (right, wanted) in enumerate(zip(expected, program.wanted, strict=True)):
        parts = {rank: np.array(found[rank][k].numpy()) for rank in mesh.ranks}
        compare(mesh, parts, np.asarray(right), wanted or {}, f"result {k} of {shapes}")


def _values(random: Any, shape: Any, dtype: str) -> Array:
    if "int" in dtype:
        return random.integers(1, 5, shape).astype(dtype)
    return random.uniform(-1, 1, shape).astype(dtype)


def cut(mesh: Mesh, whole: Array, given: Given, random: Any) -> dict[int, Array]:
    """Return what each rank has of a tensor; partial ones are parts of a sum."""
    parts = {tuple(0 for _ in mesh.axes): whole}
    for index, (name, workers) in enumerate(mesh.axes.items()):
        one = given.get(name, Replica())
        more = {}
        for place_, part in parts.items():
            for k, piece in enumerate(_pieces(part, one, workers, random)):
                more[(*place_[:index], k, *place_[index + 1 :])] = piece
        parts = more
    places = product(*map(range, mesh.axes.values()))
    by_rank = dict(zip(mesh.ranks, places, strict=True))
    return {rank: np.ascontiguousarray(parts[by_rank[rank]]) for rank in sorted(by_rank)}


def _pieces(whole: Array, one: Placement, workers: int, random: Any) -> list[Array]:
    if isinstance(one, Shard):
        return collective_results.cut(whole, workers, one.axis)
    if isinstance(one, Partial):
        others = [_values(random, whole.shape, str(whole.dtype)) for _ in range(workers - 1)]
        return [whole - sum(others), *others] if others else [whole]
    return [whole] * workers


def compare(mesh: Mesh, parts: dict[int, Array], right: Array, wanted: Given, where: str) -> None:
    """Compare what ranks have, all of it, also beyond the ends, with what is cut of a tensor."""
    for name, one in wanted.items():
        if isinstance(one, Partial):
            for team in mesh.teams(name):
                total = sum(parts[rank] for rank in team)
                parts = {**parts, **dict.fromkeys(team, total)}
    whole = {name: one for name, one in wanted.items() if not isinstance(one, Partial)}
    for rank, wanted_part in cut(mesh, right, whole, None).items():
        np.testing.assert_allclose(
            parts[rank], wanted_part, rtol=1e-4, atol=1e-4, err_msg=f"{where}, rank {rank}"
        )
