# SPDX-License-Identifier: Apache-2.0
"""All-to-all with counts known to senders only, on the fake CUDA driver and a fake NCCL."""

from __future__ import annotations

import pytest

from tests import cuda_double

ROWS = """
import tvm_ipc
from tests.runtime.ragged_rows import SPREADS, check, rows_of

with tvm_ipc.Session(
    {ranks}, device="cuda", backend="{backend}", threads={threads}, timeout=60
) as session:
    session.import_python_module("tests.runtime.worker_functions")
    for number, spread in enumerate(SPREADS):
        for rows, row in ((0, (4,)), (3, (0,)), (50, (3,)), (400, (257,))):
            for memory in ("private", "arena"):
                sent = rows_of(spread, {ranks}, rows, row, "float32", 1 + number % 3)
                check(session, sent, "float32", memory, flags=number % 2)
    print("right")
"""

REFUSED = """
import numpy as np
import tvm_ipc
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.errors import WorkerError

def error_of(counts, capacity):
    run = session.get_global_func("tvm_ipc.ragged_all_to_all")
    x = session.put(np.ones((4, 6), "float32"))
    recv, received = session.empty((capacity, 6), "float32"), session.empty((2,), "int64")
    try:
        run(x, put_each(session, [np.array(one) for one in counts]), 0, 0, recv, received)
        session.sync()
    except WorkerError as error:
        return str(error)
    return "no error"

with tvm_ipc.Session(2, device="cuda", backend="{backend}", timeout=60) as session:
    print(error_of([[3, 2], [1, 1]], 8))
    print(error_of([[3, 1], [3, 1]], 5))
    print(error_of([[3, 1], [2, 1]], 5))
"""

EXPERTS = """
import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

import tvm_ipc
from tests.end_to_end.test_expert_programs import layer_of, module_of, sharded_experts
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc import comm

RANKS, EXPERTS, CHOICES = 2, 5, 2
n = tirx.Var("n", "int64")
types = {{
    "x": ((n, 24), "float32"),
    "experts": ((n, CHOICES), "int64"),
    "weights": ((n, CHOICES), "float32"),
    "gate_up": ((3, 20, 24), "float32"),
    "down": ((3, 24, 10), "float32"),
}}
mod = module_of(types, lambda _, *operands: comm.moe(*operands, workers=RANKS))
target = Target({{"kind": "cuda", "arch": "sm_90"}}, host="llvm")
with target:
    pipeline = tvm_ipc.get_pipeline(target, world_size=RANKS)
    program = tvm.compile(mod, target=target, relax_pipeline=pipeline)
with tvm_ipc.Session(RANKS, device="cuda", backend="{backend}", timeout=60) as session:
    main = session.load_vm_module(program)["main"]
    for spread in ("random", "some", "one_expert"):
        for tokens in (1, 13):
            layer = layer_of(tokens * RANKS, CHOICES, EXPERTS, spread, "float32", RANKS)
            operands = [np.split(x, RANKS) for x in (layer.x, layer.experts, layer.weights)]
            operands += [sharded_experts(x, RANKS) for x in (layer.gate_up, layer.down)]
            result = main(*(put_each(session, operand) for operand in operands))
            layer.check(np.concatenate([session.get(result, rank) for rank in range(RANKS)]))
print("right")
"""


@pytest.mark.parametrize(
    ("backend", "ranks", "threads"),
    [
        *(("cuda", 2, False), ("cuda", 3, True), ("cuda", 4, False)),
        # Threads that free memory would wait for messages of large tensors, which wait for them.
        *(("nccl", 2, False), ("nccl", 3, False), ("nccl", 4, False)),
    ],
)
def test_rows_arrive_in_the_order_of_senders(backend: str, ranks: int, threads: bool) -> None:
    code = ROWS.format(backend=backend, ranks=ranks, threads=threads)
    out, report = cuda_double.run(code, devices=4)
    assert out.split() == ["right"]
    assert report.violations == []


@pytest.mark.parametrize("backend", ["cuda", "nccl"])
def test_what_is_refused(backend: str) -> None:
    """Ranks that have wrong counts report them, and the session goes on."""
    out, _ = cuda_double.run(REFUSED.format(backend=backend), devices=2)
    too_many, no_room, right = out.splitlines()
    assert "the sum of counts is 5, and send has 4 rows" in too_many
    assert "worker 0 of the team receives 6 rows, and recv has room for 5" in no_room
    assert right == "no error"


@pytest.mark.parametrize("backend", ["cuda", "nccl"])
def test_experts_of_other_ranks(backend: str) -> None:
    """A compiled program, whose kernels sort the tokens and multiply them."""
    out, report = cuda_double.run(EXPERTS.format(backend=backend), devices=2)
    assert out.split() == ["right"]
    assert report.violations == []
