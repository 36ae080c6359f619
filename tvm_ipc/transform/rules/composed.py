# SPDX-License-Identifier: Apache-2.0
"""Operators as several simpler ones, for axes of which no rank has all.

    softmax(x)  =  e / sum(e), where e = exp(x - max(x))

Where the axis is divided, `max` and `sum` exchange a value for each row between the ranks, and the
rest is element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from tvm import relax
from tvm.relax import op as R  # noqa: N812 - as programs are written

from tvm_ipc.comm.operator import dtype_of

#: Binds a call to a variable of the program for all ranks.
Emit: TypeAlias = Callable[[relax.Expr], relax.Var]
Composed: TypeAlias = Callable[[relax.Call, Emit], relax.Var]


def composed(name: str, call: relax.Call, emit: Emit) -> relax.Var | None:
    """Return what several operators give instead of one, None where it is not made of others.

    As TVM's kernels of these do, they compute with 32 bits where tensors have 16.
    """
    make = COMPOSED.get(name)
    if make is None:
        return None
    dtype = dtype_of(call.args[0].ty)
    if dtype not in ("float16", "bfloat16"):
        return make(call, emit)
    wide = [emit(R.astype(x, "float32")) for x in call.args]
    return emit(R.astype(make(relax.Call(call.op, wide, call.attrs), emit), dtype))


def _shifted(call: relax.Call, emit: Emit) -> tuple[relax.Var, relax.Var]:
    """Return what is left of the largest element, and the sum of its exponentials."""
    (x,), axis = call.args, [int(call.attrs.axis)]
    shifted = emit(R.subtract(x, emit(R.max(x, axis, keepdims=True))))
    return shifted, emit(R.sum(emit(R.exp(shifted)), axis, keepdims=True))


def _softmax(call: relax.Call, emit: Emit) -> relax.Var:
    shifted, total = _shifted(call, emit)
    return emit(R.divide(emit(R.exp(shifted)), total))


def _log_softmax(call: relax.Call, emit: Emit) -> relax.Var:
    shifted, total = _shifted(call, emit)
    return emit(R.subtract(shifted, emit(R.log(total))))


def _variance(call: relax.Call, emit: Emit) -> relax.Var:
    (x,), attrs = call.args, call.attrs
    apart = emit(R.subtract(x, emit(R.mean(x, attrs.axis, keepdims=True))))
    return emit(R.mean(emit(R.square(apart)), attrs.axis, keepdims=bool(attrs.keepdims)))


def _std(call: relax.Call, emit: Emit) -> relax.Var:
    return emit(R.sqrt(_variance(call, emit)))


def _layer_norm(call: relax.Call, emit: Emit) -> relax.Var:
    x, gamma, beta = call.args
    attrs = call.attrs
    apart = emit(R.subtract(x, emit(R.mean(x, attrs.axes, keepdims=True))))
    scale = _inverse_root(apart, attrs, emit)
    y = emit(R.multiply(apart, scale))
    if attrs.scale:
        y = emit(R.multiply(y, gamma))
    return emit(R.add(y, beta)) if attrs.center else y


def _rms_norm(call: relax.Call, emit: Emit) -> relax.Var:
    x, weight = call.args
    y = emit(R.multiply(x, _inverse_root(x, call.attrs, emit)))
    return emit(R.multiply(y, weight))


def _inverse_root(x: relax.Var, attrs: Any, emit: Emit) -> relax.Var:
    squares = emit(R.mean(emit(R.square(x)), attrs.axes, keepdims=True))
    epsilon = relax.const(float(attrs.epsilon), dtype_of(x.ty))
    return emit(R.rsqrt(emit(R.add(squares, epsilon))))


COMPOSED: Final[dict[str, Composed]] = {
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "variance": _variance,
    "std": _std,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
}
