# SPDX-License-Identifier: Apache-2.0
"""FuseAttention: what becomes one call, with which results, and what is left to TVM."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 known to NumPy
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import relax as R

import tvm_ipc
from tests.cpu.blas_programs import random, run
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls as calls_of
from tvm_ipc.cpu import FuseAttention
from tvm_ipc.transform import collect_report

FUNCTION = "tvm_ipc.blas.attention"
#: Errors that rounding the result to a type may cause, and rounding weights once more.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def operators(mod: tvm.IRModule) -> list[str]:
    """Return the operators of `main`, and FUNCTION for its calls of it."""
    names = []
    for call in calls_of(mod["main"]):
        name = operator_of(call)
        if name == "relax.call_dps_packed":
            name = str(call.args[0].global_symbol)
        names.append(name.removeprefix("relax."))
    return names


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attention(
    queries: Any, keys: Any, values: Any, scale: float, softcap: float = 0.0, bias: Any = 0.0
) -> np.ndarray:
    """Return attention of (batch, heads, tokens, depth), in float64."""
    queries, keys, values = (np.asarray(x, "float64") for x in (queries, keys, values))
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, repeats, 1), np.repeat(values, repeats, 1)
    scores = queries @ keys.swapaxes(2, 3) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    return softmax(scores + np.asarray(bias, "float64")) @ values


def causal(queries: int, keys: int, dtype: str = "float32", window: int | None = None) -> Any:
    """Return the additive mask of the last queries."""
    distance = np.arange(keys)[None] - np.arange(keys - queries, keys)[:, None]
    allowed = (distance <= 0) & (True if window is None else distance > -window)
    lowest = -np.inf if dtype == "float16" else np.finfo("float32").min
    with np.errstate(over="ignore"):  # of bfloat16, as in the programs of decoders
        return np.where(allowed, 0, lowest)[None, None].astype(dtype)


# ---- operators ------------------------------------------------------------------------------


def operator_program(
    queries: tuple[Any, ...],
    keys: tuple[Any, ...],
    dtype: str = "float32",
    bias: tuple[Any, ...] | None = None,
    **attrs: Any,
) -> tvm.IRModule:
    """Return a program of `R.nn.attention`, with tokens before heads."""
    builder = relax.BlockBuilder()
    shapes = [queries, keys, keys, *([] if bias is None else [bias])]
    params = [relax.Var(f"x{k}", R.Tensor(shape, dtype)) for k, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(R.nn.attention(*params, **attrs))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (9, 9), (5, 130)])
def test_operator(dtype: str, groups: int, queries: int, keys: int) -> None:
    shapes = (2, queries, 4, 16), (2, keys, groups, 16)
    fused = FuseAttention()(operator_program(*shapes, dtype=dtype))
    assert operators(fused) == [FUNCTION]
    q, k, v = (random(shape, dtype, seed) for seed, shape in enumerate((*shapes, shapes[1])))
    expected = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), scale=0.25).swapaxes(1, 2)
    found = run(fused, [q, k, v]).astype("float64")
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reproducible_queries_do_not_depend_on_others(dtype: str) -> None:
    fuse = FuseAttention(reproducible=True)
    q = random((1, 70, 4, 64), dtype, 0)
    k, v = (random((1, 150, 2, 64), dtype, seed) for seed in (1, 2))
    together = run(fuse(operator_program(q.shape, k.shape, dtype=dtype)), [q, k, v])
    for first, end in ((0, 1), (69, 70), (3, 5), (30, 70)):
        some = q[:, first:end]
        alone = run(fuse(operator_program(some.shape, k.shape, dtype=dtype)), [some, k, v])
        assert alone.tobytes() == together[:, first:end].tobytes()


@pytest.mark.parametrize("mask", ["TopLeft", "BottomRight"])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (70, 80)])
def test_causal_operator_is_that_of_tvm(mask: str, queries: int, keys: int) -> None:
    mod = operator_program((1, queries, 2, 8), (1, keys, 2, 8), causal_mask=mask, scale=0.3)
    inputs = [random((1, n, 2, 8), "float32", n) for n in (queries, keys, keys)]
    expected = run(mod, inputs)
    found = run(FuseAttention()(mod), inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_window_and_bias() -> None:
    shapes = (1, 30, 4, 8), (1, 30, 4, 8)
    mod = operator_program(*shapes, bias=(1, 4, 30, 30), causal_mask="TopLeft", window_size=7)
    inputs = [random(shape, "float32", seed) for seed, shape in enumerate((*shapes, shapes[1]))]
    bias = random((1, 4, 30, 30), "float32", 9)
    mask = np.where(causal(30, 30, window=7) < 0, -np.inf, 0)
    q, k, v = (x.swapaxes(1, 2) for x in inputs)
    expected = attention(q, k, v, 8**-0.5, bias=bias + mask).swapaxes(1, 2)
    found = run(FuseAttention()(mod), [*inputs, bias])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


# ---- sequences of different lengths ---------------------------------------------------------


def sequences_program(
    queries: int, keys: int, groups: int, count: int, dtype: str = "float32", **attrs: Any
) -> tvm.IRModule:
    """Return a program of `R.nn.attention_var_len`."""
    builder = relax.BlockBuilder()
    shapes = {"q": (1, queries, 4, 16), "k": (1, keys, groups, 16), "v": (1, keys, groups, 16)}
    params = [relax.Var(name, R.Tensor(shape, dtype)) for name, shape in shapes.items()]
    starts = [relax.Var(name, R.Tensor((count + 1,), "int32")) for name in ("sq", "sk")]
    longest = [relax.const(queries, "int32"), relax.const(keys, "int32")]
    q, k, v = params
    with builder.function("main", [*params, *starts]):
        with builder.dataflow():
            call = R.nn.attention_var_len(
                q, k, v, starts[0], longest[0], starts[1], longest[1], **attrs
            )
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()


def cumulated(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype="int32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("attrs", "window"),
    [
        ({}, None),
        ({"causal_mask": "TopLeft"}, 1000),
        ({"causal_mask": "BottomRight"}, 1000),
        ({"causal_mask": "BottomRight", "window_size": 5, "scale": 0.5}, 5),
    ],
)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([3, 1, 70], [5, 64, 130]), ([4], [4]), ([1, 0, 2], [1, 3, 2]), ([], [])],
)
def test_sequences(
    dtype: str,
    attrs: dict[str, Any],
    window: int | None,
    queries: list[int],
    keys: list[int],
) -> None:
    mod = sequences_program(sum(queries), sum(keys), 2, len(queries), dtype, **attrs)
    fused = FuseAttention()(mod)
    assert operators(fused) == ["tvm_ipc.blas.attention_of_sequences"]
    q, k, v = (
        random((1, tokens, heads, 16), dtype, seed)
        for seed, (tokens, heads) in enumerate([(sum(queries), 4), (sum(keys), 2), (sum(keys), 2)])
    )
    found = run(fused, [q, k, v, cumulated(queries), cumulated(keys)]).astype("float64")
    expected = np.empty(found.shape)
    for index, (n, t) in enumerate(zip(queries, keys, strict=True)):
        rows = slice(cumulated(queries)[index], cumulated(queries)[index + 1])
        columns = slice(cumulated(keys)[index], cumulated(keys)[index + 1])
        offset = t - n if attrs.get("causal_mask") == "BottomRight" else 0
        distance = np.arange(t)[None] - np.arange(n)[:, None] - offset
        allowed = (distance <= 0) & (distance > -(window or 0)) | (window is None)
        expected[:, rows] = attention(
            *(x.swapaxes(1, 2) for x in (q[:, rows], k[:, columns], v[:, columns])),
            scale=attrs.get("scale", 0.25),
            bias=np.where(allowed, 0, -np.inf),
        ).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 5, 3, 8], r"query_starts\[2\] is 3; sequences begin at 0 and follow each other"),
        ([0, 3, 5, 7], "query_starts is from 0 to 7; it must be from 0 to 8, the number of tokens"),
        ([1, 3, 5, 8], "query_starts is from 1 to 8; it must be from 0"),
        ([-1, 3, 5, 8], r"query_starts\[0\] is -1"),
    ],
)
def test_wrong_starts_are_refused(starts: list[int], message: str) -> None:
    fused = FuseAttention()(sequences_program(8, 8, 2, 3))
    inputs = [random((1, 8, heads, 16), "float32", heads) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match=message):
        run(fused, [*inputs, np.array(starts, "int32"), np.array([0, 1, 2, 8], "int32")])


# ---- matmuls and a softmax --------------------------------------------------------------------


def softmax_program(
    *,
    dtype: str = "float32",
    queries: Any = 5,
    groups: int = 2,
    heads: int = 4,
    scale: Any = 0.25,
    softcap: float = 0.0,
    mask: bool = True,
    axis: int = -1,
    also: str = "",
    permuted_result: bool = True,
    reshaped_scores: bool = False,
) -> tvm.IRModule:
    """Return attention as decoders have it, over any number of keys.

    `also` names what is returned, too: "scores" or "weights". If `reshaped_scores`, scores are
    reshaped also where that changes nothing.
    """
    builder = relax.BlockBuilder()
    keys = tvm.tirx.Var("t", "int64")
    depth, rows = 16, heads // groups * queries
    q = relax.Var("q", R.Tensor((1, heads, queries, depth), dtype))
    k = relax.Var("k", R.Tensor((1, keys, groups, depth), dtype))
    v = relax.Var("v", R.Tensor((1, keys, groups, depth), dtype))
    bias = relax.Var("bias", R.Tensor((1, 1, queries, keys), dtype))
    with builder.function("main", [q, k, v, bias]):
        with builder.dataflow():
            kt = builder.emit(
                R.permute_dims(builder.emit(R.permute_dims(k, (0, 2, 1, 3))), (0, 1, 3, 2))
            )
            values = builder.emit(R.permute_dims(v, (0, 2, 1, 3)))
            grouped = groups != heads
            left = builder.emit(R.reshape(q, (1, groups, rows, depth))) if grouped else q
            scores = builder.emit(R.matmul(left, kt))
            if grouped or reshaped_scores:
                scores = builder.emit(R.reshape(scores, (1, heads, queries, keys)))
            if scale is not None:
                scores = builder.emit(R.multiply(scores, R.const(scale, dtype)))
            if softcap:
                scores = builder.emit(R.tanh(R.divide(scores, R.const(softcap, dtype))))
                scores = builder.emit(R.multiply(scores, R.const(softcap, dtype)))
            if mask:
                scores = builder.emit(R.add(scores, bias))
            wide = scores if dtype == "float32" else builder.emit(R.astype(scores, "float32"))
            weights = builder.emit(R.nn.softmax(wide, axis))
            narrow = weights if dtype == "float32" else builder.emit(R.astype(weights, dtype))
            if grouped:
                narrow = builder.emit(R.reshape(narrow, (1, groups, rows, keys)))
            result = builder.emit(R.matmul(narrow, values))
            if grouped:
                result = builder.emit(R.reshape(result, (1, heads, queries, depth)))
            if permuted_result:
                result = R.permute_dims(result, (0, 2, 1, 3))
            outputs = [builder.emit_output(result)]
            if also:
                outputs.append(builder.emit_output({"scores": scores, "weights": weights}[also]))
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    return builder.get()


def test_reshapes_of_scores_that_change_nothing() -> None:
    """As torch.export leaves them where each head of queries has keys of its own."""
    mod = softmax_program(groups=4, reshaped_scores=True)
    fused = FuseAttention()(mod)
    assert operators(fused) == [FUNCTION]
    inputs = [random((1, 4, 5, 16), "float32", 1)]
    inputs += [random((1, 9, 4, 16), "float32", seed) for seed in (2, 3)]
    inputs.append(causal(5, 9))
    np.testing.assert_allclose(run(fused, inputs), run(mod, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("permuted_result", [False, True])
def test_matmuls_and_a_softmax(
    dtype: str, groups: int, softcap: float, permuted_result: bool
) -> None:
    mod = softmax_program(
        dtype=dtype, groups=groups, softcap=softcap, permuted_result=permuted_result
    )
    fused = FuseAttention()(mod)
    relax.analysis.well_formed(fused)
    assert operators(fused) == [FUNCTION]
    for keys in (5, 64, 600):
        q = random((1, 4, 5, 16), dtype, 1)
        k, v = (random((1, keys, groups, 16), dtype, seed) for seed in (2, 3))
        bias = causal(5, keys, dtype)
        expected = attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), 0.25, softcap, bias)
        if permuted_result:
            expected = expected.swapaxes(1, 2)
        found = run(fused, [q, k, v, bias]).astype("float64")
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype])


def test_without_scale_and_mask() -> None:
    fused = FuseAttention()(softmax_program(scale=None, mask=False))
    assert operators(fused) == [FUNCTION]
    q = random((1, 4, 5, 16), "float32", 1)
    k, v = (random((1, 9, 2, 16), "float32", seed) for seed in (2, 3))
    found = run(fused, [q, k, v, causal(5, 9)])
    expected = attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), 1.0).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"also": "scores"}, "is used elsewhere"),
        ({"also": "weights"}, "the weights of the softmax are used elsewhere"),
        ({"axis": 1}, "the softmax is not along the last axis"),
        ({"dtype": "float64"}, "there is no attention of float64"),
        ({"scale": [0.5] * 5 + [1.0]}, "scores are scaled by a tensor"),
    ],
    ids=["scores", "weights", "axis", "float64", "tensor"],
)
def test_what_is_left_to_tvm(options: dict[str, Any], reason: str) -> None:
    if isinstance(options.get("scale"), list):
        options = {"queries": 6, "scale": np.reshape(options["scale"], (6, 1))}
    mod = softmax_program(**options)
    with collect_report() as report:
        after = FuseAttention()(mod)
    assert tvm_ffi.structural_equal(after, mod)
    assert FUNCTION not in operators(after)
    (decision,) = [one for one in report.decisions if one.pass_name == "FuseAttention"]
    assert (decision.verdict, reason in decision.reason) == ("left to TVM", True), decision


def test_inputs_that_are_written_before_the_result() -> None:
    """A cache that the program updates between the scores and the values is read before that."""
    mod = tvm.script.from_source("""
@I.ir_module
class Model:
    @T.prim_func(private=True, s_tir=True)
    def fill(x: T.Buffer((1, 2, 3, 4), "float32")):
        for i, j, k, l in T.grid(1, 2, 3, 4):
            with T.sblock("fill"):
                a, b, c, d = T.axis.remap("SSSS", [i, j, k, l])
                x[a, b, c, d] = T.float32(7)

    @R.function(pure=False)
    def main(q: R.Tensor((1, 2, 3, 4), "float32"), k: R.Tensor((1, 2, 3, 4), "float32")):
        cls = Model
        kt = R.permute_dims(k, (0, 1, 3, 2))
        scores = R.nn.softmax(R.matmul(q, kt), -1)
        filled = R.call_tir_inplace(cls.fill, (k,), [0], R.Tensor((1, 2, 3, 4), "float32"))
        return R.matmul(scores, filled)
""")
    after = FuseAttention()(mod)
    assert FUNCTION not in operators(after)


def test_other_uses_of_a_permutation_remain() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((1, 3, 2, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            heads = builder.emit(R.permute_dims(x, (0, 2, 1, 3)))
            transposed = builder.emit(R.permute_dims(heads, (0, 1, 3, 2)))
            weights = builder.emit(R.nn.softmax(R.matmul(heads, transposed), -1))
            result = builder.emit_output(R.matmul(weights, heads))
            other = builder.emit_output(R.exp(transposed))
        builder.emit_func_output(relax.Tuple([result, other]))
    fused = FuseAttention()(builder.get())
    assert operators(fused) == ["permute_dims", "permute_dims", FUNCTION, "exp"]


# ---- in programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_pipeline(workers: int) -> None:
    """Attention is fused in the program that each worker runs."""
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=workers, fuse_attention=True)
    program = tvm.compile(softmax_program(), "llvm", relax_pipeline=pipeline)
    q = random((1, 4, 5, 16), "float32", 1)
    k, v = (random((1, 12, 2, 16), "float32", seed) for seed in (2, 3))
    bias = causal(5, 12)
    expected = attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), 0.25, bias=bias).swapaxes(1, 2)
    with tvm_ipc.Session(num_workers=workers) as session:
        main = session.load_vm_module(program)["main"]
        found = main(*map(session.put, (q, k, v, bias)))
        for rank in range(workers):
            np.testing.assert_allclose(session.get(found, rank), expected, rtol=0, atol=2e-6)


def test_pipeline_fuses_attention_unless_told_otherwise() -> None:
    for options in (
        {},
        {"fuse_attention": None},
        {"fuse_attention": True},
        {"fuse_attention": False},
    ):
        pipeline = tvm_ipc.get_pipeline("llvm", world_size=1, **options)
        with collect_report() as report:
            tvm.compile(softmax_program(), "llvm", relax_pipeline=pipeline)
        fused = [one for one in report.decisions if one.pass_name == "FuseAttention"]
        assert bool(fused) == (options.get("fuse_attention") is not False)
    message = "get_pipeline: fuse_attention is for CPUs, not for 'cuda'"
    with pytest.raises(ValueError, match=message):
        tvm_ipc.get_pipeline({"kind": "cuda", "arch": "sm_80"}, world_size=1, fuse_attention=True)


# ---- the packed function ------------------------------------------------------------------------


def call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "queries": np.zeros((1, 4, 3, 8), "float32"),
        "keys": np.zeros((1, 2, 5, 8), "float32"),
        "values": np.zeros((1, 2, 5, 8), "float32"),
        "out": np.zeros((1, 4, 3, 8), "float32"),
        "axes": 0,
        "causal": 0,
        "window": 0,
        "reproducible": 0,
        **changes,
    }
    tensors = [arguments[name] for name in ("queries", "keys", "values")]
    tensors += [arguments["bias"]] if "bias" in arguments else []
    tvm_ffi.get_global_func(FUNCTION)(
        *(arguments["axes"], 0, 0, 0, 1.0, 0.0),
        *(arguments[name] for name in ("causal", "window", "reproducible")),
        *map(tvm.runtime.tensor, [*tensors, arguments["out"]]),
    )


def test_arguments_that_fit() -> None:
    call()
    call(bias=np.zeros((3, 5), "float32"))
    call(causal=2, window=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": np.zeros((1, 3, 5, 8), "float32")}, r"keys \(1, 3, 5, 8\).*do not fit together"),
        ({"values": np.zeros((1, 2, 4, 8), "float32")}, "do not fit together"),
        ({"out": np.zeros((1, 4, 3, 7), "float32")}, "do not fit together"),
        ({"queries": np.zeros((1, 4, 3, 8), "float16")}, "have different types"),
        ({"queries": np.zeros((1, 4, 3, 8), "float64")}, "queries is float64"),
        ({"queries": np.zeros((4, 3, 8), "float32")}, r"queries \(4, 3, 8\) must have 4 dim"),
        ({"bias": np.zeros((2, 3, 5), "float32")}, r"the bias \(2, 3, 5\) does not broadcast"),
        ({"axes": 0x2310}, "so that the depth is not contiguous"),
        ({"causal": 3}, "causal is 3; it must be 0, 1 or 2"),
        ({"window": 3}, "the window is 3; it must be 0"),
        ({"causal": 1, "window": -1}, "the window is -1"),
        ({"reproducible": 2}, "reproducible is 2; it must be 0 or 1"),
    ],
)
def test_arguments_that_do_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"tvm_ipc.blas.attention: .*{message}"):
        call(**changes)
