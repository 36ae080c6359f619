# SPDX-License-Identifier: Apache-2.0
"""Analysis of attention: the operators that compute it, and the matmuls and softmax it consists of.

    rows = R.reshape(q, (b, groups, heads // groups * n, d))    queries = q
    kt = R.permute_dims(k, (0, 1, 3, 2))                        keys = k
    s0 = R.matmul(rows, kt)
    s1 = R.reshape(s0, (b, heads, n, t))
    s2 = R.multiply(s1, R.const(0.125))                         scale = 0.125
    s3 = R.add(s2, mask)                                        bias = mask
    p0 = R.nn.softmax(s3, axis=-1)
    p1 = R.reshape(p0, (b, groups, heads // groups * n, t))
    y0 = R.matmul(p1, v)                                        values = v
    y1 = R.reshape(y0, (b, heads, n, d))
    y2 = R.permute_dims(y1, (0, 2, 1, 3))                       the result

Reshapes, casts, the mask and the last permutation are optional, and so is a soft cap,
`tanh(s / cap) * cap`. `find_attention` returns what it finds in a function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.cpu.blas.find_matmuls_with_epilogues import Scope
from tvm_ipc.packed_functions import pack_digits
from tvm_ipc.tvm_moved_names import GenericConst

_FLOATS: Final = ("float16", "bfloat16", "float32")
_CPUS: Final = ("llvm", "c")
#: The axes of tensors with tokens before heads, as TVM's operators have them.
_TOKENS_FIRST: Final = (0, 2, 1, 3)
_PLAIN: Final = (0, 1, 2, 3)
_CAUSAL: Final = {None: 0, "TopLeft": 1, "BottomRight": 2}
_OF_SEQUENCES: Final = "relax.nn.attention_var_len"
_OPERATORS: Final = ("relax.nn.attention", "relax.nn.attention_bias", _OF_SEQUENCES)
_SOFTMAX: Final = "relax.nn.softmax"
_BEGINNINGS: Final = frozenset((*_OPERATORS, _SOFTMAX))


@dataclass(eq=False)
class Operand:
    """A tensor, and the order of its axes as (batch, heads, tokens, depth)."""

    value: Any
    axes: tuple[int, ...]

    @property
    def digits(self) -> int:
        """The axes as the packed function takes them."""
        return 0 if self.axes == _PLAIN else pack_digits(self.axes)


@dataclass(eq=False)
class Attention:
    """Attention in a function; `refusal` is the reason why the packed function lacks it."""

    steps: list[Step]  #: what computes it; the last one binds the result
    queries: Operand | None = None
    keys: Operand | None = None
    values: Operand | None = None
    out_axes: tuple[int, ...] = _PLAIN
    scale: float = 1.0
    softcap: float = 0.0
    causal: int = 0
    window: int = 0
    bias: Any = None
    #: The starts of sequences in the queries and in the keys; none if each batch is a sequence.
    starts: list[Any] = field(default_factory=list)
    #: Permutations and reshapes before operands, each with all that uses it.
    skipped: list[tuple[Step, list[Step]]] = field(default_factory=list)
    refusal: str = ""

    @property
    def subject(self) -> str:
        """The description of the attention in a report."""
        first, last = self.steps[0], self.steps[-1]
        return f"attention {first.var.name}: {last.var.ty}"

    @property
    def operands(self) -> list[Operand]:
        """The queries, keys and values."""
        found = (self.queries, self.keys, self.values)
        return [operand for operand in found if operand is not None]


class _NotAttentionError(Exception):
    """Something is not attention, or the packed function lacks it; the text is the reason."""


def find_attention(module: ModuleAliasFacts, name: str) -> list[Attention]:
    """Return the attention of a function, in order; each binding belongs to at most one."""
    if not any(operator_of(call) in _BEGINNINGS for call in calls(module.functions[name])):
        return []
    scope = Scope(module, name)
    found = []
    for step in list(scope.uses.bound.values()):
        operator = operator_of(step.value)
        if operator in _OPERATORS:
            attention = Attention([step])
            read = _read_operator
        elif operator == _SOFTMAX and _may_be_attention(step, scope):
            attention = Attention([step])
            read = _read_softmax
        else:
            continue
        try:
            read(attention, scope)
            _check(attention, scope)
        except _NotAttentionError as reason:
            attention.refusal = str(reason)
        found.append(attention)
    return found


_AFTER_SOFTMAX: Final = ("relax.astype", "relax.reshape", "relax.matmul")


def _may_be_attention(step: Step, scope: Scope) -> bool:
    """Return whether a softmax leads to a matmul of four dimensions."""
    if step.var.ty.ndim != 4:
        return False
    following = [step]
    while following:
        last = following.pop()
        if operator_of(last.value) == "relax.matmul":
            return True
        users = [user for user in scope.uses.users[last.var] if user.binding is not None]
        following += [user for user in users if operator_of(user.value) in _AFTER_SOFTMAX]
    return False


# ---- operators ------------------------------------------------------------------------------


def _read_operator(attention: Attention, scope: Scope) -> None:
    (step,) = attention.steps
    call = step.value
    queries, keys, values, *others = as_list(call.args)
    attention.queries = _look_through(attention, queries, _TOKENS_FIRST, scope)
    attention.keys = _look_through(attention, keys, _TOKENS_FIRST, scope)
    attention.values = _look_through(attention, values, _TOKENS_FIRST, scope)
    attention.out_axes = _TOKENS_FIRST
    if operator_of(call) == _OF_SEQUENCES:
        attention.starts = others[:2]  # the lengths of the longest sequences follow
    else:
        attention.bias = others[0] if others else None
    attrs = call.attrs
    depth = _extents(queries.ty.shape)[3]
    if attrs.scale is not None:
        attention.scale = float(attrs.scale.value)
    elif isinstance(depth, tirx.IntImm):
        attention.scale = 1 / math.sqrt(int(depth))
    else:
        raise _NotAttentionError("the depth is unknown before the program runs")
    mask = None if attrs.causal_mask is None else str(attrs.causal_mask)
    attention.causal = _CAUSAL[mask]
    attention.window = 0 if attrs.window_size is None else int(attrs.window_size)
    if attention.window and not attention.causal:
        raise _NotAttentionError("a window without a causal mask is not supported")


# ---- matmuls and a softmax --------------------------------------------------------------------


def _read_softmax(attention: Attention, scope: Scope) -> None:
    (softmax,) = attention.steps
    if int(softmax.value.attrs.axis) not in (-1, 3):
        raise _NotAttentionError("the softmax is not along the last axis")
    before = _Chain(scope, softmax)
    scores = before.of(softmax.value.args[0])
    if operator_of(scores.value) == "relax.add":
        scores, attention.bias = before.side(scores)
    if operator_of(scores.value) == "relax.multiply" and _is_call(
        before.side(scores)[0], "relax.tanh"
    ):
        capped, cap = before.side(scores)
        attention.softcap = _number(cap)
        scores = before.of(capped.value.args[0])
        quotient, factor = _scaled(scores, before)
        if quotient is None or abs(factor * attention.softcap - 1) > 0.02:
            raise _NotAttentionError("the tanh is not that of a soft cap")
        scores = quotient
    while True:
        product, factor = _scaled(scores, before)
        if product is None:
            break
        attention.scale *= factor
        scores = product
    shape = scores.var.ty.shape
    queries_shape = None
    if operator_of(scores.value) == "relax.reshape":
        queries_shape = shape
        scores = before.of(scores.value.args[0])
    if operator_of(scores.value) != "relax.matmul":
        raise _NotAttentionError(f"the scores are not those of a matmul, but of {scores.var.name}")
    queries, transposed = as_list(scores.value.args)
    attention.keys = _look_through(attention, transposed, (0, 1, 3, 2), scope)
    if queries_shape is not None:
        queries = _without_reshape(attention, queries, shape, scope)
    attention.queries = _look_through(attention, queries, _PLAIN, scope)
    attention.steps = [*reversed(before.steps), softmax]
    _read_values(attention, softmax, shape, scope)


class _Chain:
    """The bindings before a softmax, each of which only the next one uses."""

    def __init__(self, scope: Scope, softmax: Step) -> None:
        self.scope, self.softmax = scope, softmax
        self.steps: list[Step] = []

    def find(self, value: Any) -> Step | None:
        """Return the binding of a value if nothing else uses it, and skip casts."""
        step = self.scope.uses.binding_of(value)
        if step is None or not step.shares_block(self.softmax):
            return None
        if len(self.scope.uses.users[value]) != 1:
            return None
        return step

    def of(self, value: Any) -> Step:
        """Return the binding of a value, without casts; it becomes part of the attention."""
        step = self.find(value)
        if step is None:
            raise _NotAttentionError(
                f"{value} is used elsewhere, or is not computed beside the softmax"
            )
        self.steps.append(step)
        if operator_of(step.value) == "relax.astype":
            return self.of(step.value.args[0])
        return step

    def side(self, step: Step) -> tuple[Step, Any]:
        """Return the operand of a binary call that the scores are, and the other one."""
        left, right = as_list(step.value.args)
        for scores, other in ((left, right), (right, left)):
            if isinstance(scores, relax.Var) and scores.ty.ndim == 4:
                found = self.find(scores)
                if found is not None and operator_of(found.value) in _OF_SCORES:
                    return self.of(scores), other
        raise _NotAttentionError(f"no operand of {step.var.name} is used by it alone")


_OF_SCORES: Final = (
    "relax.astype",
    "relax.add",
    "relax.divide",
    "relax.matmul",
    "relax.multiply",
    "relax.reshape",
    "relax.tanh",
)


def _is_call(step: Step, operator: str) -> bool:
    return operator_of(step.value) == operator


def _scaled(scores: Step, before: _Chain) -> tuple[Step | None, float]:
    """Return what is multiplied with or divided by a number, and the factor."""
    operator = operator_of(scores.value)
    if operator not in ("relax.multiply", "relax.divide"):
        return None, 1.0
    left, right = as_list(scores.value.args)
    if isinstance(right, GenericConst):
        number = _number(right)
        return before.of(left), number if operator == "relax.multiply" else 1 / number
    if operator == "relax.multiply" and isinstance(left, GenericConst):
        return before.of(right), _number(left)
    return None, 1.0


def _number(value: Any) -> float:
    """Return the number that a constant is."""
    if not isinstance(value, GenericConst):
        raise _NotAttentionError("scores are scaled by a tensor")
    array = np.asarray(value.value.numpy(), "float64")
    if array.size != 1 or not array.flat[0]:
        raise _NotAttentionError("scores are scaled by a tensor")
    return float(array.flat[0])


def _read_values(attention: Attention, softmax: Step, shape: Any, scope: Scope) -> None:
    """Read what follows a softmax: the matmul with the values, and where the result is stored."""
    last = softmax

    def following(*operators: str) -> Step | None:
        users = scope.uses.users[last.var]
        step = users[0] if len(users) == 1 else None
        if step is None or step.binding is None or not step.shares_block(softmax):
            return None
        return step if operator_of(step.value) in operators else None

    grouped = False
    while True:
        step = following(*_AFTER_SOFTMAX)
        if step is None:
            raise _NotAttentionError("the weights of the softmax are used elsewhere")
        attention.steps.append(step)
        if operator_of(step.value) == "relax.matmul":
            break
        grouped = grouped or operator_of(step.value) == "relax.reshape"
        last = step
    weights, values = as_list(step.value.args)
    if not weights.same_as(last.var):
        raise _NotAttentionError("the weights of the softmax are no left operand of a matmul")
    last = step
    attention.values = _look_through(attention, values, _PLAIN, scope)
    extents = [*_extents(shape)[:3], _extents(values.ty.shape)[3]]
    if grouped:
        step = following("relax.reshape")
        if step is None or not _equal(_extents(step.var.ty.shape), extents):
            raise _NotAttentionError("the result does not have the heads of the scores")
        attention.steps.append(step)
        last = step
    step = following("relax.permute_dims")
    axes = None if step is None else step.value.attrs.axes
    if step is not None and axes is not None and tuple(map(int, axes)) == _TOKENS_FIRST:
        attention.steps.append(step)
        attention.out_axes = _TOKENS_FIRST


def _without_reshape(attention: Attention, queries: Any, shape: Any, scope: Scope) -> Any:
    """Return the queries with the heads of the scores."""
    step = scope.uses.binding_of(queries)
    if queries.ty.ndim == 4 and _equal(_extents(queries.ty.shape)[:3], _extents(shape)[:3]):
        return queries  # the reshape of the scores changes nothing
    if step is None or not _is_call(step, "relax.reshape"):
        raise _NotAttentionError("the queries are not reshaped, but the scores are")
    source = step.value.args[0]
    if source.ty.ndim != 4 or not _equal(_extents(source.ty.shape)[:3], _extents(shape)[:3]):
        raise _NotAttentionError("the queries do not have the heads of the scores")
    attention.skipped.append((step, scope.uses.users[queries]))
    return source


def _look_through(attention: Attention, value: Any, axes: tuple[int, ...], scope: Scope) -> Operand:
    """Return the source of permutations before an operand, whose last axis is the depth."""
    found = Operand(value, axes) if axes[3] == 3 else None
    skipped: list[tuple[Step, list[Step]]] = []
    step = scope.uses.binding_of(value)
    while step is not None and _is_call(step, "relax.permute_dims"):
        source = step.value.args[0]
        order = step.value.attrs.axes
        if order is None or source.ty.ndim != 4:
            break
        # Axis i of the operand is axis axes[i] of the permuted tensor.
        axes = tuple(int(order[axis]) % 4 for axis in axes)
        skipped.append((step, scope.uses.users[step.var]))
        if axes[3] == 3:
            found = Operand(source, axes)
            attention.skipped += skipped
            skipped = []
        step = scope.uses.binding_of(source)
    if found is None:
        raise _NotAttentionError("the depth of the keys is not their last axis in memory")
    return found


def _check(attention: Attention, scope: Scope) -> None:
    """Raise an error unless the packed function has this attention and reads may be moved."""
    last = attention.steps[-1]
    types = [operand.value.ty for operand in attention.operands]
    for ty in [*types, last.var.ty, *([] if attention.bias is None else [attention.bias.ty])]:
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise _NotAttentionError("the shape of a tensor is unknown before the program runs")
        if ty.dtype is None or str(ty.dtype) not in _FLOATS:
            raise _NotAttentionError(f"there is no attention of {ty.dtype or 'an unknown type'}")
        if ty.vdevice is not None and ty.vdevice.target.kind.name not in _CPUS:
            raise _NotAttentionError(f"a tensor is on the device {ty.vdevice.target.kind.name}")
    if len({str(ty.dtype) for ty in types}) > 1:
        raise _NotAttentionError("queries, keys and values have different types")
    assert attention.queries is not None and attention.keys is not None
    batch = [
        _extents(operand.value.ty.shape)[operand.axes[0]]
        for operand in (attention.queries, attention.keys)
    ]
    if not _equal(*([extent] for extent in batch)):
        raise _NotAttentionError("the keys are broadcast along the batch")
    reads = [(operand.value, _bound_at(operand.value, scope)) for operand in attention.operands]
    others = [*attention.starts, *([] if attention.bias is None else [attention.bias])]
    reads += [(value, _bound_at(value, scope)) for value in others]
    if not scope.may_move(reads, last.entry):
        raise _NotAttentionError("its inputs are written before its result is computed")
    for value, _ in reads:
        step = scope.uses.binding_of(value)
        if isinstance(value, relax.DataflowVar) and (step is None or not step.shares_block(last)):
            raise _NotAttentionError("an input is visible in another block only")


def _bound_at(value: Any, scope: Scope) -> int:
    step = scope.uses.binding_of(value)
    return -1 if step is None else step.index


def _extents(shape: Any) -> list[Any]:
    if not isinstance(shape, relax.ShapeExpr):
        raise _NotAttentionError("the shape of a tensor is unknown before the program runs")
    return as_list(shape.values)


def _equal(left: list[Any], right: list[Any]) -> bool:
    return bool(tvm_ffi.structural_equal(relax.ShapeExpr(left), relax.ShapeExpr(right)))
