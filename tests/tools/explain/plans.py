# SPDX-License-Identifier: Apache-2.0
"""A plan small enough to know by heart."""

from __future__ import annotations

from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation, Memory, Question
from tvm_ipc.transform.report import (
    Decision,
    Event,
    FunctionPlan,
    PlannedStorage,
    PlannedTensor,
    Report,
    Transfer,
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


def overlapping_plan() -> FunctionPlan:
    """A gather in two chunks, which products go on beside; a work beside a kernel; a sum alone."""
    texts = (
        ("show(a)", None),
        ("show(b)", None),
        ("matmul(a, w, c)", "blas.matmul"),
        ("peer(a)", None),
        ("matmul(p, w, d)", "blas.matmul"),
        ("post(allreduce, x, y)", None),
        ("silu(c)", "silu"),
        ("hide(a, b)", None),
        ("wait(work)", None),
        ("allreduce(d)", None),
        ("return d", None),
    )
    meetings = {7: "release of s, t", 9: "allreduce of d (sum)"}
    events = tuple(
        Event(text, meetings.get(index), computes=name) for index, (text, name) in enumerate(texts)
    )
    return FunctionPlan(
        "main",
        storages=(PlannedStorage("storage", "global", 2048, "2048"),),
        tensors=(tensor("a", 0, 7), tensor("d", 4, 10, offset="1024")),
        events=events,
        transfers=(
            Transfer("2 chunks of x", "shown", 0, 7, (0, 1), (3,)),
            Transfer("allreduce of x", "posted", 5, 8, (5,), (8,)),
            Transfer("allreduce of d (sum)", "called", 9, 9, (9,), (9,)),
        ),
    )


def explanation_of(plan: FunctionPlan) -> Explanation:
    explanation = small_explanation()
    explanation.report.plans[:] = [plan]
    return explanation
