# SPDX-License-Identifier: Apache-2.0
"""Programs for all ranks become what one rank runs: the collectives, the shapes, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.distributed import DeviceMesh
from tvm.relax.distributed import Placement as DistPlacement
from tvm.script import ir as I
from tvm.script import relax as R

from tests.one_function_modules import one_function
from tests.transform.loads import power
from tvm_ipc import comm
from tvm_ipc.comm import Mesh, Partial, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import collect_report

MESH = Mesh({"tp": 2})
GRID = Mesh({"dp": 2, "tp": 2})
PAIR = [[0, 1]]
TP = GRID.teams("tp")
DP = GRID.teams("dp")
ROWS = {"tp": Shard(0)}
COLUMNS = {"tp": Shard(1)}
PARTIAL = {"tp": Partial()}

Make = Callable[..., Any]


def emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def at(x: Any, placements: Any, mesh: Mesh = MESH, **options: Any) -> Any:
    """Place a tensor."""
    return emit(place(x, mesh, placements, **options))


def module(shapes: Sequence[Any], make: Make, dtype: str = "float32") -> tvm.IRModule:
    """A function that returns what `make` makes of its parameters."""

    def result(_: Any, *params: relax.Var) -> relax.Var:
        made = make(*params)
        return made if isinstance(made, relax.Var) else emit(made)

    return one_function(result, {f"x{k}": one for k, one in enumerate(shapes)}, dtype=dtype)


def lowered(shapes: Sequence[Any], make: Make, dtype: str = "float32") -> tvm.IRModule:
    return LowerPlacements()(module(shapes, make, dtype))


def kinds(mod: tvm.IRModule) -> list[str]:
    """The collectives in a module."""
    return re.findall(r'kind="(\w+)"', mod.script())


def check(shapes: Sequence[Any], make: Make, wanted: Sequence[Any], expected: Make) -> None:
    """Compare a program for two ranks, lowered, with what is expected of one rank."""
    found = relax.transform.CanonicalizeBindings()(lowered(shapes, make))
    rank = relax.transform.CanonicalizeBindings()(module(wanted, expected))
    tvm.ir.assert_structural_equal(found, rank)


def test_columns_then_rows() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float32"),
            w1: R.Tensor((8, 6), "float32"),
            w2: R.Tensor((6, 8), "float32"),
        ):
            with R.dataflow():
                w1s = R.comm.place(w1, MESH, COLUMNS)
                w2s = R.comm.place(w2, MESH, ROWS)
                h = R.matmul(x, w1s)
                a = R.nn.relu(h)
                y = R.matmul(a, w2s)
                z = R.comm.place(y, MESH, {})
                r = R.add(z, x)
                R.output(r)
            return r

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((4, 8), "float32"),
            w1: R.Tensor((8, 3), "float32"),
            w2: R.Tensor((3, 8), "float32"),
        ):
            with R.dataflow():
                h = R.matmul(x, w1)
                a = R.nn.relu(h)
                y = R.matmul(a, w2)
                z = R.comm.allreduce(y, team=PAIR)
                r = R.add(z, x)
                R.output(r)
            return r

    tvm.ir.assert_structural_equal(LowerPlacements()(Before), Expected)


def test_rows_of_a_sequence() -> None:
    def make(x: Any, w: Any) -> Any:
        rows, ws = at(x, ROWS), at(w, ROWS)
        g = at(emit(op.nn.softmax(rows)), {})
        return at(emit(op.matmul(g, ws)), ROWS)

    def expected(x: Any, w: Any) -> Any:
        g = emit(comm.allgather(emit(op.nn.softmax(x)), team=PAIR))
        y = emit(op.matmul(emit(comm.take_shard(g, axis=1, team=PAIR)), w))
        return emit(comm.reduce_scatter(y, team=PAIR))

    check([(4, 8), (8, 6)], make, [(2, 8), (4, 6)], expected)


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ({}, ROWS, lambda x: comm.take_shard(x, team=PAIR)),
        (ROWS, {}, lambda x: comm.allgather(x, team=PAIR)),
        (ROWS, COLUMNS, lambda x: comm.all_to_all(x, 1, 0, team=PAIR)),
        (PARTIAL, {}, lambda x: comm.allreduce(x, team=PAIR)),
        (
            {"tp": Partial("max")},
            COLUMNS,
            lambda x: comm.reduce_scatter(x, "max", axis=1, team=PAIR),
        ),
        (ROWS, ROWS, lambda x: x),
        (PARTIAL, PARTIAL, lambda x: x),
    ],
)
def test_each_redistribution(source: Any, target: Any, kind: Make) -> None:
    check(
        [(4, 6)],
        lambda x: at(at(x, source), target),
        [(2, 6) if source == ROWS else (4, 6)],
        lambda x: emit(kind(x)),
    )


def test_uneven_parts_say_so() -> None:
    check(
        [(5, 7)],
        lambda x: at(at(x, ROWS), COLUMNS),
        [(3, 7)],
        lambda x: emit(comm.all_to_all(x, 1, 0, extent=5, team=PAIR)),
    )
    check(
        [(5, 7)],
        lambda x: at(at(x, PARTIAL), ROWS),
        [(5, 7)],
        lambda x: emit(comm.reduce_scatter(x, uneven=True, team=PAIR)),
    )


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # What makes the tensor smaller comes first.
        ({"dp": Shard(0)}, {"tp": Shard(1)}, ["take_shard", "allgather"]),
        ({"dp": Partial()}, {"tp": Shard(1)}, ["take_shard", "allreduce"]),
        ({"dp": Partial(), "tp": Shard(0)}, {"dp": Shard(1)}, ["reduce_scatter", "allgather"]),
        # An axis is divided once at any time.
        ({"dp": Shard(0)}, {"tp": Shard(0)}, ["allgather", "take_shard"]),
        (
            {"dp": Shard(0), "tp": Shard(1)},
            {"dp": Shard(1), "tp": Shard(0)},
            ["allgather", "all_to_all", "take_shard"],
        ),
    ],
)
def test_order_along_the_axes_of_a_mesh(source: Any, target: Any, expected: list[str]) -> None:
    mod = lowered([(4, 8)], lambda x: at(at(x, source, GRID), target, GRID))
    assert kinds(mod) == expected


def test_along_two_axes_of_a_mesh() -> None:
    """Rows of the batch, columns and rows of the weights."""

    def expected(x: Any, w1: Any, w2: Any) -> Any:
        y = emit(op.matmul(emit(op.matmul(x, w1)), w2))
        return emit(comm.allreduce(y, team=TP))

    def make(x: Any, w1: Any, w2: Any) -> Any:
        xs = at(x, {"dp": Shard(0)}, GRID)
        h = emit(op.matmul(xs, at(w1, COLUMNS, GRID)))
        y = emit(op.matmul(h, at(w2, ROWS, GRID)))
        return at(y, {"dp": Shard(0)}, GRID)

    check([(4, 8), (8, 6), (6, 8)], make, [(2, 8), (8, 3), (3, 8)], expected)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # not linear
        (lambda p, r: op.nn.relu(p), ["allreduce"]),
        (lambda p, r: op.multiply(p, p), ["allreduce", "allreduce"]),
        (lambda p, r: op.astype(p, "float16"), ["allreduce"]),
        # added once
        (lambda p, r: op.add(p, r), ["allreduce"]),
        # sums stay what they are
        (lambda p, r: op.add(p, p), []),
        (lambda p, r: op.negative(p), []),
        (lambda p, r: op.multiply(p, r), []),
        (lambda p, r: op.divide(p, r), []),
        (lambda p, r: op.divide(r, p), ["allreduce"]),
        (lambda p, r: op.permute_dims(p), []),
        (lambda p, r: op.reshape(p, (16,)), []),
        (lambda p, r: op.matmul(p, r), []),
        (lambda p, r: op.matmul(p, p), ["allreduce", "allreduce"]),
        (lambda p, r: op.sum(p, axis=0), []),
        (lambda p, r: op.max(p, axis=0), ["allreduce"]),
    ],
)
def test_partial_operands(make: Make, expected: list[str]) -> None:
    mod = lowered(
        [(4, 4), (4, 4)],
        lambda x, r: (
            at(emit(make(at(x, PARTIAL), r)), PARTIAL)
            if not expected
            else emit(make(at(x, PARTIAL), r))
        ),
    )
    assert kinds(mod) == expected


def test_partial_results_of_other_reductions() -> None:
    most = {"tp": Partial("max")}

    def found(make: Make) -> list[str]:
        return kinds(lowered([(4, 4)], lambda x: make(at(x, most))))

    def kept(make: Make) -> list[str]:
        return found(lambda x: at(emit(make(x)), most))

    assert kept(lambda x: op.maximum(x, x)) == []
    assert kept(lambda x: op.permute_dims(x)) == []
    assert found(lambda x: op.minimum(x, x)) == ["allreduce", "allreduce"]
    assert found(lambda x: op.negative(x)) == ["allreduce"], "the largest becomes the smallest"


def test_a_replicated_operand_is_cut() -> None:
    def make(x: Any, y: Any) -> Any:
        return at(emit(op.add(at(x, ROWS), y)), ROWS)

    check(
        [(4, 6), (4, 1)],
        make,
        [(2, 6), (4, 1)],
        lambda x, y: emit(op.add(x, emit(comm.take_shard(y, team=PAIR)))),
    )
    # It is repeated along the axis that is divided.
    check([(4, 6), (1, 6)], make, [(2, 6), (1, 6)], lambda x, y: emit(op.add(x, y)))
    check([(4, 6), (6,)], make, [(2, 6), (6,)], lambda x, y: emit(op.add(x, y)))


@pytest.mark.parametrize(
    ("before", "axis", "after", "expected"),
    [
        ((4, 6), 0, (2, 2, 6), (1, 2, 6)),
        ((4, 6), 0, (24,), (12,)),
        ((3, 4, 6), 1, (3, 2, 12), (3, 1, 12)),
        ((3, 4, 6), 1, (3, 24), (3, 12)),
        ((1, 4, 6), 1, (4, 6), (2, 6)),
        ((4, 6), 0, (1, 4, 1, 6), (1, 2, 1, 6)),
        ((5, 6), 0, (5, 2, 3), (3, 2, 3)),
        ((6, 5), 1, (2, 3, 5), (2, 3, 3)),
        # Parts are not consecutive: of each row, of rows that ranks do not divide, on one rank.
        ((4, 6), 1, (24,), (12,)),
        ((5, 6), 0, (30,), (18,)),
        ((1, 6), 0, (6,), (6,)),
    ],
)
def test_reshape_of_a_divided_axis(before: Any, axis: int, after: Any, expected: Any) -> None:
    mod = lowered([before], lambda x: emit(op.reshape(at(x, {"tp": Shard(axis)}), after)))
    assert f"R.reshape(x0, R.shape({list(expected)}))" in mod.script()
    assert kinds(mod) == ["allgather"], "the result is replicated, since nothing is said"


@pytest.mark.parametrize(
    ("before", "axis", "after", "words"),
    [
        (
            (3, 4),
            1,
            (2, 6),
            "lv is S[1] along 'tp', and that axis becomes an inner part of axis 0 of",
        ),
        (
            (4, 6),
            0,
            (3, 8),
            "and on 2 ranks the shards of axis 0 of the result have other elements",
        ),
        ((4, 1), 1, (4,), "lv is S[1] along 'tp', and that axis is no axis of the result"),
    ],
)
def test_reshape_that_mixes_parts_is_refused(
    before: Any, axis: int, after: Any, words: str
) -> None:
    with pytest.raises(TransformError, match=re.escape(words)):
        lowered([before], lambda x: emit(op.reshape(at(x, {"tp": Shard(axis)}), after)))


def test_what_is_beyond_the_end_is_not_summed() -> None:
    def fills(make: Make, shapes: Sequence[Any]) -> int:
        return lowered(shapes, make).script().count("R.where")

    def product(between: Make) -> Make:
        def make(x: Any, w: Any) -> Any:
            xs, ws = at(x, COLUMNS), at(w, ROWS)
            return emit(op.matmul(between(xs), ws))

        return make

    odd, even = [(4, 5), (5, 6)], [(4, 6), (6, 6)]
    assert fills(product(lambda x: x), odd) == 0, "who calls it gives zeros"
    assert fills(product(lambda x: emit(op.nn.relu(x))), odd) == 0
    assert fills(product(lambda x: emit(op.add(x, x))), odd) == 0
    assert fills(product(lambda x: emit(op.exp(x))), odd) == 1
    assert fills(product(lambda x: emit(op.add(x, relax.const(1.0, "float32")))), odd) == 1
    assert fills(product(lambda x: emit(op.divide(x, x))), odd) == 1
    assert fills(product(lambda x: emit(op.exp(x))), even) == 0


def test_each_extent_has_an_end_of_its_own() -> None:
    """What says where the end is serves all tensors of the same extent, and no others."""

    def make(*xs: Any) -> Any:
        rows, columns = [], []
        for x, w in zip(xs[::2], xs[1::2], strict=True):
            rows.append(emit(op.exp(at(x, COLUMNS))))
            columns.append(at(w, ROWS))
        products = [emit(op.matmul(x, w)) for x, w in zip(rows, columns, strict=True)]
        return emit(relax.Tuple(products))

    text = lowered([(4, 5), (5, 6), (4, 6), (6, 6), (4, 5), (5, 6), (4, 7), (7, 6)], make).script()
    assert text.count("R.where") == 3
    assert [int(one) for one in re.findall(r"R.ones\(R.shape\(\[(\d+)\]\)", text)] == [5, 7]


def test_the_first_place_on_a_parameter_says_where_it_lies() -> None:
    def make(x: Any) -> Any:
        at(x, ROWS)
        return at(x, COLUMNS)

    check([(4, 6)], make, [(2, 6)], lambda x: emit(comm.all_to_all(x, 1, 0, team=PAIR)))


def test_work_grows_linearly() -> None:
    def layers(count: int) -> tvm.IRModule:
        def make(x: Any, w1: Any, w2: Any) -> Any:
            w1s, w2s = at(w1, COLUMNS), at(w2, ROWS)
            for _ in range(count):
                h = emit(op.exp(emit(op.matmul(x, w1s))))
                x = at(emit(op.matmul(h, w2s)), {})
            return x

        return module([(4, 8), (8, 7), (7, 8)], make)

    modules = {size: layers(size) for size in (8, 16, 32)}
    assert power(lambda size: LowerPlacements()(modules[size]), 8) < 1.1


def test_what_the_caller_gets_beyond_the_end_is_zero() -> None:
    def make(x: Any) -> Any:
        y = emit(op.exp(at(x, ROWS)))
        return at(y, ROWS)

    assert "R.where" in lowered([(5, 4)], make).script()
    assert "R.where" not in lowered([(6, 4)], make).script()


def test_symbolic_extents() -> None:
    n = tirx.Var("n", "int64")
    shape = relax.ShapeType([n])

    def make(x: Any, *_: Any) -> Any:
        return at(emit(op.nn.relu(at(x, ROWS))), ROWS)

    # Known to be even: the rank knows n by its part.
    assert "x0: R.Tensor((n, 4)" in lowered([(n * 2, 4)], make).script()
    # Maybe uneven: another parameter tells n.
    text = lowered([(n, 4), shape], make).script()
    assert 'x0: R.Tensor(("(n + 1) // 2", 4)' in text
    with pytest.raises(TransformError, match=r"no rank knows n, .*R.Shape\(\['n'\]\)"):
        lowered([(n, 4)], make)
    # Cut where it runs.
    mod = lowered([(n, 4)], lambda x: at(emit(op.nn.relu(x)), ROWS))
    assert kinds(mod) == ["take_shard"]


def test_results_lie_where_a_place_says() -> None:
    """In tuples, in a block before the last one, as a parameter, and used by others too."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float32")):
            with R.dataflow():
                xs = R.comm.place(x, MESH, ROWS)
                y = R.exp(xs)
                R.output(xs, y)
            with R.dataflow():
                z = R.negative(y)
                R.output(z)
            return (xs, (y, z), x)

    after = LowerPlacements()(Before)
    part, whole = (relax.TensorType(shape, "float32") for shape in ((2, 8), (4, 8)))
    wanted = relax.TupleType([part, relax.TupleType([whole, whole]), whole])
    tvm.ir.assert_structural_equal(after["main"].ret_ty, wanted)
    assert kinds(after) == ["allgather"] * 3
    relax.analysis.well_formed(after)


def test_functions_without_a_place_stay() -> None:
    @I.ir_module
    class Module:
        @R.function
        def other(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            return R.comm.allreduce(x)

        @R.function
        def main(x: R.Tensor((4, 8), "float32")):
            y = R.comm.place(x, MESH, ROWS)
            return y

    assert LowerPlacements()(tvm.IRModule({"other": Module["other"]}))["other"].same_as(
        Module["other"]
    )
    after = LowerPlacements()(Module)
    assert after["other"].same_as(Module["other"])
    assert "R.Tensor((2, 8)" in after["main"].script()
    assert "place" in Module.script(), "the pass leaves its input as it was"
    relax.analysis.well_formed(after)


def test_attributes_and_impurity_stay() -> None:
    @I.ir_module
    class Module:
        @R.function(pure=False)
        def main(x: R.Tensor((4, 8), "float32")):
            R.func_attr({"relax.rewrite_cuda_graph.capture_symbolic_vars": ["n"]})
            xs = R.comm.place(x, MESH, ROWS)
            _ = R.print(format="here")
            return xs

    after = LowerPlacements()(Module)["main"]
    assert not after.is_pure
    assert dict(after.attrs) == dict(Module["main"].attrs)
    assert "R.print" in after.script()


def test_the_report_says_what_each_collective_is_for() -> None:
    def make(x: Any, w: Any, b: Any) -> Any:
        xs, ws = at(x, COLUMNS), at(w, ROWS)
        y = emit(op.add(emit(op.matmul(xs, ws)), b))
        return at(y, ROWS, stream=1)

    with collect_report() as report:
        lowered([(4, 6), (6, 8), (8,)], make)
    found = [(one.subject, one.verdict, one.reason) for one in report.decisions]
    assert [one.pass_name for one in report.decisions] == ["LowerPlacements"] * 3
    assert found == [
        ("allreduce of lv2 along 'tp'", "inserted", "R.add needs it R along 'tp'"),
        ("take_shard of lv3 along 'tp'", "made", "it is R along 'tp', and lv4 S[0] along 'tp'"),
        (
            "stream=1 of lv4",
            "in 8 chunks",
            "asynchronous allreduce, 2 chunks at a time",
        ),
    ]


def placed(make: Make, first: Any = ROWS) -> Make:
    return lambda x, *others: emit(make(at(x, first), *others))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            placed(lambda x, y: op.concat([x, y, y])),
            "lv1 is R.concat: lv is S[0] along 'tp', and it needs all of that axis; found: lv is",
        ),
        (
            placed(lambda x, y: op.strided_slice(x, [0], [0], [2])),
            "lv1 is R.strided_slice: lv is S[0] along 'tp', and it needs all of that axis; found: "
            "lv is S[0] along 'tp'; place the operands before it with R.comm.place, for",
        ),
        (
            placed(lambda x, y: op.add(x, at(y, COLUMNS))),
            "R.add: lv is S[0] and lv1 is S[1] along 'tp', which are different axes for it",
        ),
        (
            placed(lambda x, y: op.sort(x, axis=0)),
            "R.sort: lv is S[0] along 'tp', and it needs all of that axis",
        ),
        (
            placed(lambda x, y: op.collapse_sum_to(x, (4,))),
            "R.collapse_sum_to: it has no sharding rule; found: lv is S[0]",
        ),
        (
            placed(lambda x, y: place(x, MESH, PARTIAL)),
            "lv1: a tensor that is S[0] cannot become P[sum], since there is nothing left to "
            "reduce",
        ),
        (placed(lambda x, y: comm.allgather(x, team=PAIR)), "is R.comm.collective, which is for"),
        (placed(lambda x, y: op.ccl.allreduce(x)), "is R.ccl.allreduce, which is for one rank"),
        (
            placed(lambda x, y: op.add(x, at(y, {"dp": Shard(1)}, GRID))),
            "lv1 is S[1] along 'dp', R along 'tp' on Mesh({'dp': 2, 'tp': 2}), but another "
            "operand is on Mesh({'tp': 2}); place it on that mesh before",
        ),
        (
            lambda x, y: op.add(at(x, {"dp": Shard(0)}, GRID), at(y, ROWS, GRID)),
            "axis 0 of lv would be sharded along both 'dp' and 'tp'",
        ),
    ],
)
def test_what_is_refused(make: Make, words: str) -> None:
    with pytest.raises(TransformError, match=re.escape(words)):
        lowered([(4, 4), (4, 4)], make)


def test_an_axis_that_is_repeated_is_not_divided() -> None:
    def make(x: Any, y: Any) -> Any:
        return emit(op.add(at(x, ROWS), y))

    with pytest.raises(TransformError, match=r"lv is S\[0\] along 'tp', and that axis is repeated"):
        lowered([(1, 4), (4, 4)], make)


def test_shapes_that_are_not_known_are_not_divided() -> None:
    unknown = relax.TensorType(ndim=2, dtype="float32")
    with pytest.raises(TransformError, match=r"x0 is placed S.* and its shape is not known"):
        lowered([unknown], lambda x: at(x, ROWS))
    assert kinds(lowered([unknown], lambda x: at(emit(op.exp(x)), {}))) == []


def test_annotations_of_tvm_are_places() -> None:
    """Also where tensors change places, which TVM's own lowering refuses."""
    grid = DeviceMesh((2, 2), [2, 0, 3, 1])
    named = Mesh({"axis0": 2, "axis1": 2}, [2, 0, 3, 1])

    def annotated(x: Any, text: str) -> Any:
        return emit(op.distributed.annotate_sharding(x, grid, DistPlacement.from_text(text)))

    def make(x: Any) -> Any:
        return annotated(emit(op.exp(annotated(x, "S[0], R"))), "R, S[1]")

    def make_with_places(x: Any) -> Any:
        y = emit(op.exp(at(x, [Shard(0), Replica()], named)))
        return at(y, [Replica(), Shard(1)], named)

    found = lowered([(4, 8)], make)
    tvm.ir.assert_structural_equal(found, lowered([(4, 8)], make_with_places))
    assert kinds(found) == ["take_shard", "allgather"]
    assert "[[2, 3], [0, 1]]" in found.script()


def test_branches_are_refused() -> None:
    @I.ir_module
    class Branch:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), c: R.Tensor((), "bool")):
            xs = R.comm.place(x, MESH, ROWS)
            if c:
                y = R.add(xs, xs)
            else:
                y = xs
            return y

    with pytest.raises(TransformError, match="y is an if, and placements do not reach into it"):
        LowerPlacements()(Branch)


def test_callers_of_placed_functions_are_refused() -> None:
    @I.ir_module
    class Callee:
        @R.function(private=True)
        def part(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            y = R.comm.place(x, MESH, ROWS)
            return y

        @R.function
        def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
            cls = Callee
            y = cls.part(x)
            return y

    with pytest.raises(TransformError, match="function 'main' calls 'part', which places tensors"):
        LowerPlacements()(Callee)
    inlined = relax.transform.InlinePrivateFunctions()(Callee)
    assert "R.Tensor((2, 8)" in LowerPlacements()(inlined).script()
