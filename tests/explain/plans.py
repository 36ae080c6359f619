# SPDX-License-Identifier: Apache-2.0
"""A plan small enough to know by heart."""

from __future__ import annotations

from tvm_ipc.inspection.explanation import Explanation, Memory, Question
from tvm_ipc.transform.report import (
    Decision,
    Event,
    FunctionPlan,
    PlannedStorage,
    PlannedTensor,
    Report,
)


def tensor(name: str, first: int, last: int, **others: object) -> PlannedTensor:
    values: dict[str, object] = {
        "scope": "global",
        "dtype": "float32",
        "bytes": 1024,
        "size": "1024",
        "storage": 0,
        "offset": "0",
        "peers_until": None,
    }
    return PlannedTensor(name, first=first, last=last, **{**values, **others})  # type: ignore[arg-type]


def small_plan(function: str = "main") -> FunctionPlan:
    """Two tensors in a storage, one that peers read, one of symbolic size, and a result."""
    return FunctionPlan(
        function,
        storages=(
            PlannedStorage("storage", "global", 2048, "2048"),
            PlannedStorage("shared", "ipc_memory", 512, "512"),
            PlannedStorage("symbolic", "global", None, "n * T.int64(4)"),
        ),
        tensors=(
            tensor("a", 0, 1),
            tensor("b", 1, 2, offset="1024"),
            tensor("c", 2, 3, scope="ipc_memory", storage=1, bytes=512, peers_until=5),
            tensor("d", 4, 5, storage=2, bytes=None, size="n * T.int64(4)"),
            tensor("result", 5, 6, storage=-1),
        ),
        events=(
            Event("f(x, a)"),
            Event("g(a, b)"),
            Event("h(b, c)"),
            Event("allreduce(c)", "allreduce of c (sum)", "left out"),
            Event("i(c, d)"),
            Event("allreduce(d)", "allreduce of d (sum)", "kept"),
            Event("return result"),
        ),
    )


def small_explanation(function: str = "main", source: str = "model.json") -> Explanation:
    reason = "its input stays live until the allreduce of lv"
    decisions = [
        Decision("StaticPlanBlockMemory", function, f"allreduce of lv{i}", "barrier left out", text)
        for i, text in enumerate([f"{reason}{n}" for n in (1, 2, 3)])
    ]
    memory = Memory(
        {"global": 2048, "ipc_memory": 512},
        {"global": 4096, "ipc_memory": 2048},
        {"global": 2048, "ipc_memory": 512},
    )
    question = Question(source, "llvm", 2, "auto", {})
    report = Report(decisions, [small_plan(function)])
    return Explanation(question, {function: {"n": 100}}, report, {function: memory})
