# SPDX-License-Identifier: Apache-2.0
"""The passes that TVM has too, ours and TVM's in every mix, in the order that mlc-llm has.

Changing an import is the whole migration: each pass is constructed as TVM's is, what follows it may
be TVM's, and the program gives what NumPy gives, whatever rank is late.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.relax import transform

import tvm_ipc
import tvm_ipc.transform
from tests.end_to_end.harness import AddDelays, Program, parsed, run
from tests.passes_of_tvm import ALLOCATE, FUSE, LOWER

PASSES = {"ours": tvm_ipc.transform, "TVM's": transform}
GRAPHS = {"ours": tvm_ipc.gpu, "TVM's": transform}
# No plan; or no all-reduce in IPC memory, and so none of the lowering that it needs.
MIXES = [
    *product(PASSES, [*PASSES, None], PASSES),
    *product([None], PASSES, [*PASSES, None]),
]


def pipeline(
    rewrite: str | None, plan: str | None, lower: str | None, graphs: str = "ours"
) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            *FUSE,
            transform.RewriteDataflowReshape(),
            *ALLOCATE,
            *([PASSES[rewrite].IPCAllReduceRewrite(1)] if rewrite else []),
            *([PASSES[plan].StaticPlanBlockMemory()] if plan else []),
            AddDelays(),
            GRAPHS[graphs].RewriteCUDAGraph(),
            *([PASSES[lower].LowerGPUIPCAllocStorage()] if lower else []),
            *LOWER,
        ]
    )


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with tvm_ipc.Session(2, timeout=60) as session:
        session.import_python_module("tests.end_to_end.race_worker")
        yield session


@pytest.mark.slow
@pytest.mark.parametrize(("rewrite", "plan", "lower"), MIXES)
def test_any_mix_is_right(
    rewrite: str | None, plan: str | None, lower: str | None, session: Any, tmp_path: Path
) -> None:
    programs = [Program(seed, 12, 2, 1) for seed in (1, 3, 5)]
    path = tmp_path / "programs.so"
    mix = pipeline(rewrite, plan, lower)
    tvm.compile(parsed(programs), "llvm", relax_pipeline=mix).export_library(str(path))
    session.get_global_func("tests.race_reset")(7)
    run(session, programs, path, (5, 17))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", PASSES)
@pytest.mark.parametrize(("rewrite", "plan", "lower"), MIXES)
def test_any_mix_understands_cuda_graphs(
    rewrite: str | None, plan: str | None, lower: str | None, graphs: str
) -> None:
    programs = [Program(seed, 12, 2, 1) for seed in (1, 3)]
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
        mod = pipeline(rewrite, plan, lower, graphs)(parsed(programs))
    held = [
        function.script()
        for variable, function in mod.functions_items()
        if "_cuda_graph_capture" in variable.name_hint
    ]
    allreduce = "cuda_ipc.custom_allreduce" if rewrite else "runtime.disco.allreduce"
    assert any(allreduce in text for text in held) or (held and plan is None)
