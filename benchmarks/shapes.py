# SPDX-License-Identifier: Apache-2.0
"""Modules of odd shapes: many branches, operators, functions or weights, as many as are asked for.

What takes time in a compiler is seldom the model that its authors had; each of these has one thing
that others have few of. They are compiled, and never run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op
from zoo import Graph

ROWS = 64
_TENSOR = ((ROWS, ROWS), "float32")


@dataclass(frozen=True)
class Shape:
    """A kind of module."""

    name: str
    build: Callable[[int], tvm.IRModule]
    sizes: tuple[int, int]  #: to compile; the second is four times the first


def _graph() -> Graph:
    return Graph("main", "float32")


def _tensor(name: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(*_TENSOR))


def _step(graph: Graph, x: Any, number: int) -> relax.Var:
    """What no other operator is fused with; one of twenty is an all-reduce."""
    return graph.sum_of_ranks(x) if number % 20 == 19 else graph.emit(op.nn.softmax(x))


def sequential_ifs(count: int) -> tvm.IRModule:
    """One `if` after the other, with an all-reduce in one of its branches."""
    graph = _graph()
    with graph.whole(2):
        x: Any = graph.parameter("x", _TENSOR[0])
        condition = graph.parameter("condition", (), "bool")
        for _ in range(count):
            first = graph.branch(lambda x=x: graph.sum_of_ranks(graph.emit(op.nn.softmax(x))))  # type: ignore[misc]
            other = graph.branch(lambda x=x: graph.emit(op.nn.softmax(x)))  # type: ignore[misc]
            x = graph.emit(relax.If(condition, first, other))
        graph.finish(x)
    return graph.module()


def external_ifs(count: int) -> tvm.IRModule:
    """One `if` after the other, with a call of an external function in each branch: no kernel."""
    graph = _graph()
    with graph.whole(2):
        x: Any = graph.parameter("x", _TENSOR[0])
        condition = graph.parameter("condition", (), "bool")
        for _ in range(count):
            branches = [
                graph.branch(lambda x=x, name=name: graph.emit(_external(name, x)))  # type: ignore[misc]
                for name in ("f", "g")
            ]
            x = graph.emit(relax.If(condition, *branches))
        graph.finish(x)
    return graph.module()


def _external(name: str, x: Any) -> relax.Call:
    return op.call_dps_packed(name, x, relax.TensorType(*_TENSOR))


def reducing_ifs(count: int) -> tvm.IRModule:
    """One `if` after the other, with an all-reduce in each branch and nothing else."""
    graph = _graph()
    with graph.whole(2):
        x: Any = graph.parameter("x", _TENSOR[0])
        condition = graph.parameter("condition", (), "bool")
        for _ in range(count):
            branches = [graph.branch(lambda x=x: graph.sum_of_ranks(x)) for _ in range(2)]  # type: ignore[misc]
            x = graph.emit(relax.If(condition, *branches))
        graph.finish(x)
    return graph.module()


def nested_ifs(count: int) -> tvm.IRModule:
    """An `if` in an `if` in an `if`; each needs a tensor before, in and after the inner one."""
    graph = _graph()
    with graph.whole(2):
        x = graph.parameter("x", _TENSOR[0])
        condition = graph.parameter("condition", (), "bool")

        def level(x: Any, below: int) -> relax.Var:
            y = graph.emit(op.nn.softmax(x))
            if not below:
                return graph.sum_of_ranks(y)
            first = graph.branch(lambda: level(y, below - 1))
            other = graph.branch(lambda: graph.sum_of_ranks(graph.emit(op.nn.softmax(y))))
            inner = graph.emit(relax.If(condition, first, other))
            return graph.emit(op.add(graph.emit(op.nn.softmax(inner)), y))

        graph.finish(level(x, count))
    return graph.module()


def deep(count: int) -> tvm.IRModule:
    """Operators one after the other, each of which also reads a result of long before."""
    graph = _graph()
    with graph.whole(1):
        values: list[Any] = [graph.parameter("x", _TENSOR[0])]
        for number in range(count // 2):
            values.append(_step(graph, values[-1], number))
            values.append(graph.emit(op.matmul(values[-1], values[-min(100, len(values))])))
        graph.finish(values[-1])
    return graph.module()


def wide(count: int) -> tvm.IRModule:
    """Operators beside each other, whose results are all live until the last one has run."""
    graph = _graph()
    with graph.whole(1):
        x = graph.parameter("x", _TENSOR[0])
        parts = [_step(graph, x, number) for number in range(count)]
        graph.finish(graph.emit(op.call_dps_packed("all", parts, relax.TensorType(*_TENSOR))))
    return graph.module()


def functions(count: int) -> tvm.IRModule:
    """Public functions, and one that calls them all."""
    builder = relax.BlockBuilder()
    for number in range(count):
        x = _tensor("x")
        with builder.function(f"part{number}", [x]):
            with builder.dataflow():
                y = builder.emit(op.ccl.allreduce(builder.emit(op.nn.softmax(x)), "sum", False))
                y = builder.emit_output(op.nn.softmax(y))
            builder.emit_func_output(y)
    module = builder.get()
    x = y = _tensor("x")
    with builder.function("main", [x]):
        for number in range(count):
            y = builder.emit(relax.Call(module.get_global_var(f"part{number}"), [y]))
        builder.emit_func_output(y)
    return builder.get()


def call_sites(count: int) -> tvm.IRModule:
    """One private function that is called again and again."""
    builder = relax.BlockBuilder()
    x = _tensor("x")
    with builder.function("part", [x], private=True):
        y = builder.emit(op.ccl.allreduce(builder.emit(op.nn.softmax(x)), "sum", False))
        builder.emit_func_output(y)
    part = builder.get().get_global_var("part")
    x = y = _tensor("x")
    with builder.function("main", [x]):
        for _ in range(count):
            y = builder.emit(relax.Call(part, [builder.emit(op.nn.softmax(y))]))
        builder.emit_func_output(y)
    return builder.get()


def weights(count: int) -> tvm.IRModule:
    """A chain of matrix products whose weights are one tuple."""
    graph = _graph()
    with graph.whole(1):
        x: Any = graph.parameter("x", _TENSOR[0])
        every = relax.Var("weights", relax.TupleType([relax.TensorType(*_TENSOR)] * count))
        graph.parameters.append(every)
        for number in range(count):
            x = graph.emit(op.matmul(x, graph.emit(relax.TupleGetItem(every, number))))
            x = graph.sum_of_ranks(x) if number % 20 == 19 else x
        graph.finish(x)
    return graph.module()


def tuples(count: int) -> tvm.IRModule:
    """Eight tensors that go from tuple to tuple, one of them made anew each time."""
    graph = _graph()
    with graph.whole(1):
        x = graph.parameter("x", _TENSOR[0])
        whole = graph.emit(relax.Tuple([graph.emit(op.nn.softmax(x)) for _ in range(8)]))
        for number in range(count):
            parts = [graph.emit(relax.TupleGetItem(whole, part)) for part in range(8)]
            parts[number % 8] = _step(graph, parts[number % 8], number)
            whole = graph.emit(relax.Tuple(parts))
        graph.finish(whole)
    return graph.module()


def results(count: int) -> tvm.IRModule:
    """All-reduces of one tensor, all of which are returned."""
    graph = _graph()
    with graph.whole(1):
        x = graph.emit(op.nn.softmax(graph.parameter("x", _TENSOR[0])))
        graph.finish(graph.emit(relax.Tuple([graph.sum_of_ranks(x) for _ in range(count)])))
    return graph.module()


def symbols(count: int) -> tvm.IRModule:
    """Inputs, each with a symbolic size of its own."""
    graph = _graph()
    with graph.whole(count):
        parts = []
        for number in range(count):
            x: Any = graph.parameter(f"x{number}", (tvm.tirx.Var(f"n{number}", "int64"), ROWS))
            x = graph.emit(op.nn.softmax(x))
            x = graph.sum_of_ranks(x) if number % 4 == 3 else x
            parts.append(graph.emit(op.sum(graph.emit(op.nn.softmax(x)))))
        graph.finish(graph.emit(relax.Tuple(parts)))
    return graph.module()


#: Modules of ifs, by what is in their branches.
IFS = {
    "softmax, and an all-reduce in one": sequential_ifs,
    "an external function in each": external_ifs,
    "an all-reduce in each": reducing_ifs,
}
SHAPES = (
    Shape("ifs, one after the other", sequential_ifs, (80, 320)),
    Shape("ifs, one in the other", nested_ifs, (40, 160)),
    Shape("operators, one after the other", deep, (750, 3000)),
    Shape("operators beside each other", wide, (750, 3000)),
    Shape("functions", functions, (125, 500)),
    Shape("calls of one function", call_sites, (250, 1000)),
    Shape("weights in one tuple", weights, (500, 2000)),
    Shape("tuples of tuples", tuples, (250, 1000)),
    Shape("all-reduces of one tensor", results, (250, 1000)),
    Shape("symbolic sizes", symbols, (50, 200)),
)
