# SPDX-License-Identifier: Apache-2.0
"""For each operator that has a rule: how to call it, and which axes may be divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tvm_ipc import comm
from tvm_ipc.spmd.rules.elementwise import BROADCASTING, UNARY

Array = np.ndarray[Any, Any]
nn = op.nn
FAR = 500_000_000


@dataclass
class Tensor:
    """A parameter: of floats if nothing else is said, of integers from a range otherwise."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: int = 0
    high: int = 5

    def values(self, random: Any) -> Array:
        """Return values of both signs, no two equal and none 0, that are added exactly.

        What is infinite is not the same as a sum of parts.
        """
        if self.dtype == "bool":
            return random.integers(0, 2, self.shape).astype("bool")
        if "int" in self.dtype:
            return random.integers(self.low, self.high, self.shape).astype(self.dtype)
        size = int(np.prod(self.shape))
        scale = 2.0 ** np.ceil(np.log2(max(size, 4)) - 1)
        found = (random.permutation(np.arange(-size, 2 * size))[:size] * 2 + 1) / (2 * scale)
        return found.reshape(self.shape).astype(self.dtype)


@dataclass
class Drawn:
    """A call with shapes: the parameters, and what makes the results of them."""

    params: list[Tensor]
    make: Callable[..., relax.Expr]


class Draw:
    """Draws extents: any, or, where that has to be known, multiples of 4."""

    def __init__(self, seed: int, even: bool = False) -> None:
        self.random = Random(seed)
        self.even = even

    def dims(self, count: int) -> list[int]:
        """Return some extents."""
        return [self.dim() for _ in range(count)]

    def dim(self, least: int = 1) -> int:
        """Return an extent."""
        if self.even:
            return self.random.choice((4, 8, 12))
        return max(least, self.random.choice((1, 2, 3, 4, 5, 6, 7, 12)))

    def axis(self, ndim: int) -> int:
        """Return an axis: the last one where the axes that may be divided have to be known."""
        return ndim - 1 if self.even else self.random.randrange(ndim)

    def pick(self, *choices: Any) -> Any:
        """Return one of some values, the first one where that has to be known."""
        return choices[0] if self.even else self.random.choice(choices)


@dataclass
class Case:
    """An operator, or some with one rule."""

    names: tuple[str, ...]
    draw: Callable[[Draw], Drawn]
    #: For each operand the axes that may be divided, where extents are multiples of the ranks.
    parts: tuple[str, ...]
    partial: bool = True  #: whether parameters may be partial sums
    refused: set[int] = field(default_factory=set)


CASES: list[Case] = []


def case(names: str, *parts: str, partial: bool = True) -> Callable[[Any], Any]:
    def added(draw: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
        CASES.append(Case(tuple(names.split()), draw, parts, partial))
        return draw

    return added


def drawn(make: Callable[..., relax.Expr], *params: Any) -> Drawn:
    return Drawn([one if isinstance(one, Tensor) else Tensor(tuple(one)) for one in params], make)


def emit(value: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(value)


def together(makes: Sequence[Callable[..., relax.Expr]]) -> Callable[..., relax.Expr]:
    """Several operators of the same operands in one program."""

    def make(*xs: relax.Var) -> relax.Expr:
        return relax.Tuple([emit(one(*xs)) for one in makes])

    return make


def function(name: str) -> Callable[..., relax.Expr]:
    found: Any = op
    for one in name.split("."):
        found = getattr(found, one)
    return found  # type: ignore[no-any-return]


# ---- element by element ---------------------------------------------------------------------

_ROUGH = ("atanh", "tan")  # without a bound
_SPECIAL: dict[str, Callable[..., relax.Expr]] = {
    "astype": lambda x: op.astype(x, "float64"),
    "clip": lambda x: op.clip(x, -1, 1),
    "bitwise_not": lambda x: op.bitwise_not(op.astype(x, "int32")),
    "logical_not": lambda x: op.logical_not(op.astype(x, "bool")),
    "nn.softplus": lambda x: nn.softplus(x),
    "wrap_param": lambda x: op.wrap_param(x, "float32"),
}
_OF_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
_OF_BOOL = ("logical_and", "logical_or", "logical_xor")
_LEFT_OUT_OF_BINARY = (*_OF_BITS, *_OF_BOOL, "where", "power", "log_add_exp")


@case(" ".join(UNARY), "012")
def _unary(draw: Draw) -> Drawn:
    makes = [_SPECIAL.get(name) or function(name) for name in UNARY if name not in _ROUGH]
    return drawn(together(makes), draw.dims(3))


@case("zeros_like ones_like full_like", "01")
def _like(draw: Draw) -> Drawn:
    number = relax.const(3.0, "float32")
    makes = [op.zeros_like, op.ones_like, lambda x: op.full_like(x, number)]
    return drawn(together(makes), draw.dims(2))


@case("hint_on_device wrap_param", "01")
def _same(draw: Draw) -> Drawn:
    import tvm

    return drawn(lambda x: op.hint_on_device(x, tvm.cpu()), draw.dims(2))


def _repeated(draw: Draw, dims: list[int]) -> list[int]:
    """Return the shape of an operand that is repeated to others."""
    shape = [draw.pick(extent, 1) for extent in dims]
    return shape[draw.pick(0, 0, 1) :]


@case(" ".join(n for n in BROADCASTING if n not in _LEFT_OUT_OF_BINARY), "01", "01")
def _binary(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    names = [name for name in BROADCASTING if name not in _LEFT_OUT_OF_BINARY]
    return drawn(together([function(name) for name in names]), dims, _repeated(draw, dims))


@case("divide floor_divide floor_mod mod power log_add_exp", "01", "01", partial=False)
def _divisions(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    whole = [function(n) for n in ("floor_divide", "floor_mod", "mod")]
    wide = [
        lambda x, y: op.power(op.astype(x, "float32"), op.astype(y, "float32")),
        lambda x, y: op.log_add_exp(op.astype(x, "float32"), op.astype(y, "float32")),
    ]
    x = Tensor(tuple(dims), "int32", -9, 9)
    return drawn(together([*whole, *wide]), x, Tensor(tuple(_repeated(draw, dims)), "int32", 1, 5))


@case(" ".join(_OF_BITS), "01", "01", partial=False)
def _bits(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    x, y = Tensor(tuple(dims), "int32"), Tensor(tuple(_repeated(draw, dims)), "int32")
    return drawn(together([function(name) for name in _OF_BITS]), x, y)


@case(" ".join(_OF_BOOL), "01", "01", partial=False)
def _bools(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    x, y = Tensor(tuple(dims), "bool"), Tensor(tuple(_repeated(draw, dims)), "bool")
    return drawn(together([function(name) for name in _OF_BOOL]), x, y)


@case("where", "01", "01", "01")
def _where(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    condition = Tensor(tuple(_repeated(draw, dims)), "bool")
    return drawn(op.where, condition, dims, _repeated(draw, dims))


@case("nn.prelu", "012", "0")
def _prelu(draw: Draw) -> Drawn:
    dims = draw.dims(3)
    return drawn(lambda x, a: nn.prelu(x, a, 1), dims, dims[1:2])


@case("quantize dequantize", "01", "0", partial=False)
def _quantize(draw: Draw) -> Drawn:
    dims = draw.dims(2)

    def make(x: Any, scale: Any) -> relax.Expr:
        scale = emit(op.add(op.abs(scale), relax.const(0.5, "float32")))
        zero = emit(op.astype(emit(op.multiply(scale, relax.const(0, "float32"))), "int8"))
        quantized = emit(op.quantize(x, scale, zero, 1, "int8"))
        return relax.Tuple([quantized, emit(op.dequantize(quantized, scale, zero, 1))])

    return drawn(make, dims, dims[1:])


# ---- products -------------------------------------------------------------------------------


@case("matmul", "0123", "0123")
def _matmul(draw: Draw) -> Drawn:
    a, b, n, k, m = draw.dims(5)
    left, right = draw.pick(
        ((a, b, n, k), (a, b, k, m)),
        ((n, k), (k, m)),
        ((k,), (k, m)),
        ((n, k), (k,)),
        ((k,), (k,)),
        ((b, n, k), (k, m)),
        ((a, 1, n, k), (b, k, m)),
        ((a, b, n, k), (1, b, k, m)),
    )
    return drawn(op.matmul, left, right)


@case("outer", "0", "0")
def _outer(draw: Draw) -> Drawn:
    return drawn(op.outer, draw.dims(1), draw.dims(1))


@case("einsum", "012", "012")
def _einsum(draw: Draw) -> Drawn:
    sizes = dict(zip("abcd", draw.dims(4), strict=True))
    text = draw.pick("abc,acd->abd", "ab,bc->ca", "ab,ab->", "abc,cd->abd", "ab,cb->ac", "ab,bc")
    left, right = text.partition("->")[0].split(",")
    return drawn(
        lambda x, y: op.einsum((x, y), text),
        [sizes[c] for c in left],
        [sizes[c] for c in right],
    )


@case("nn.attention", "012", "02", "02")
def _attention(draw: Draw) -> Drawn:
    b, s, k, h, d, v = draw.dims(6)
    return drawn(nn.attention, (b, s, h, d), (b, k, h, d), (b, k, h, v))


@case("nn.attention", "02", "02", "02")
def _causal(draw: Draw) -> Drawn:
    b, s, h, d = draw.dims(4)
    return drawn(lambda q, k, v: nn.attention(q, k, v, causal_mask="TopLeft"), *[(b, s, h, d)] * 3)


@case("nn.attention_bias", "012", "02", "02", "012")
def _attention_bias(draw: Draw) -> Drawn:
    b, s, k, h, d, v = draw.dims(6)
    bias = (draw.pick(b, 1), draw.pick(h, 1), s, k)
    return drawn(nn.attention, (b, s, h, d), (b, k, h, d), (b, k, h, v), bias)


# ---- reductions and norms -------------------------------------------------------------------


@case("sum mean max min prod", "012")
def _reducing(draw: Draw) -> Drawn:
    axis = draw.pick(2, 0, [0, 2], None, -2)
    keep = draw.pick(False, True)
    names = ("sum", "mean", "max", "min", "prod")
    makes = [lambda x, n=n: function(n)(x, axis=axis, keepdims=keep) for n in names]
    return drawn(together(makes), draw.dims(3))


@case("variance std", "012")
def _spread(draw: Draw) -> Drawn:
    axis = draw.pick(2, 0, [0, 2], None)
    keep = draw.pick(False, True)
    makes = [lambda x, n=n: function(n)(x, axis=axis, keepdims=keep) for n in ("variance", "std")]
    return drawn(together(makes), draw.dims(3))


@case("max min sum", "01", partial=False)
def _whole_numbers(draw: Draw) -> Drawn:
    makes = [lambda x, n=n: function(n)(x, axis=1) for n in ("max", "min", "sum")]
    return drawn(together(makes), Tensor(tuple(draw.dims(2)), "int32", -90, -9))


@case("max min", "01", partial=False)
def _bytes(draw: Draw) -> Drawn:
    """As exporters ask whether any element is true."""
    makes = [lambda x, n=n: function(n)(x, axis=1) for n in ("max", "min")]
    return drawn(together(makes), Tensor(tuple(draw.dims(2)), "int8", -9, -3))


@case("median", "01")
def _median(draw: Draw) -> Drawn:
    return drawn(lambda x: op.median(x, [2]), draw.dims(3))


@case("nn.softmax nn.log_softmax", "012")
def _softmax(draw: Draw) -> Drawn:
    axis = draw.axis(3)
    makes = [lambda x: nn.softmax(x, axis), lambda x: nn.log_softmax(x, axis)]
    return drawn(together(makes), draw.dims(3))


@case("nn.layer_norm", "012", "0", "0")
def _layer_norm(draw: Draw) -> Drawn:
    dims = draw.dims(3)
    return drawn(lambda x, g, b: nn.layer_norm(x, g, b, [-1]), dims, dims[2:], dims[2:])


@case("nn.rms_norm", "012", "0")
def _rms_norm(draw: Draw) -> Drawn:
    dims = draw.dims(3)
    return drawn(lambda x, g: nn.rms_norm(x, g, [-1]), dims, dims[2:])


@case("nn.group_norm", "01", "0", "0")
def _group_norm(draw: Draw) -> Drawn:
    n, each, h, w = draw.dims(4)
    groups = draw.pick(2, 3, 4)
    channels = groups * each
    return drawn(
        lambda x, g, b: nn.group_norm(x, g, b, groups, 1, [2, 3]),
        (n, channels, h, w),
        (channels,),
        (channels,),
    )


@case("nn.instance_norm", "01", "0", "0")
def _instance_norm(draw: Draw) -> Drawn:
    n, c, h, w = draw.dims(4)
    return drawn(lambda x, g, b: nn.instance_norm(x, g, b, 1, [2, 3]), (n, c, h, w), (c,), (c,))


@case("nn.batch_norm", "0123", "0", "0", "0", "0")
def _batch_norm(draw: Draw) -> Drawn:
    n, c, h, w = draw.dims(4)
    training = draw.pick(False, True)

    def make(x: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> relax.Expr:
        variance = emit(op.abs(variance))
        return nn.batch_norm(x, gamma, beta, mean, variance, 1, training=training)

    return drawn(make, (n, c, h, w), *[(c,)] * 4)


# ---- moving ---------------------------------------------------------------------------------


@case("reshape", "012")
def _reshape(draw: Draw) -> Drawn:
    a, b, c, d = draw.dims(4)
    before, after = draw.pick(
        ((a, b, c), (a, b * c)),
        ((a * b, c), (a, b, c)),
        ((a, b * c, d), (a, b, c, d)),
        ((a, b, c, d), (a * b, c * d)),
        ((a, 1, b), (1, a, b)),
        ((a, b), (b * a,)),
    )
    return drawn(lambda x: op.reshape(x, after), before)


@case("expand_dims squeeze", "01")
def _dims_of_one(draw: Draw) -> Drawn:
    makes = [
        lambda x: op.expand_dims(x, [1, 3]),
        lambda x: op.squeeze(emit(op.expand_dims(x, [0, 2])), [0, 2]),
    ]
    return drawn(together(makes), draw.dims(2))


@case("flatten nn.batch_flatten", "012")
def _flatten(draw: Draw) -> Drawn:
    return drawn(together([op.flatten, nn.batch_flatten]), draw.dims(3))


@case("permute_dims", "012")
def _permute(draw: Draw) -> Drawn:
    axes = draw.pick([1, 2, 0], [2, 1, 0], [0, -1, 1], None)
    return drawn(lambda x: op.permute_dims(x, axes), draw.dims(3))


@case("broadcast_to", "02")
def _broadcast_to(draw: Draw) -> Drawn:
    a, b, c, d = draw.dims(4)
    return drawn(lambda x: op.broadcast_to(x, (d, a, b + 1, c)), (a, 1, c))


@case("concat", "01", "01", "01")
def _concat(draw: Draw) -> Drawn:
    axis = draw.axis(3)
    dims = draw.dims(3)
    shapes = [[*dims[:axis], draw.dim(), *dims[axis + 1 :]] for _ in range(3)]
    counted = draw.pick(axis, axis - 3)
    return drawn(lambda *xs: op.concat(xs, counted), *shapes)


@case("stack", "01", "01")
def _stack(draw: Draw) -> Drawn:
    dims = draw.dims(2)
    axis = draw.pick(1, 0, 2, -1)
    return drawn(lambda *xs: op.stack(xs, axis), dims, dims)


@case("split", "01")
def _split(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    sections = draw.pick(2, 3, "at")
    if sections == "at":
        return drawn(lambda x: op.split(x, [1, c + 1], axis=2), (a, b, c + 3))
    return drawn(lambda x: op.split(x, sections, axis=-1), (a, b, c * sections))


@case("strided_slice", "02")
def _slice(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    all_of_it = 2**31 - 1
    return drawn(
        lambda x: op.strided_slice(x, [0, 1, 2], [0, 1, 0], [all_of_it, b + 2, c], [1, 2, 1]),
        (a, b + 3, c),
    )


@case("slice_scatter", "02", "02")
def _slice_scatter(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    return drawn(lambda x, y: op.slice_scatter(x, y, 1, b + 1, 1, 1), (a, b + 2, c), (a, b, c))


@case("flip", "01")
def _flip(draw: Draw) -> Drawn:
    axis = draw.axis(3)
    return drawn(lambda x: op.flip(x, axis), draw.dims(3))


@case("tile", "01")
def _tile(draw: Draw) -> Drawn:
    repeats = draw.pick((2, 1, 1, 3), (1, 2), (1, 1, 2))
    return drawn(lambda x: op.tile(x, repeats), draw.dims(3))


@case("repeat", "012")
def _repeat(draw: Draw) -> Drawn:
    axis = draw.axis(3)
    return drawn(lambda x: op.repeat(x, 3, axis), draw.dims(3))


@case("nn.pad", "01")
def _pad(draw: Draw) -> Drawn:
    value = draw.pick(0, 0, 2)
    return drawn(lambda x: nn.pad(x, [0, 0, 0, 0, 1, 2], pad_value=value), draw.dims(3))


@case("tril triu", "0")
def _triangle(draw: Draw) -> Drawn:
    k = draw.pick(0, 1)
    makes = [lambda x: op.tril(x, k), lambda x: op.triu(x, -k)]
    return drawn(together(makes), draw.dims(3))


@case("meshgrid", "0", "0", "0")
def _meshgrid(draw: Draw) -> Drawn:
    return drawn(lambda *xs: op.meshgrid(xs, "ij"), *([one] for one in draw.dims(3)))


@case("reverse_sequence", "02", "0", partial=False)
def _reverse_sequence(draw: Draw) -> Drawn:
    b, s, c = draw.dims(3)
    lengths = Tensor((b,), "int32", 1, s + 1)
    return drawn(lambda x, n: op.reverse_sequence(x, n, 1, 0), (b, s, c), lengths)


# ---- indices --------------------------------------------------------------------------------


@case("take", "012", "01")
def _take(draw: Draw) -> Drawn:
    a, b, c, n, m = draw.dims(5)
    axis = draw.pick(1, 0, 2)
    mode = draw.pick("fast", "clip", "wrap")
    extent = (a, b, c)[axis]
    outside = 0 if mode == "fast" else 4
    shape = draw.pick((n, m), (n,), ())
    indices = Tensor(shape, draw.pick("int32", "int64"), -outside, extent + outside)
    return drawn(lambda x, i: op.take(x, i, axis, mode), (a, b, c), indices)


@case("take", "0", "0")
def _take_of_vector(draw: Draw) -> Drawn:
    a, n = draw.dims(2)
    return drawn(lambda x, i: op.take(x, i), (a,), Tensor((n,), "int32", 0, a))


@case("take", "01", "01")
def _embedding_of_computed_indices(draw: Draw) -> Drawn:
    """Indices that lie far outside of the table beyond the end of parts."""
    a, b, n, m = draw.dims(4)

    def make(table: Any, i: Any) -> relax.Expr:
        return op.take(table, emit(op.subtract(i, relax.const(FAR, "int32"))), 0)

    return drawn(make, (a, b), Tensor((n, m), "int32", FAR, FAR + a))


@case("gather_elements", "02", "02")
def _gather_elements(draw: Draw) -> Drawn:
    a, b, c, n = draw.dims(4)
    indices = Tensor((a, n, c), "int64", 0, b)
    return drawn(lambda x, i: op.gather_elements(x, i, 1), (a, b, c), indices)


@case("scatter_elements", "02", "02", "02", partial=False)
def _scatter_elements(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    indices = Tensor((a, 1, c), "int64", 0, b)
    how = draw.pick("update", "add")
    return drawn(
        lambda x, i, y: op.scatter_elements(x, i, y, 1, how), (a, b, c), indices, (a, 1, c)
    )


@case("gather_nd", "03", "01")
def _gather_nd(draw: Draw) -> Drawn:
    a, b, c, n = draw.dims(4)
    indices = Tensor((a, n, 2), "int64", 0, 2)
    return drawn(lambda x, i: op.gather_nd(x, i, 1), (a, b + 1, c + 1, 4), indices)


@case("scatter_nd", "2", "", "1", partial=False)
def _scatter_nd(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    indices = Tensor((1, 2), "int64", 0, min(a, b))
    return drawn(op.scatter_nd, (a, b, c), indices, (1, c))


@case("index_tensor", "2", "01", "0")
def _index_tensor(draw: Draw) -> Drawn:
    a, b, c, n, m = draw.dims(5)
    first, second = Tensor((n, m), "int64", 0, a), Tensor((m,), "int64", 0, b)
    return drawn(lambda x, i, j: op.index_tensor(x, [i, j]), (a, b, c), first, second)


@case("one_hot", "01", partial=False)
def _one_hot(draw: Draw) -> Drawn:
    n, m, depth = draw.dims(3)
    axis = draw.pick(-1, 0, 1)
    on, off = (relax.prim_value(tirx.IntImm("int32", k)) for k in (3, -2))
    return drawn(lambda i: op.one_hot(i, on, off, depth, axis), Tensor((n, m), "int64", 0, depth))


@case("argmax argmin sort argsort cumsum cumprod", "01")
def _along(draw: Draw) -> Drawn:
    axis = draw.axis(3)
    keep = draw.pick(False, True)
    makes = [
        lambda x: op.argmax(x, axis, keep),
        lambda x: op.argmin(x, axis, keep),
        lambda x: op.sort(x, axis),
        lambda x: op.argsort(x, axis),
        lambda x: op.cumsum(x, axis),
        lambda x: op.cumprod(x, axis),
    ]
    return drawn(together(makes), draw.dims(3))


@case("topk", "01")
def _topk(draw: Draw) -> Drawn:
    a, b, c = draw.dims(3)
    kind = draw.pick("both", "values", "indices")
    return drawn(lambda x: op.topk(x, min(2, c), 2, kind), (a, b, c))


@case("bucketize", "01", "")
def _bucketize(draw: Draw) -> Drawn:
    n, m, k = draw.dims(3)

    def make(x: Any, boundaries: Any) -> relax.Expr:
        return op.bucketize(x, emit(op.sort(boundaries)))

    return drawn(make, (n, m), (k,))


# ---- images ---------------------------------------------------------------------------------


def _convolution(draw: Draw, spatial: int, groups: int, transposed: bool) -> Drawn:
    n, each, out = draw.dims(3)
    size = [draw.dim(3) + 2 for _ in range(spatial)]
    kernel = [draw.random.choice((1, 2, 3)) for _ in range(spatial)]
    data = (n, each * groups, *size)
    weight = (each * groups, out, *kernel) if transposed else (out * groups, each, *kernel)
    name = f"conv{spatial}d" + "_transpose" * transposed
    strides = [draw.random.choice((1, 2)) for _ in range(spatial)]
    padding = [draw.random.choice((0, 1)) for _ in range(spatial)]
    return drawn(
        lambda x, w: getattr(nn, name)(x, w, strides=strides, padding=padding, groups=groups),
        data,
        weight,
    )


@case("nn.conv1d", "01", "01")
def _conv1d(draw: Draw) -> Drawn:
    return _convolution(draw, 1, 1, False)


@case("nn.conv2d", "01", "01")
def _conv2d(draw: Draw) -> Drawn:
    return _convolution(draw, 2, 1, False)


@case("nn.conv3d", "01", "01")
def _conv3d(draw: Draw) -> Drawn:
    return _convolution(draw, 3, 1, False)


@case("nn.conv1d nn.conv2d", "01", "0")
def _conv_of_groups(draw: Draw) -> Drawn:
    return _convolution(draw, draw.pick(1, 2), draw.pick(2, 3, 4), False)


@case("nn.conv1d_transpose", "01", "01")
def _conv1d_transpose(draw: Draw) -> Drawn:
    return _convolution(draw, 1, 1, True)


@case("nn.conv2d_transpose", "01", "01")
def _conv2d_transpose(draw: Draw) -> Drawn:
    return _convolution(draw, 2, 1, True)


@case("nn.conv3d_transpose", "01", "01")
def _conv3d_transpose(draw: Draw) -> Drawn:
    return _convolution(draw, 3, 1, True)


@case("nn.conv2d_transpose", "01", "0")
def _conv_transpose_of_groups(draw: Draw) -> Drawn:
    return _convolution(draw, 2, 2, True)


def _pooled(spatial: int) -> Callable[[Draw], Drawn]:
    def draw_(draw: Draw) -> Drawn:
        dims = [*draw.dims(2), *(draw.dim(3) for _ in range(spatial))]
        size = tuple(2 for _ in range(spatial))
        makes = [
            lambda x: getattr(nn, f"max_pool{spatial}d")(x, size),
            lambda x: getattr(nn, f"avg_pool{spatial}d")(x, size, strides=size),
            lambda x: getattr(nn, f"adaptive_avg_pool{spatial}d")(x, size),
        ]
        return drawn(together(makes), dims)

    return draw_


for _spatial in (1, 2, 3):
    _names = (f"nn.{kind}{_spatial}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool"))
    case(" ".join(_names), "01")(_pooled(_spatial))


@case("image.resize2d", "01")
def _resize2d(draw: Draw) -> Drawn:
    return drawn(lambda x: op.image.resize2d(x, (3, 5), method="linear"), draw.dims(4))


@case("image.resize3d", "01")
def _resize3d(draw: Draw) -> Drawn:
    return drawn(lambda x: op.image.resize3d(x, (3, 2, 2)), draw.dims(5))


@case("image.grid_sample", "01", "0")
def _grid_sample(draw: Draw) -> Drawn:
    n, c, h, w = draw.dims(4)
    return drawn(op.image.grid_sample, (n, c, h, w), (n, 2, 3, 2))


@case("image.affine_grid", "0")
def _affine_grid(draw: Draw) -> Drawn:
    return drawn(lambda x: op.image.affine_grid(x, (3, 4)), (draw.dim(), 2, 3))


# ---- mixtures of experts --------------------------------------------------------------------


@case("comm.moe", "0", "0", "0", "0", "0", partial=False)
def _moe(draw: Draw) -> Drawn:
    """Also of one token, and with pairs of a token and a choice that no expert gets."""
    tokens, experts, features, inner, choices = draw.dims(5)
    return drawn(
        lambda *xs: comm.moe(*xs, activation="relu"),
        (tokens, features),
        Tensor((tokens, choices), "int64", -1, experts),
        (tokens, choices),
        (experts, 2 * inner, features),
        (experts, features, inner),
    )
