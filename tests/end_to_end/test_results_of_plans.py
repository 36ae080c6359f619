# SPDX-License-Identifier: Apache-2.0
"""The layout of results depends on what the program specifies, not on what the planner inserts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

import tvm_ipc
from tests.end_to_end.placed_programs import session_of
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Replica, Shard, place
from tvm_ipc.spmd import LowerPlacements

SQUARE = Mesh({"a": 2, "b": 2})
PAIR = Mesh({"tp": 2})
#: A product with this weight is sharded along "a" and partial along "b".
MIXED = {"a": Shard(1), "b": Shard(0)}

Build = Callable[[relax.BlockBuilder, dict[str, relax.Var]], Any]


def program(build: Build, inputs: int = 1, **shapes: tuple[int, ...]) -> tvm.IRModule:
    """Return a module of one function, whose results `build` returns."""
    builder = relax.BlockBuilder()
    params = {name: relax.Var(name, relax.TensorType(shapes[name], "float32")) for name in shapes}
    with builder.function("main", list(params.values()), attrs={"num_input": inputs}):
        with builder.dataflow():
            out = builder.emit_output(build(builder, params))
        builder.emit_func_output(out)
    return builder.get()


def shapes_of(ty: Any) -> Any:
    """Return the shapes in the type of a result."""
    if isinstance(ty, relax.TupleType):
        return [shapes_of(field) for field in ty.fields]
    return tuple(int(extent) for extent in ty.shape)


def result_shapes(mod: tvm.IRModule) -> Any:
    return shapes_of(mod["main"].ret_ty)


def used_twice(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
    y = builder.emit(op.matmul(params["x"], params["w"]))
    return relax.Tuple([y, builder.emit(op.nn.relu(y))])


def test_what_is_used_twice_is_returned_whole() -> None:
    """The product is reduced along one axis where it is made, and stays sharded along the other."""
    made = parallelize(program(used_twice, x=(4, 4), w=(4, 8)), {"w": MIXED}, SQUARE)
    random = np.random.default_rng(0)
    x, w = (random.uniform(-1, 1, shape).astype("float32") for shape in ((4, 4), (4, 8)))
    right = [x @ w, np.maximum(x @ w, 0)]
    # A printed module is the same program.
    for module in (made.module, made.placed, tvm.script.from_source(made.placed.script())):
        pipeline = tvm_ipc.get_pipeline("llvm", len(SQUARE.ranks))
        executable = tvm.compile(module, "llvm", relax_pipeline=pipeline)
        with session_of(SQUARE) as session:
            given = session.empty(x.shape, "float32")
            weight = session.empty(made.shards["w"].shard_shape, "float32")
            for rank in SQUARE.ranks:
                given.debug_copy_from(rank, x)
                weight.debug_copy_from(rank, made.shards["w"].shard(w, rank))
            results = session.load_vm_module(executable)["main"](given, weight)
            for rank in SQUARE.ranks:
                found = [one.numpy() for one in results.debug_get_from_remote(rank)]
                for one, wanted in zip(found, right, strict=True):
                    assert one.shape == wanted.shape
                    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)


def test_forms_of_results() -> None:
    """A value in a tuple within a tuple, and one by another name."""

    def nested(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
        y = builder.emit(op.matmul(params["x"], params["w"]))
        again = builder.emit(relax.Tuple([y, builder.emit(op.nn.relu(y))]))
        first = builder.emit(relax.TupleGetItem(again, 0))
        return relax.Tuple([relax.Tuple([first, y]), again])

    mod = program(nested, x=(4, 4), w=(4, 8))
    made = parallelize(mod, {"w": MIXED}, SQUARE)
    assert result_shapes(made.module) == result_shapes(mod)


def test_activations_of_styles_are_returned_whole() -> None:
    """Styles shard the rows of the product and of the norm, and the caller gets both whole."""

    def block(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
        x, w, norm, head = params.values()
        y = builder.emit(op.matmul(x, w))
        z = builder.emit(op.nn.rms_norm(y, norm, axes=-1))
        return relax.Tuple([y, z, builder.emit(op.matmul(z, head))])

    plan = {"w": Shard(0), "norm": "sequence_parallel", "head": Shard(1)}
    mod = program(block, x=(1, 4, 8), w=(8, 8), norm=(8,), head=(8, 6))
    made = parallelize(mod, plan, PAIR)
    assert "reduce_scatter" in made.collectives, "the product is sharded"
    assert result_shapes(made.module) == result_shapes(mod)


def test_what_the_program_places_is_returned_so() -> None:
    """The style shards the rows of the norm, and the program specifies what it is computed from."""
    for wanted, columns in ((Shard(2), 4), (Replica(), 8)):

        def block(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
            x, w, norm, head = params.values()
            product = builder.emit(op.matmul(x, w))
            y = builder.emit(place(product, PAIR, {"tp": wanted}))  # noqa: B023
            z = builder.emit(op.nn.rms_norm(y, norm, axes=-1))
            return relax.Tuple([y, builder.emit(op.matmul(z, head))])

        plan = {"w": Shard(0), "norm": "sequence_parallel", "head": Shard(1)}
        mod = program(block, x=(1, 4, 8), w=(8, 8), norm=(8,), head=(8, 6))
        made = parallelize(mod, plan, PAIR)
        assert result_shapes(made.module) == [(1, 4, columns), (1, 4, 6)]


def test_inserted_places_specify_no_parameter() -> None:
    """The first place on a parameter that the program has specifies what callers give."""

    def twice(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
        x = params["x"]
        inserted = builder.emit(place(x, PAIR, {"tp": Shard(1)}, inserted=True))
        written = builder.emit(place(x, PAIR, {"tp": Shard(0)}))
        return relax.Tuple([inserted, written])

    lowered = LowerPlacements()(program(twice, x=(4, 8)))
    assert shapes_of(lowered["main"].params[0].ty) == (2, 8)
    assert result_shapes(lowered) == [(4, 8), (2, 8)]


def test_the_program_places_a_cache() -> None:
    """A result that is made of a cache is sharded as the cache is, unless the program places it."""
    for placed, heads in ((False, 1), (True, 2)):

        def decode(builder: relax.BlockBuilder, params: dict[str, relax.Var]) -> Any:
            x, past, w = params.values()
            made = op.reshape(builder.emit(op.matmul(x, w)), (1, 1, 2, 4))
            made = builder.emit(op.permute_dims(builder.emit(made), [0, 2, 1, 3]))
            keys = builder.emit(op.concat([past, made], axis=2))
            return builder.emit(place(keys, PAIR, {"tp": Replica()})) if placed else keys  # noqa: B023

        mod = program(decode, 2, x=(1, 1, 8), past=(1, 2, 3, 4), w=(8, 8))
        made = parallelize(mod, {"w": Shard(1)}, PAIR, caches=["past"])
        assert made.shards["past"].placements == (Shard(1),)
        assert result_shapes(made.module) == (1, heads, 4, 4)
