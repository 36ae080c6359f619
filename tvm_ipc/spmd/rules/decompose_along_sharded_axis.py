# SPDX-License-Identifier: Apache-2.0
"""Decompositions of operators into simpler ones, for use along a sharded axis.

    softmax(x)  =  e / sum(e), where e = exp(x - max(x))

If the axis is sharded, `max` and `sum` exchange one value for each row between the ranks. The other
operators are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from tvm import relax
from tvm.relax import op as R  # noqa: N812 - as programs are written

from tvm_ipc.comm.collective_relax_op import dtype_of

#: Binds a call to a variable of the program for all ranks.
Emit: TypeAlias = Callable[[relax.Expr], relax.Var]
Decomposition: TypeAlias = Callable[[relax.Call, Emit], relax.Var]


def decompose(name: str, call: relax.Call, emit: Emit) -> relax.Var | None:
    """Emit the decomposition of a call and return its result, or None if there is none.

    Tensors of 16-bit floats are computed in float32, as in TVM's own kernels of these operators.
    """
    decomposition = DECOMPOSITIONS.get(name)
    if decomposition is None:
        return None
    dtype = dtype_of(call.args[0].ty)
    if dtype not in ("float16", "bfloat16"):
        return decomposition(call, emit)
    wide = [emit(R.astype(x, "float32")) for x in call.args]
    result = decomposition(relax.Call(call.op, wide, call.attrs), emit)
    return emit(R.astype(result, dtype))


def _shifted(call: relax.Call, emit: Emit) -> tuple[relax.Var, relax.Var]:
    """Return the operand minus its maximum, and the sum of the exponentials of that."""
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
    centered = emit(R.subtract(x, emit(R.mean(x, attrs.axis, keepdims=True))))
    return emit(R.mean(emit(R.square(centered)), attrs.axis, keepdims=bool(attrs.keepdims)))


def _std(call: relax.Call, emit: Emit) -> relax.Var:
    return emit(R.sqrt(_variance(call, emit)))


def _layer_norm(call: relax.Call, emit: Emit) -> relax.Var:
    x, gamma, beta = call.args
    attrs = call.attrs
    centered = emit(R.subtract(x, emit(R.mean(x, attrs.axes, keepdims=True))))
    scale = _inverse_root(centered, attrs, emit)
    y = emit(R.multiply(centered, scale))
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


DECOMPOSITIONS: Final[dict[str, Decomposition]] = {
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "variance": _variance,
    "std": _std,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
}
