# SPDX-License-Identifier: Apache-2.0
"""Loops over chunks: when they are made, what they are, and that programs do not grow."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax, tirx

import tvm_ipc
from tests.end_to_end.test_chunks_in_loops import batched
from tests.end_to_end.test_marked_for_streams import linear
from tvm_ipc import comm
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, relax_functions
from tvm_ipc.comm import Mesh
from tvm_ipc.packed_functions.program_function_declarations import INTERNAL, NO_ALIAS
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import OverlapCommunication, PipelineAllGather
from tvm_ipc.transform.overlap.chunk_loops import MOST_UNROLLED

N = tirx.Var("n", "int64")


def gather(rows: int) -> tvm.IRModule:
    """A matmul of gathered rows, of each of two ranks."""
    x = relax.Var("x", relax.TensorType((rows, 16), "float32"))
    w = relax.Var("w", relax.TensorType((16, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        whole = builder.emit(comm.allgather(x, workers=2))
        builder.emit_func_output(builder.emit(relax.op.matmul(whole, w)))
    return builder.get()


def marked(chunks: Any) -> tvm.IRModule:
    return linear(Mesh({"d": 2}), "d", (chunks, 2, 4, 32), 16)


def size(module: tvm.IRModule, **options: Any) -> int:
    """The number of lines of the executable: its instructions and functions."""
    pipeline = tvm_ipc.get_pipeline("llvm", 2, blas=False, **options)
    return len(tvm.compile(module, "llvm", relax_pipeline=pipeline).as_text().splitlines())


def test_programs_do_not_grow_with_the_number_of_chunks() -> None:
    """The last one is larger than twice the largest of an unrolled program at no time."""
    for streams in (1, 2, 3):
        sizes = [size(marked(chunks), streams=streams) for chunks in (16, 64, 1024)]
        assert max(sizes) <= 1.1 * min(sizes)
        assert max(sizes) <= 2 * size(marked(MOST_UNROLLED), streams=streams)
    gathers = [size(PipelineAllGather(chunks)(gather(4096))) for chunks in (16, 64, 1024)]
    assert max(gathers) <= 1.1 * min(gathers)
    for kind in ("allgather", "reduce_scatter"):
        blocks = (batched(kind, 2, number, 8, flat=False) for number in (16, 64, 1024))
        batches = [size(module, overlap=2) for module in blocks]
        assert max(batches) <= 1.1 * min(batches)


def calls_of(module: tvm.IRModule) -> dict[str, list[str]]:
    """The functions that each Relax function calls, but not those that make views."""
    found: dict[str, list[str]] = {}
    for variable, function in relax_functions(module):
        names = [
            str(getattr(call.op, "name_hint", "") or getattr(call.op, "global_symbol", ""))
            for call in calls(function)
        ]
        names = [name.removeprefix("tvm_ipc.") for name in names if name]
        found[str(variable.name_hint)] = [name for name in names if name != "view"]
    return found


def test_a_marked_axis_of_a_symbolic_extent_becomes_a_loop() -> None:
    module = LowerPlacements()(marked(N))
    relax.analysis.well_formed(module)
    chunk, chunks = "main_lv1_chunk", "main_lv1_chunks"
    assert calls_of(module) == {
        # One chunk is gathered first. The last two, or the last one, follow the loop.
        "main": ["start", "wait", chunks, "start", chunk, "wait", chunk, chunk],
        chunks: ["main_lv1_chunk_step", chunks, chunks],
        "main_lv1_chunk_step": ["start", "assemble", "start", "wait", "assemble", "wait"],
        chunk: ["assemble"],
    }
    for variable, function in relax_functions(module):
        assert ("global_symbol" in function.attrs) == (str(variable.name_hint) == "main")
        assert not function.is_pure
    attrs = module[chunk].attrs
    assert bool(attrs[INTERNAL]) and [str(name) for name in attrs[NO_ALIAS]] == ["lv5"]
    relax.analysis.well_formed(tvm.script.from_source(module.script()))


@pytest.mark.parametrize("chunks", [1, 8, 9])
def test_few_chunks_are_unrolled(chunks: int) -> None:
    functions = calls_of(LowerPlacements()(marked(chunks)))
    assert (len(functions) == 1) == (chunks <= MOST_UNROLLED)
    assert functions["main"].count("start") == (chunks if chunks <= MOST_UNROLLED else 1)


def test_blocks_of_rows_become_a_loop_that_does_not_communicate() -> None:
    module = OverlapCommunication(chunks=2)(batched("allgather", 2, N, 8, flat=True))
    relax.analysis.well_formed(module)
    functions = calls_of(module)
    loops = [name for name in functions if name.endswith("_blocks")]
    assert functions["main"].count(loops[0]) == 3  # the own rows, and two chunks of the peer's
    assert [names for name, names in functions.items() if name.endswith("_block")] == [
        ["assemble", "assemble"]  # of two matmuls
    ]
    assert not module["main"].is_pure


def test_names_of_the_module_are_left_alone() -> None:
    module = marked(N)
    taken = relax.BlockBuilder(module)
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with taken.function("main_lv1_chunks", [x]):
        taken.emit_func_output(x)
    lowered = LowerPlacements()(taken.get())
    assert {"main_lv1_chunks", "main_lv1_chunks_1"} <= calls_of(lowered).keys()
    assert [param.name for param in lowered["main_lv1_chunks"].params] == ["x"]
