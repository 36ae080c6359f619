# SPDX-License-Identifier: Apache-2.0
"""Computation of 16-bit types in float32, with rounding only where results are stored.

    c[i] = a[i] + b[i]          c[i] = narrow(wide(a[i]) + wide(b[i]))

`wide` shifts the bits of a bfloat16 into the upper half, and `narrow` rounds to nearest even and
preserves NaNs. Code generators vectorize both. TVM's own pass does not handle the values of `Let`
expressions, and converts some NaNs to infinity.

Reproducible kernels also round where a stage ends, so that fusion does not change the result.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.cpu.kernels.primfunc_stages import Axis, Stage, key, operator, reduction
from tvm_ipc.tvm_moved_names import TensorLoad

_BRAIN: Final = "bfloat16"
#: The 16-bit types.
NARROW: Final = ("float16", _BRAIN)
_ARITHMETIC: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_COMPARISONS: Final = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
#: Calls that return one of their arguments unchanged.
_MOVES: Final = frozenset(("if_then_else", "reinterpret"))


def widen_between(
    stages: list[Stage], own: dict[int, Any], *, reproducible: bool = False
) -> list[Stage]:
    """Return the stages with intermediate buffers and reductions of 16-bit types in float32.

    A reduction whose result is a 16-bit type becomes two stages. New buffers are added to `own`. If
    `reproducible`, the values in intermediate buffers are rounded to their 16-bit type.
    """
    wide: dict[int, tuple[Any, str]] = {}
    result_stages = []
    for stage in stages:
        dtype = str(stage.buffer.ty.dtype)
        is_result = key(stage.buffer) not in own
        combination = reduction(stage)
        if (
            dtype not in NARROW
            or (stage.reduced and combination is None)
            or not (stage.reduced or not is_result)
        ):
            result_stages.append(stage)
            continue
        buffer = _wide_buffer(stage, own)
        indices = [axis.var for axis in stage.axes]
        init, value = None, tirx.Cast("float32", stage.value)
        if combination is not None:
            combine, operand = combination
            init = tirx.Cast("float32", stage.init)
            value = combine(tirx.BufferLoad(buffer, indices), tirx.Cast("float32", operand))
        elif reproducible:
            value = tirx.Cast("float32", _rounded(stage.value))
        result_stages.append(Stage(buffer, stage.axes, stage.reduced, value, init))
        if is_result or (reproducible and combination is not None):
            axes = [Axis(tirx.Var(axis.var.name, axis.var.ty), axis.extent) for axis in stage.axes]
            sums = tirx.BufferLoad(buffer, [axis.var for axis in axes])
            value, buffer = tirx.Cast(dtype, sums), stage.buffer
            if not is_result:
                value, buffer = tirx.Cast("float32", _rounded(value)), _wide_buffer(stage, own)
            result_stages.append(Stage(buffer, axes, [], value))
        if not is_result:
            del own[key(stage.buffer)]
            wide[key(stage.buffer)] = buffer, dtype

    def load(node: Any) -> Any:
        if key(node.source) not in wide:
            return node
        buffer, dtype = wide[key(node.source)]
        return tirx.Cast(dtype, tirx.BufferLoad(buffer, list(node.indices)))

    for stage in result_stages if wide else []:
        stage.value = tvm_ffi.structural_map(stage.value, (TensorLoad, load))
        if stage.init is not None:
            stage.init = tvm_ffi.structural_map(stage.init, (TensorLoad, load))
    return result_stages


def _wide_buffer(stage: Stage, own: dict[int, Any]) -> Any:
    """Return a new buffer for the result of a stage in float32."""
    shape = list(stage.buffer.ty.shape)
    buffer = tirx.decl_buffer(shape, "float32", name=stage.buffer.name, layout=None)
    own[key(buffer)] = buffer
    return buffer


def _rounded(value: Any) -> Any:
    """Return a value whose wide form `widen_bfloat16` computes from the narrow one."""
    if _type(value) != _BRAIN:
        return value
    return tirx.reinterpret(_BRAIN, tirx.reinterpret("uint16", value))


def widen_bfloat16(value: Any) -> Any:
    """Return an expression that loads and returns bfloat16, but computes in float32."""
    return _Widener().of(value)


class _Widener:
    """Widens one expression; it remembers narrowed values, so that none is rounded in between."""

    def __init__(self) -> None:
        self._wide: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        return tvm_ffi.structural_map(
            value,
            [
                (tirx.Cast, self._cast),
                (_ARITHMETIC, lambda one: self._binary(one, narrow=True)),
                (_COMPARISONS, lambda one: self._binary(one, narrow=False)),
                (tirx.Select, self._select),
                (tvm.ir.Call, self._call),
            ],
        )

    def _cast(self, cast: Any) -> Any:
        source, target = _type(cast.value), _type(cast)
        if source == target:
            return cast.value
        if source == _BRAIN:
            wide = self._widen(cast.value)
            return wide if target == "float32" else tirx.Cast(target, wide)
        if target == _BRAIN:
            return self._narrow(
                cast.value if source == "float32" else tirx.Cast("float32", cast.value)
            )
        return cast

    def _binary(self, node: Any, *, narrow: bool) -> Any:
        if _type(node.a) != _BRAIN:
            return node
        widened = type(node)(self._widen(node.a), self._widen(node.b))
        return self._narrow(widened) if narrow else widened

    def _select(self, node: Any) -> Any:
        if _type(node) != _BRAIN:
            return node
        wide = self._widen(node.true_value), self._widen(node.false_value)
        return self._narrow(tirx.Select(node.condition, *wide))

    def _call(self, call: Any) -> Any:
        if operator(call) == "if_then_else" and _type(call) == _BRAIN:
            # TVM's own pass would convert the result of the branches to float32.
            args = [call.args[0], *map(self._widen, call.args[1:])]
            return self._narrow(tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType("float32")))
        if operator(call) in _MOVES or not any(_type(argument) == _BRAIN for argument in call.args):
            return call
        args = [
            self._widen(argument) if _type(argument) == _BRAIN else argument
            for argument in call.args
        ]
        if _type(call) != _BRAIN:
            return tvm.ir.Call(call.op, args, ret_ty=call.ty)
        return self._narrow(tvm.ir.Call(call.op, args, ret_ty=tvm.ir.PrimType("float32")))

    def _widen(self, value: Any) -> Any:
        if isinstance(value, tirx.FloatImm):
            return tirx.const(float(value.value), "float32")
        widened = self._wide.get(int(value.__chandle__()))
        return _widen_bits(value) if widened is None else widened[1]

    def _narrow(self, value: Any) -> Any:
        narrow = _narrow_bits(value)
        self._wide[int(narrow.__chandle__())] = narrow, value
        return narrow


def _widen_bits(value: Any) -> Any:
    bits = tirx.Cast("uint32", tirx.reinterpret("uint16", value))
    return tirx.reinterpret("float32", bits << tirx.const(16, "uint32"))


def _narrow_bits(value: Any) -> Any:
    var = tirx.Var("wide", tvm.ir.PrimType("float32"))
    bits = tirx.reinterpret("uint32", var)
    sixteen, one = tirx.const(16, "uint32"), tirx.const(1, "uint32")
    upper = bits >> sixteen
    rounded = (bits + tirx.const(0x7FFF, "uint32") + (upper & one)) >> sixteen
    # A NaN becomes a quiet NaN, since the carry could turn it into infinity. It is detected by its
    # bits, since TVM assumes that every number equals itself.
    quiet = upper | tirx.const(0x40, "uint32")
    number = (bits & tirx.const(0x7FFFFFFF, "uint32")) <= tirx.const(0x7F800000, "uint32")
    kept = tirx.Cast("uint16", tirx.Select(number, rounded, quiet))
    return tirx.Let(var, value, tirx.reinterpret(_BRAIN, kept))


def _type(value: Any) -> str:
    return str(value.ty.dtype) if hasattr(value.ty, "dtype") else ""
