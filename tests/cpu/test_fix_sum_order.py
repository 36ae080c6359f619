# SPDX-License-Identifier: Apache-2.0
"""FixSumOrder: the same bits for any number of workers and rows, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import comm
from tvm_ipc.cpu import FixSumOrder
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import collect_report

TARGET = tvm_ipc.cpu_target(reproducible=True)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def module(text: str) -> tvm.IRModule:
    """Return a module with the function main, whose parameters and body are given."""
    head, _, body = text.strip().partition("\n")
    lines = "\n".join(f"            {line.strip()}" for line in body.splitlines())
    return tvm.script.from_source(
        f"@I.ir_module\nclass Model:\n    @R.function\n    def main({head}):\n"
        f"        with R.dataflow():\n{lines}\n            R.output(z)\n        return z\n"
    )


MLP = """x: R.Tensor(("n", 96), "{dtype}"), up: R.Tensor((96, 160), "{dtype}"), \
down: R.Tensor((160, 96), "{dtype}"), scale: R.Tensor((96,), "{dtype}")
    n = T.int64()
    a = R.nn.rms_norm(x, scale, axes=[-1], epsilon=1e-5)
    b = R.nn.silu(R.matmul(a, up))
    c = R.matmul(b, down)
    z = R.nn.softmax(R.add(x, R.multiply(c, R.const(0.5, "{dtype}"))), axis=-1)"""
PLAN = {"up": comm.Shard(1), "down": comm.Shard(0)}


def results_of(dtype: str, workers: int, rows: list[int], **options: Any) -> list[np.ndarray]:
    """Return the results of the MLP for the first rows of an input, on a number of workers."""
    random = np.random.default_rng(0)
    shapes = ((64, 96), (96, 160), (160, 96), (96,))
    x, up, down, scale = (random.normal(size=shape).astype(DTYPES[dtype]) for shape in shapes)
    parallel = tvm_ipc.parallelize(module(MLP.format(dtype=dtype)), PLAN, workers, **options)
    pipeline = tvm_ipc.get_pipeline(TARGET, workers, **options)
    program = tvm.compile(parallel.module, TARGET, relax_pipeline=pipeline)
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        shards = [
            session.scatter(np.stack(np.split(w, workers, axis)))
            for w, axis in ((up, 1), (down, 0))
        ]
        results = []
        for count in rows:
            z = main(session.put(x[:count]), *shards, session.put(scale))
            ranks = [session.get(z, rank) for rank in range(workers)]
            assert all(rank.tobytes() == ranks[0].tobytes() for rank in ranks)
            results.append(ranks[0].astype(np.float32))
        return results


ROWS = [64, 1, 3, 33]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_neither_workers_nor_rows(dtype: str) -> None:
    whole, *parts = results_of(dtype, 1, ROWS, reproducible=True)
    for workers in (1, 2, 4, 8, 16):
        for count, result in zip(
            ROWS, results_of(dtype, workers, ROWS, reproducible=True), strict=True
        ):
            np.testing.assert_array_equal(result, whole[:count], err_msg=f"{workers}, {count}")
    assert len(parts) == len(ROWS) - 1
    random = np.random.default_rng(0)
    x, up, down, scale = (
        random.normal(size=shape).astype(DTYPES[dtype]).astype(np.float64)
        for shape in ((64, 96), (96, 160), (160, 96), (96,))
    )
    a = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
    b = a @ up
    y = x + 0.5 * (b / (1 + np.exp(-b))) @ down
    e = np.exp(y - y.max(-1, keepdims=True))
    tolerance = 1e-5 if dtype == "float32" else 0.2
    np.testing.assert_allclose(whole, e / e.sum(-1, keepdims=True), atol=tolerance)


def test_the_default_has_other_bits() -> None:
    """Otherwise the test above could not fail."""
    one, two = (results_of("float32", workers, [64])[0] for workers in (1, 2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("k", "workers", "parts"),
    [(160, 1, 16), (160, 2, 8), (160, 16, 1), (24, 1, 8), (24, 8, 1), (7, 1, 1), (0, 1, 1)],
)
def test_parts_of_the_inner_dimension(k: int, workers: int, parts: int) -> None:
    mod = module(
        f"""x: R.Tensor((3, {k // workers}), "float32"), w: R.Tensor((5, {k // workers}), "float32")
        y = R.matmul(x, R.permute_dims(w))
        z = R.comm.allreduce(y, "sum")"""
    )
    with collect_report() as report:
        changed = FixSumOrder(workers)(mod).script()
    assert f'("tvm_ipc.blas.matmul", (0, 1, 0, {parts}, x, w)' in changed.replace(
        "R.ExternFunc", ""
    )
    assert 'reduction="tree_sum"' in changed
    assert "permute_dims" not in changed
    (decision,) = report.decisions
    assert f"in {parts} part" in decision.reason
    assert f"over {workers} worker" in decision.reason


def test_sums_of_bfloat16_over_workers_are_rounded_once() -> None:
    mod = module(
        """x: R.Tensor((3, 32), "bfloat16"), w: R.Tensor((32, 8), "bfloat16")
        y = R.matmul(x, w)
        r = R.reshape(y, R.shape([3, 2, 4]))
        z = R.comm.reduce_scatter(r, "sum", axis=1, workers=2)"""
    )
    lines = FixSumOrder(2)(mod).script().splitlines()
    wide = [line for line in lines if "_wide" in line.partition("=")[0] and "R.output" not in line]
    for line, shape in zip(wide, ("(3, 8)", "(3, 2, 4)", "(3, 1, 4)"), strict=True):
        assert f'R.Tensor({shape}, dtype="float32")' in line
    assert any('R.astype(z_wide, dtype="bfloat16")' in line for line in lines)


def test_a_lookup_of_rows_that_other_workers_have_is_exact() -> None:
    table = """ids: R.Tensor((3,), "int64"), table: R.Tensor((8, 4), "float32")
    rows = R.take(table, ids, axis=0)
    z = R.multiply(rows, R.const(2, "float32"))"""
    parallel = tvm_ipc.parallelize(module(table), {"table": comm.Shard(0)}, 2, reproducible=True)
    changed = FixSumOrder(2)(parallel.module).script()
    assert 'kind="allreduce"' in changed
    assert "tree_sum" not in changed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            """x: R.Tensor((4, 8), "float32")
            z = R.comm.allreduce(x, "sum")""",
            "it is a sum over workers of x, which is not computed in this function",
        ),
        (
            """x: R.Tensor((4, 8), "float32")
            y = R.exp(x)
            z = R.comm.allreduce(y, "sum")""",
            "it is a sum over workers of the result of exp; only results of matmuls",
        ),
        (
            """x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")
            y = R.matmul(x, w)
            s = R.comm.allreduce(y, "sum")
            z = R.add(s, y)""",
            "a sum over workers of y, which has other uses",
        ),
        (
            """x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")
            y = R.matmul(x, w)
            z = R.comm.allreduce(y, "avg")""",
            "a avg of float32 over workers has no fixed order; use a sum",
        ),
        (
            """x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")
            y = R.matmul(x, w)
            z = R.comm.allreduce(y, "sum", scale=0.5)""",
            "a scaled sum of float32 over workers has no fixed order",
        ),
        (
            """x: R.Tensor((4, "k"), "float32"), w: R.Tensor(("k", 8), "float32")
            k = T.int64()
            z = R.matmul(x, w)""",
            "its inner dimension is symbolic",
        ),
        (
            """x: R.Tensor((4, 8), "float64"), w: R.Tensor((8, 8), "float64")
            z = R.matmul(x, w)""",
            "it computes in float64; expected float32 or bfloat16",
        ),
        (
            """x: R.Tensor((4, 8), "float16")
            z = R.exp(x)""",
            "it computes in float16; expected float32 or bfloat16",
        ),
        (
            """x: R.Tensor((4, "n"), "float32")
            n = T.int64()
            z = R.nn.softmax(x, axis=-1)""",
            "it sums along an axis of symbolic length n",
        ),
        (
            """x: R.Tensor((1, 2, 8, 8), "float32"), w: R.Tensor((2, 2, 3, 3), "float32")
            z = R.nn.conv2d(x, w)""",
            "nn.conv2d z: .*: the order of its sums is not fixed",
        ),
        (
            """x: R.Tensor((4, 8), "float32")
            z = R.cumsum(x, axis=1)""",
            "cumsum z: .*: the order of its sums is not fixed",
        ),
        (
            """x: R.Tensor((4, 8), "float32")
            z = R.call_dps_packed("my.kernel", (x,), out_ty=R.Tensor((4, 8), "float32"))""",
            "my.kernel z: .*: the order of sums in my.kernel is unknown",
        ),
        (
            """x: R.Tensor((1, 4, 2, 8), "float32")
            z = R.nn.attention(x, x, x)""",
            "it was not fused",
        ),
        (
            """x: R.Tensor((1, 4, 2, 8), "float32")
            z = R.call_dps_packed("tvm_ipc.blas.attention",
                                  (0, 0, 0, 0, 1.0, 0.0, 0, 0, 0, x, x, x),
                                  out_ty=R.Tensor((1, 4, 2, 8), "float32"))""",
            r"it has no fixed order; use FuseAttention\(reproducible=True\)",
        ),
    ],
)
def test_other_sums_are_refused(text: str, reason: str) -> None:
    mod = module(text)
    with collect_report() as report, pytest.raises(TransformError) as error:
        FixSumOrder(2)(mod)
    assert "1 operator of the program cannot be computed reproducibly" in str(error.value)
    assert re.search(reason, str(error.value)), error.value
    (decision,) = (one for one in report.decisions if one.verdict == "refused")
    assert decision.function == "main"


@pytest.mark.parametrize(
    ("k", "workers", "reason"),
    [
        (8, 3, "its result is summed over 3 workers; expected a power of two up to 16"),
        (8, 32, "its result is summed over 32 workers; expected a power of two up to 16"),
    ],
)
def test_numbers_of_workers_that_do_not_have_whole_parts(k: int, workers: int, reason: str) -> None:
    mod = module(
        f"""x: R.Tensor((4, {k}), "float32"), w: R.Tensor(({k}, 8), "float32")
        y = R.matmul(x, w)
        z = R.comm.allreduce(y, "sum")"""
    )
    with pytest.raises(TransformError, match=reason):
        FixSumOrder(workers)(mod)


def test_functions_of_other_compilers_are_refused() -> None:
    mod = module("""x: R.Tensor((4, 8), "float32")
    z = R.exp(x)""")
    mod["main"] = mod["main"].with_attr("Codegen", "theirs")
    with pytest.raises(TransformError, match="main: the function: another compiler compiles it"):
        FixSumOrder(1)(mod)


def test_all_operators_are_named() -> None:
    lines = [f"y{i} = R.cumsum(x, axis=0)" for i in range(9)]
    text = "\n".join(['x: R.Tensor((4, 8), "float32")', *lines, "z = R.cumsum(x, axis=1)"])
    with pytest.raises(TransformError) as error:
        FixSumOrder(1)(module(text))
    assert "10 operators" in str(error.value)
    assert "main: cumsum y7: " in str(error.value)
    assert "and 2 more, which the report of the passes lists" in str(error.value)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fuse_epilogue": True}, "fuse_epilogue is True"),
    ({"overlap": 4}, "overlap is 4"),
    ({"blas": False}, "blas is False"),
    ({"schedule": tvm_ipc.cpu.ScheduleForCPU()}, "schedule is "),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_change_the_order(options: dict[str, Any], message: str) -> None:
    expected = f"get_pipeline: reproducible is True, but {re.escape(message)}"
    with pytest.raises(ValueError, match=expected):
        tvm_ipc.get_pipeline(TARGET, 2, reproducible=True, **options)


@pytest.mark.parametrize(
    "target", [tvm_ipc.cpu_target(), "c", "cuda", {"kind": "llvm", "mcpu": "haswell"}]
)
def test_targets_that_round_differently(target: Any) -> None:
    with pytest.raises(ValueError, match=r"pass the target tvm_ipc.cpu_target\(reproducible=True"):
        tvm_ipc.get_pipeline(target, 2, reproducible=True)


def test_marked_streams_are_refused() -> None:
    mod = module(
        """x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")
        v = R.comm.place(w, [["tp", 2]], ["S[0]"])
        y = R.matmul(x, v)
        z = R.comm.place(y, [["tp", 2]], ["R"], stream=0)"""
    )
    pipeline = tvm_ipc.get_pipeline(TARGET, 2, reproducible=True)
    with pytest.raises(TransformError, match="function 'main': y is marked for streams"):
        tvm.compile(mod, TARGET, relax_pipeline=pipeline)


@pytest.mark.parametrize("placement", ["S[0]", "S[0: 2/2+4/2]"])
def test_shards_that_are_no_equal_blocks(placement: str) -> None:
    """Two ranks have 4 and 3 of 7 rows, which is another tree than that of one rank."""
    rows = 7 if placement == "S[0]" else 6
    head = f"""x: R.Tensor((4, {rows}), "float32"), w: R.Tensor(({rows}, 8), "float32")"""
    text = f"""{head}
    v = R.comm.place(w, [["tp", 2]], ["{placement}"])
    z = R.matmul(x, v)"""
    pipeline = tvm_ipc.get_pipeline(TARGET, 2, reproducible=True)
    with pytest.raises(
        TransformError, match=r"w is placed as S\[0.*\], of which shards are no equal"
    ):
        tvm.compile(module(text), TARGET, relax_pipeline=pipeline)
    plain = module(f"{head}\nz = R.matmul(x, w)")
    with pytest.raises(TransformError, match=f"z sums along the axis 1 of x, of extent {rows}"):
        tvm_ipc.parallelize(plain, {"w": placement}, 2, reproducible=True)


def built(mod: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the results of a module on one worker, compiled reproducibly."""
    pipeline = tvm_ipc.get_pipeline(TARGET, 1, reproducible=True)
    program = tvm.compile(mod, TARGET, relax_pipeline=pipeline)
    vm = relax.VirtualMachine(program, tvm.cpu())
    result = vm["main"](*map(tvm.runtime.tensor, inputs))
    results = result if isinstance(result, tvm.ir.Array | list | tuple) else [result]
    return [one.numpy() for one in results]


CHAINS: dict[str, Callable[[Any], list[Any]]] = {
    "arithmetic": lambda x: [x * x, lambda a: a + x, lambda a: a * a, lambda a: a - x],
    "functions": lambda x: [relax.op.nn.silu(x), relax.op.tanh, relax.op.exp, relax.op.sigmoid],
    "norm": lambda x: [
        relax.op.multiply(x, x),
        lambda a: relax.op.mean(a, axis=-1, keepdims=True),
        lambda a: x * relax.op.rsqrt(a + relax.const(1e-3, a.ty.dtype.dtype)),
        lambda a: relax.op.sum(a, axis=0, keepdims=True),
        lambda a: relax.op.nn.softmax(a * x, axis=-1),
    ],
    # A sum has no lanes if its kernel computes these.
    "sum": lambda x: [relax.op.cos(x), lambda a: relax.op.sum(a, axis=-1)],
    "moves": lambda x: [
        relax.op.concat([x, x * x], axis=1),
        lambda a: relax.op.strided_slice(a, [1], [3], [70]),
        lambda a: relax.op.exp(a),
        lambda a: relax.op.sum(relax.op.permute_dims(a), axis=0),
    ],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_fusion_changes_no_bits(chain: str, dtype: str) -> None:
    """The last operator of a chain gets the bits that it gets if each result is stored."""

    def chained(*, stores: bool) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType([5, 67], dtype))
        with builder.function("main", [x]):
            with builder.dataflow():
                first, *rest = CHAINS[chain](x)
                values = [builder.emit(first)]
                for operator in rest:
                    values.append(builder.emit(operator(values[-1])))
                # A result of the function is stored, and no other kernel computes it again.
                outputs = [
                    builder.emit_output(value) for value in (values if stores else values[-1:])
                ]
            builder.emit_func_output(relax.Tuple(outputs))
        return builder.finalize()

    x = np.random.default_rng(0).normal(size=(5, 67)).astype(DTYPES[dtype])
    *_, stored = built(chained(stores=True), x)
    (fused,) = built(chained(stores=False), x)
    assert stored.tobytes() == fused.tobytes()
