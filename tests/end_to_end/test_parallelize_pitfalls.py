# SPDX-License-Identifier: Apache-2.0
"""What other engines got wrong where they divide models, in small: against NumPy, on 2 and 3 ranks.

`tests/README.md` says which is which. Values have both signs unless a case says otherwise, and no
two are equal; extents are not divided by the ranks where that is not said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_parallelize import check
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.one_function_modules import functions
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh

Array = np.ndarray[Any, Any]


@dataclass
class Pitfall:
    """A program: what is given, how that is divided, and what comes of it."""

    given: dict[str, Array]
    plan: dict[str, str]
    relax: Callable[..., relax.Expr]
    numpy: Callable[..., Any]


PITFALLS: dict[str, Pitfall] = {}


def values(*shape: int, sign: int = 0) -> Array:
    """Return values, none of which is equal to another, with a sign if that is not 0."""
    size = int(np.prod(shape))
    found = np.random.default_rng(size).permutation(size) * 2 + 1
    found = found - size if sign == 0 else sign * found
    return (found / size).reshape(shape).astype("float32")


def softmax(x: Array) -> Array:
    exponential = np.exp(x - x.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


def add(
    name: str,
    given: dict[str, Array],
    plan: dict[str, str],
    made: Callable[..., relax.Expr],
    numpy: Callable[..., Any],
) -> None:
    assert name not in PITFALLS
    PITFALLS[name] = Pitfall(given, plan, made, numpy)


def of_a_sum(name: str, made: Callable[..., Any], numpy: Callable[..., Any], **more: Array) -> None:
    """Add a case of a matrix product that is a sum of what ranks have."""
    add(
        name,
        {"x": values(4, 7), "w": values(7, 5), **more},
        {"w": "S[0]"},
        lambda x, w, *rest: made(emit(op.matmul(x, w)), *rest),
        lambda x, w, *rest: numpy(x @ w, *rest),
    )


def of_parts(name: str, made: Callable[..., Any], numpy: Callable[..., Any], sign: int = 0) -> None:
    """Add a case of a matrix whose columns are divided."""
    add(name, {"x": values(4, 7, sign=sign)}, {"x": "S[1]"}, made, numpy)


def emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def rms(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


# ---- partial sums ---------------------------------------------------------------------------

of_a_sum("a bias", op.add, np.add, b=values(5))
of_a_sum("a residual", op.subtract, np.subtract, b=values(4, 5))
of_a_sum("a scalar", lambda p: op.add(p, number(3)), lambda p: p + 3)
of_a_sum("a square", lambda p: op.multiply(p, p), np.square)
of_a_sum("a maximum of sums", lambda p: op.max(p, axis=[1]), lambda p: p.max(1))
of_a_sum("an index of sums", lambda p: op.argmax(p, axis=1), lambda p: p.argmax(1))
of_a_sum(
    "a norm of sums",
    lambda p: op.nn.rms_norm(p, relax.const(np.ones(5, "float32")), axes=-1, epsilon=1e-5),
    rms,
)
of_a_sum("a softmax of sums", lambda p: op.nn.softmax(p), softmax)
of_a_sum(
    "a sum and what is not one",
    lambda p, b: op.maximum(emit(op.add(p, emit(op.nn.relu(p)))), b),
    lambda p, b: np.maximum(p + np.maximum(p, 0), b),
    b=values(4, 5),
)

# ---- parts ----------------------------------------------------------------------------------

of_parts("a mean of uneven parts", lambda x: op.mean(x, axis=[1]), lambda x: x.mean(1))
of_parts("a variance of uneven parts", lambda x: op.variance(x, axis=[1]), lambda x: x.var(1))
of_parts("a maximum below zero", lambda x: op.max(x, axis=[1]), lambda x: x.max(1), -1)
of_parts("a minimum above zero", lambda x: op.min(x, axis=[1]), lambda x: x.min(1), 1)
of_parts("a product of uneven parts", lambda x: op.prod(x, axis=[1]), lambda x: x.prod(1), 1)
of_parts("an index below zero", lambda x: op.argmax(x, axis=1), lambda x: x.argmax(1), -1)
of_parts("a softmax along parts", lambda x: op.nn.softmax(x), softmax)
of_parts("a running sum", lambda x: op.cumsum(x, axis=1), lambda x: x.cumsum(1))
of_parts("an order", lambda x: op.sort(x, axis=1), lambda x: np.sort(x, 1))
of_parts(
    "a norm of the full width",
    lambda x: op.nn.rms_norm(x, relax.const(values(7)), axes=-1, epsilon=1e-5),
    lambda x: rms(x) * values(7),
)
of_parts(
    "the joined axis",
    lambda x: op.concat([x, emit(op.negative(x))], axis=1),
    lambda x: np.concatenate([x, -x], 1),
)
of_parts("a slice of parts", lambda x: op.strided_slice(x, [1], [2], [6]), lambda x: x[:, 2:6])
of_parts(
    "a table and another",
    lambda x: op.add(
        emit(op.take(emit(op.permute_dims(x)), relax.const(np.array([6, 0, 3])), 0)),
        emit(op.take(relax.const(values(9, 4)), relax.const(np.array([8, 1, 4])), 0)),
    ),
    lambda x: x.T[[6, 0, 3]] + values(9, 4)[[8, 1, 4]],
)
add(
    "tables of two sizes",
    {"x": values(7, 4), "y": values(11, 4)},
    {"x": "S[0]", "y": "S[0]"},
    lambda x, y: op.add(
        *(emit(op.take(one, relax.const(np.array([6, 0, 3])), 0)) for one in (x, y))
    ),
    lambda x, y: x[[6, 0, 3]] + y[[6, 0, 3]],
)

# ---- shapes ---------------------------------------------------------------------------------

add(
    "a view across parts",
    {"x": values(4, 6)},
    {"x": "S[1]"},
    lambda x: op.add(emit(op.reshape(x, (3, 8))), emit(op.reshape(x, (3, 8)))),
    lambda x: 2 * x.reshape(3, 8),
)
add(
    "heads that are not divided",  # but all of their elements are
    {"x": values(2, 30)},
    {"x": "S[1]"},
    lambda x: op.sum(emit(op.reshape(x, (2, 5, 6))), axis=[2]),
    lambda x: x.reshape(2, 5, 6).sum(2),
)
add(
    "one that is repeated",
    {"x": values(1, 5)},
    {"x": "S[0]"},
    lambda x: op.broadcast_to(x, (3, 5)),
    lambda x: np.repeat(x, 3, 0),
)
add(
    "groups of channels",
    {"x": values(1, 6, 5, 5), "w": values(6, 1, 3, 3)},
    {"w": "S[0]"},
    lambda x, w: op.nn.conv2d(x, w, groups=6),
    lambda x, w: np.stack(
        [
            [[(x[0, c, i : i + 3, j : j + 3] * w[c, 0]).sum() for j in range(3)] for i in range(3)]
            for c in range(6)
        ]
    )[None],
)
add(
    "slopes of heads",
    {"x": values(7, 3, 3)},
    {"x": "S[0]"},
    lambda x: op.add(x, relax.const(values(7, 1, 1))),
    lambda x: x + values(7, 1, 1),
)
add(
    "positions",
    {"x": values(7, 4)},
    {"x": "S[0]"},
    lambda x: op.multiply(x, emit(op.expand_dims(emit(op.arange(0, 7, 1, "float32")), 1))),
    lambda x: x * np.arange(7)[:, None],
)
add(
    "a scale that is not divided",
    {"x": values(3, 6), "w": (values(7, 6) * 50).astype("int8"), "s": values(7, 1)},
    {"w": "S[0]"},
    lambda x, w, s: op.matmul(
        x, emit(op.permute_dims(emit(op.multiply(emit(op.astype(w, "float32")), s))))
    ),
    lambda x, w, s: x @ (w * s).T,
)
add(
    "a weight that the program permutes",
    {"x": values(3, 6), "w": values(8, 6)},
    {"w": "S[0]"},
    lambda x, w: op.matmul(
        x,
        emit(
            op.permute_dims(
                emit(
                    op.reshape(
                        emit(op.permute_dims(emit(op.reshape(w, (2, 2, 2, 6))), [0, 2, 1, 3])),
                        (8, 6),
                    )
                )
            )
        ),
    ),
    lambda x, w: x @ w.reshape(2, 2, 2, 6).transpose(0, 2, 1, 3).reshape(8, 6).T,
)


def module() -> tvm.IRModule:
    made: dict[str, Any] = {}
    for index, one in enumerate(PITFALLS.values()):
        params = {
            f"f{index}_{name}": relax.TensorType(array.shape, str(array.dtype))
            for name, array in one.given.items()
        }
        made[f"f{index}"] = (lambda _, *xs, make=one.relax: make(*xs)), params
    return functions(made)


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> dict[str, list[Array]]:
    """What each rank gets of each of them: they are compiled together."""
    mesh = Mesh({"tp": request.param})
    plan = {
        f"f{index}_{name}": where
        for index, one in enumerate(PITFALLS.values())
        for name, where in one.plan.items()
    }
    made = parallelize(module(), plan, mesh)
    pipeline = tvm_ipc.get_pipeline("llvm", request.param)
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    results = {}
    with session_of(mesh) as session:
        loaded = session.load_vm_module(executable)
        for index, (name, one) in enumerate(PITFALLS.items()):
            arguments = []
            for param, array in one.given.items():
                cut = made.shards[f"f{index}_{param}"]
                parts = {rank: cut.shard(array, rank) for rank in mesh.ranks}
                arguments.append(put(session, parts))
            result = loaded[f"f{index}"](*arguments)
            ranks = [result.debug_get_from_remote(rank) for rank in mesh.ranks]
            results[name] = [np.array(one.numpy()) for one in ranks]
    return results


@pytest.mark.parametrize("name", PITFALLS)
def test_numbers(found: dict[str, list[Array]], name: str) -> None:
    one = PITFALLS[name]
    expected = one.numpy(*one.given.values())
    for got in found[name]:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("a norm of the full width", {"allreduce": 1, "allgather": 1}),  # a number for each row
        ("a softmax along parts", {"allreduce": 2, "allgather": 1}),
        ("slopes of heads", {"allgather": 1}),
        ("positions", {"allgather": 1}),
        ("groups of channels", {"allgather": 1}),
        ("a scale that is not divided", {"allgather": 1}),
        ("tables of two sizes", {"allreduce": 1}),
        ("a bias", {"allreduce": 1}),
    ],
)
def test_nothing_is_gathered_that_need_not_be(name: str, collectives: dict[str, int]) -> None:
    index = list(PITFALLS).index(name)
    mod = tvm.IRModule({"main": module()[f"f{index}"]})
    plan = {f"f{index}_{param}": where for param, where in PITFALLS[name].plan.items()}
    assert parallelize(mod, plan, 3).collectives == collectives


def test_heads_of_weights_that_are_replicated() -> None:
    """All heads are there, and each rank takes what its part of the next weight wants."""
    made = check({"self_attn.o_proj": "rowwise", "lm_head": "replicated"}, 2)
    assert made.collectives == {"allreduce": 2}


def test_two_plans_of_one_module() -> None:
    """None is taken for the other, and the module stays as it was."""
    index = list(PITFALLS).index("a bias")
    mod = tvm.IRModule({"main": module()[f"f{index}"]})
    before = mod.script()
    rows = parallelize(mod, {f"f{index}_w": "S[0]"}, 2)
    columns = parallelize(mod, {f"f{index}_w": "S[1]"}, 2)
    again = parallelize(mod, {f"f{index}_w": "S[0]"}, 2)
    assert rows.collectives == {"allreduce": 1}
    assert columns.collectives == {"allgather": 1}
    tvm.ir.assert_structural_equal(rows.module, again.module)
    assert mod.script() == before
