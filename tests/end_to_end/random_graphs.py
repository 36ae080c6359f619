# SPDX-License-Identifier: Apache-2.0
"""Random small graphs with random plans, as data, which fail as smaller ones if they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_ipc.comm import Mesh, Shard, place

EXTENTS = (1, 2, 3, 4, 5, 6, 8)
STEPS = 7
#: Elements of the largest tensor.
LARGEST = 1500

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """An operator, which earlier values it is given, and numbers."""

    operator: str
    of: tuple[int, ...]
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A program.

    Attributes
    ----------
    params : their shapes.
    plan : for each parameter which of its axes is divided, by axes of the mesh.
    steps : values that are made; the parameters come before them.
    result : which value is returned, negated.
    returned : which other values are returned, as they are; each is also used by a step.
    annotations : values that steps use in a placement: which of their axes is divided, by axes of
        the mesh.
    """

    params: tuple[Dims, ...]
    plan: tuple[dict[str, int], ...]
    steps: tuple[Step, ...]
    result: int
    returned: tuple[int, ...] = ()
    annotations: tuple[tuple[int, dict[str, int]], ...] = ()

    def arrays(self) -> list[Any]:
        """Return values of both signs, no two equal."""
        found = []
        for k, shape in enumerate(self.params):
            size = int(np.prod(shape))
            values = np.random.default_rng(k).permutation(np.arange(-size, 2 * size))[:size]
            found.append(((values * 2 + 1) / (2 * size)).reshape(shape).astype("float32"))
        return found

    def needed(self) -> set[int]:
        """Return of which values the results are made, and these."""
        found = {self.result, *self.returned}
        for k in reversed(range(len(self.steps))):
            if k + len(self.params) in found:
                found.update(self.steps[k].of)
        return found

    def emit(self, builder: relax.BlockBuilder, name: str, mesh: Mesh | None = None) -> None:
        """Add the function to a module, with its annotations if there is a mesh."""
        places = dict(self.annotations) if mesh is not None else {}
        params = [
            relax.Var(f"{name}_p{k}", relax.TensorType(shape, "float32"))
            for k, shape in enumerate(self.params)
        ]
        needed = self.needed()
        values: list[Any] = list(params)
        used: list[Any] = list(params)
        with builder.function(name, params):
            with builder.dataflow():
                for k, step in enumerate(self.steps, start=len(params)):
                    made = None
                    if k in needed:
                        made = make(builder, step, [used[one] for one in step.of])
                    values.append(made)
                    if k in needed and k in places:
                        divided = {axis: Shard(cut) for axis, cut in places[k].items()}
                        made = builder.emit(place(made, mesh, divided))
                    used.append(made)
                last = builder.emit(op.negative(used[self.result]))
                others = [values[one] for one in self.returned]
                out = builder.emit_output(relax.Tuple([last, *others]))
            builder.emit_func_output(out)


def smaller(graph: Graph) -> Iterator[Graph]:
    """Yield graphs that lack something of a graph."""
    for one in graph.returned:
        yield replace(graph, returned=tuple(k for k in graph.returned if k != one))
    needed = sorted(graph.needed() - {graph.result})
    for one in needed:
        yield replace(graph, result=one)
    for k, axes in enumerate(graph.plan):
        for name in axes:
            rest = {other: axis for other, axis in axes.items() if other != name}
            yield replace(graph, plan=(*graph.plan[:k], rest, *graph.plan[k + 1 :]))


def shrunk(graph: Graph, fails: Callable[[Graph], bool]) -> Graph:
    """Return a graph that still fails, and nothing smaller does."""
    for one in smaller(graph):
        if fails(one):
            return shrunk(one, fails)
    return graph


# ---- operators ------------------------------------------------------------------------------


def make(builder: relax.BlockBuilder, step: Step, xs: list[Any]) -> relax.Var:
    """Return the variable of a step."""
    return MAKERS[step.operator](builder.emit, *xs, *step.given)


def _heads(emit: Any, x: Any, heads: int) -> Any:
    """Attention among the rows of a matrix, by so many heads."""
    rows, width = _dims(x)
    apart = emit(
        op.permute_dims(emit(op.reshape(x, (1, rows, heads, width // heads))), [0, 2, 1, 3])
    )
    scores = emit(op.matmul(apart, emit(op.permute_dims(apart, [0, 1, 3, 2]))))
    mixed = emit(op.matmul(emit(op.nn.softmax(scores)), apart))
    return emit(op.reshape(emit(op.permute_dims(mixed, [0, 2, 1, 3])), (rows, width)))


def _repeated(emit: Any, x: Any, axis: int, count: int) -> Any:
    """An axis each of whose elements is repeated, as exporters write it."""
    dims = _dims(x)
    wide = emit(op.expand_dims(x, axis + 1))
    wide = emit(op.broadcast_to(wide, (*dims[: axis + 1], count, *dims[axis + 1 :])))
    return emit(op.reshape(wide, (*dims[:axis], dims[axis] * count, *dims[axis + 1 :])))


def _norm(emit: Any, x: Any) -> Any:
    weight = relax.const((np.arange(_dims(x)[-1]) - 1.5).astype("float32"))
    return emit(op.nn.rms_norm(x, weight, axes=-1, epsilon=1e-5))


def _layer_norm(emit: Any, x: Any) -> Any:
    extent = _dims(x)[-1]
    gamma = relax.const((np.arange(extent) + 0.5).astype("float32"))
    beta = relax.const((1.5 - np.arange(extent)).astype("float32"))
    return emit(op.nn.layer_norm(x, gamma, beta, axes=-1))


def _taken(emit: Any, x: Any, axis: int, indices: Any) -> Any:
    return emit(op.take(x, relax.const(np.array(indices, "int64")), axis))


def _split(emit: Any, x: Any, axis: int, at: int, which: int) -> Any:
    return emit(relax.TupleGetItem(emit(op.split(x, [at], axis)), which))


MAKERS: dict[str, Callable[..., Any]] = {
    "relu": lambda emit, x: emit(op.nn.relu(x)),
    "tanh": lambda emit, x: emit(op.tanh(x)),
    "silu": lambda emit, x: emit(op.nn.silu(x)),
    "cos": lambda emit, x: emit(op.cos(x)),
    "halves": lambda emit, x: emit(op.astype(emit(op.astype(x, "float64")), "float32")),
    "add": lambda emit, x, y: emit(op.add(x, y)),
    "subtract": lambda emit, x, y: emit(op.subtract(x, y)),
    "multiply": lambda emit, x, y: emit(op.multiply(emit(op.tanh(x)), y)),
    "maximum": lambda emit, x, y: emit(op.maximum(x, y)),
    "where": lambda emit, x, y: emit(op.where(emit(op.greater(x, relax.const(0.1))), x, y)),
    "matmul": lambda emit, x, y: emit(op.matmul(x, y)),
    "linear": lambda emit, x, y: emit(op.matmul(x, emit(op.permute_dims(y)))),
    "heads": _heads,
    "repeated": _repeated,
    "permute": lambda emit, x, axes: emit(op.permute_dims(x, list(axes))),
    "reshape": lambda emit, x, dims: emit(op.reshape(x, dims)),
    "expand": lambda emit, x, axis: emit(op.expand_dims(x, axis)),
    "broadcast": lambda emit, x, dims: emit(op.broadcast_to(x, dims)),
    "concat": lambda emit, x, y, axis: emit(op.concat([x, y], axis)),
    "stack": lambda emit, x, y, axis: emit(op.stack([x, y], axis)),
    "split": _split,
    "slice": lambda emit, x, axis, first, last, step: emit(
        op.strided_slice(x, [axis], [first], [last], [step])
    ),
    "flip": lambda emit, x, axis: emit(op.flip(x, axis)),
    "repeat": lambda emit, x, count, axis: emit(op.repeat(x, count, axis)),
    "take": _taken,
    "cumsum": lambda emit, x, axis: emit(op.cumsum(x, axis)),
    "softmax": lambda emit, x, axis: emit(op.nn.softmax(x, axis)),
    "norm": _norm,
    "layer_norm": _layer_norm,
    "sum": lambda emit, x, axis, keep: emit(op.sum(x, axis=axis, keepdims=keep)),
    "mean": lambda emit, x, axis, keep: emit(op.mean(x, axis=axis, keepdims=keep)),
    "max": lambda emit, x, axis, keep: emit(op.max(x, axis=axis, keepdims=keep)),
    "variance": lambda emit, x, axis, keep: emit(op.variance(x, axis=axis, keepdims=keep)),
}


def _dims(x: Any) -> Dims:
    return tuple(int(extent) for extent in x.ty.shape)


# ---- drawing --------------------------------------------------------------------------------


def draw(seed: int, axes: tuple[str, ...]) -> Graph:
    """Return a random graph for a mesh with some axes."""
    random = Random(seed)
    a, b, c = (random.choice(EXTENTS) for _ in range(3))
    heads = random.choice((2, 3, 4, 6))
    params: list[Dims] = [(a, b), (b, c), (c,), (random.choice((1, 2, 3)), a, b), (b, heads * 2)]
    plan = [_division(random, shape, axes) for shape in params]
    graph = Graph(tuple(params), tuple(plan), (), 0)
    builder = relax.BlockBuilder()
    values: list[Any] = [
        relax.Var(f"p{k}", relax.TensorType(shape, "float32")) for k, shape in enumerate(params)
    ]
    steps: list[Step] = []
    # A product that is partial along one axis of the mesh and sharded along another one.
    mixed = len(axes) > 1 and random.random() < 0.4
    if mixed:
        plan[0], plan[1] = {}, dict(zip(random.sample(axes, 2), (0, 1), strict=True))
    with builder.function("f", values[:]):
        with builder.dataflow():
            while len(steps) < STEPS:
                first = mixed and not steps
                dims = [_dims(x) for x in values]
                step = Step("matmul", (0, 1)) if first else draw_step(random, dims)
                if step is None:
                    continue
                made = make(builder, step, [values[one] for one in step.of])
                if np.prod(_dims(made)) > LARGEST:
                    continue
                steps.append(step)
                values.append(made)
            out = builder.emit_output(op.negative(values[-1]))
        builder.emit_func_output(out)
    graph = replace(graph, steps=tuple(steps), result=len(values) - 1)
    # Values that later steps use, above all those that several use.
    uses = Counter(
        k for n, step in enumerate(steps) if n + len(params) in graph.needed() for k in step.of
    )
    made = [k for k in uses if k >= len(params)]
    returned = [k for k in made if random.random() < (0.8 if uses[k] > 1 else 0.4)]
    graph = replace(graph, returned=tuple(returned))
    # A plan of what nothing uses is refused where the program has another one of its shape.
    needed = graph.needed()
    return replace(graph, plan=tuple(one if k in needed else {} for k, one in enumerate(plan)))


def annotated(graph: Graph, seed: int, axes: tuple[str, ...]) -> Graph:
    """Return a graph with random annotations of its values, and with a part of its plan."""
    random = Random(seed)
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"p{k}", relax.TensorType(s, "float32")) for k, s in enumerate(graph.params)
    ]
    values: list[Any] = list(params)
    with builder.function("f", params):
        with builder.dataflow():
            for step in graph.steps:
                values.append(make(builder, step, [values[one] for one in step.of]))
            out = builder.emit_output(op.negative(values[-1]))
        builder.emit_func_output(out)
    made = sorted(k for k in graph.needed() if k >= len(params) and _dims(values[k]))
    chosen = random.sample(made, min(len(made), random.choice((1, 1, 2, 3))))
    annotations = tuple((k, _division(random, _dims(values[k]), axes)) for k in sorted(chosen))
    kept = random.choice((0, 0, 0.5))
    plan = tuple(each if random.random() < kept else {} for each in graph.plan)
    return replace(graph, annotations=annotations, plan=plan)


def _division(random: Random, shape: Dims, axes: tuple[str, ...]) -> dict[str, int]:
    left = list(range(len(shape)))
    random.shuffle(left)
    return {name: left.pop() for name in axes if left and random.random() < 0.7}


def draw_step(random: Random, shapes: list[Dims]) -> Step | None:
    """Return an operator of the latest values, or of any; None where it does not fit."""
    last = len(shapes) - 1
    k = random.choice([*range(len(shapes)), last, last, last, last])
    shape = shapes[k]
    name = random.choice(list(MAKERS) + ["matmul", "linear", "heads", "reshape"] * 2)
    axis = random.randrange(len(shape)) if shape else 0
    if name in ("relu", "tanh", "silu", "cos", "halves"):
        return Step(name, (k,))
    if name in ("add", "subtract", "multiply", "maximum", "where"):
        others = [j for j, other in enumerate(shapes) if _repeats(shape, other)]
        return Step(name, (k, random.choice(others)))
    if name in ("matmul", "linear"):
        others = [
            j
            for j, other in enumerate(shapes)
            if shape
            and (name == "matmul" or len(other) == 2)
            and _multiplies(shape, other if name == "matmul" else other[::-1])
        ]
        return Step(name, (k, random.choice(others))) if others else None
    if not shape:
        return None
    if name in ("concat", "stack"):
        others = [
            j
            for j, other in enumerate(shapes)
            if len(other) == len(shape)
            and all(
                x == y or (i == axis and name == "concat")
                for i, (x, y) in enumerate(zip(shape, other, strict=True))
            )
        ]
        return Step(name, (k, random.choice(others)), (axis,))
    given = _given(random, name, shape, axis)
    return None if given is None else Step(name, (k,), given)


def _given(random: Random, name: str, shape: Dims, axis: int) -> tuple[Any, ...] | None:
    extent = shape[axis]
    if name in ("sum", "mean", "max", "variance"):
        return axis, random.random() < 0.5
    if name in ("softmax", "cumsum", "flip", "expand"):
        return (axis,)
    if name in ("norm", "layer_norm"):
        # TVM has no kernel of rms_norm for vectors.
        return () if shape[-1] > 1 and len(shape) > (name == "norm") else None
    if name == "permute":
        return (tuple(random.sample(range(len(shape)), len(shape))),)
    if name == "broadcast":
        return ((random.choice((2, 3)), *shape),)
    if name == "repeated":
        return axis, random.choice((2, 3))
    if name == "repeat":
        return random.choice((2, 3)), axis
    if name == "take":
        return axis, [random.randrange(extent) for _ in range(random.choice((1, 3, 4)))]
    if name == "heads":
        heads = [d for d in (2, 3, 4, 6) if len(shape) == 2 and shape[1] % d == 0]
        return (random.choice(heads),) if heads else None
    if name == "reshape":
        return (_reshaped(random, shape, axis),)
    if extent < 2:
        return None
    if name == "split":
        return axis, random.randrange(1, extent), random.randrange(2)
    first = random.randrange(extent - 1)
    return axis, first, random.randrange(first + 1, extent + 1), random.choice((1, 1, 2))


def _reshaped(random: Random, shape: Dims, axis: int) -> Dims:
    if random.random() < 0.5 and axis + 1 < len(shape):
        return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    divisor = random.choice([d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0])
    return (*shape[:axis], divisor, shape[axis] // divisor, *shape[axis + 1 :])


def _repeats(one: Dims, other: Dims) -> bool:
    try:
        return len(np.broadcast_shapes(one, other)) <= 4
    except ValueError:
        return False


def _multiplies(one: Dims, other: Dims) -> bool:
    try:
        return np.matmul(np.zeros(one), np.zeros(other)).ndim in (1, 2, 3, 4)
    except ValueError:
        return False
