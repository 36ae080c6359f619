# SPDX-License-Identifier: Apache-2.0
"""Numbers of 16 bits are computed with in float32, and rounded where they are stored.

    c[i] = a[i] + b[i]          c[i] = narrow(wide(a[i]) + wide(b[i]))

`wide` of a bfloat16 puts its bits into the upper half, and `narrow` rounds to nearest even; what is
no number stays none. Code generators make vectors of both. TVM's own does not look into the value
of a `Let`, and makes infinity of some NaNs.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.transform.kernels.stages import Axis, Stage, key, operator, reduction

_BRAIN: Final = "bfloat16"
_NARROW: Final = ("float16", _BRAIN)
_ARITHMETIC: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_COMPARISONS: Final = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
#: Calls that only move what they are given.
_MOVES: Final = frozenset(("if_then_else", "reinterpret"))


def widen_between(stages: list[Stage], own: dict[int, Any]) -> list[Stage]:
    """Return stages of which what lies between them, and what they add up, is wide.

    A result of 16 bits that is a reduction becomes two stages. New buffers are noted as own ones.
    """
    wide: dict[int, tuple[Any, str]] = {}
    made = []
    for stage in stages:
        dtype = str(stage.buffer.ty.dtype)
        result = key(stage.buffer) not in own
        parts = reduction(stage)
        if (
            dtype not in _NARROW
            or (stage.reduced and parts is None)
            or not (stage.reduced or not result)
        ):
            made.append(stage)
            continue
        shape = list(stage.buffer.ty.shape)
        buffer = tirx.decl_buffer(shape, "float32", name=stage.buffer.name, layout=None)
        own[key(buffer)] = buffer
        place = [axis.var for axis in stage.axes]
        init, value = None, tirx.Cast("float32", stage.value)
        if parts is not None:
            combine, more = parts
            init = tirx.Cast("float32", stage.init)
            value = combine(tirx.BufferLoad(buffer, place), tirx.Cast("float32", more))
        made.append(Stage(buffer, stage.axes, stage.reduced, value, init))
        if result:
            axes = [Axis(tirx.Var(axis.var.name, axis.var.ty), axis.extent) for axis in stage.axes]
            sums = tirx.BufferLoad(buffer, [axis.var for axis in axes])
            made.append(Stage(stage.buffer, axes, [], tirx.Cast(dtype, sums)))
        else:
            del own[key(stage.buffer)]
            wide[key(stage.buffer)] = buffer, dtype

    def load(one: Any) -> Any:
        if key(one.source) not in wide:
            return one
        buffer, dtype = wide[key(one.source)]
        return tirx.Cast(dtype, tirx.BufferLoad(buffer, list(one.indices)))

    for stage in made if wide else []:
        stage.value = tvm_ffi.structural_map(stage.value, (tvm.ir.TensorLoad, load))
        if stage.init is not None:
            stage.init = tvm_ffi.structural_map(stage.init, (tvm.ir.TensorLoad, load))
    return made


def without_bfloat16(value: Any) -> Any:
    """Return an expression that reads bfloat16, and may be one, but computes with none."""
    return _Widened().of(value)


class _Widened:
    """One expression; what was narrowed is remembered, so that it is not rounded on the way."""

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

    def _binary(self, one: Any, *, narrow: bool) -> Any:
        if _type(one.a) != _BRAIN:
            return one
        made = type(one)(self._widen(one.a), self._widen(one.b))
        return self._narrow(made) if narrow else made

    def _select(self, one: Any) -> Any:
        if _type(one) != _BRAIN:
            return one
        wide = self._widen(one.true_value), self._widen(one.false_value)
        return self._narrow(tirx.Select(one.condition, *wide))

    def _call(self, call: Any) -> Any:
        if operator(call) == "if_then_else" and _type(call) == _BRAIN:
            # TVM's own pass would make what is between the branches and their use float32.
            chosen = [call.args[0], *map(self._widen, call.args[1:])]
            return self._narrow(tvm.ir.Call(call.op, chosen, ret_ty=tvm.ir.PrimType("float32")))
        if operator(call) in _MOVES or not any(_type(argument) == _BRAIN for argument in call.args):
            return call
        given = [self._widen(one) if _type(one) == _BRAIN else one for one in call.args]
        if _type(call) != _BRAIN:
            return tvm.ir.Call(call.op, given, ret_ty=call.ty)
        return self._narrow(tvm.ir.Call(call.op, given, ret_ty=tvm.ir.PrimType("float32")))

    def _widen(self, value: Any) -> Any:
        if isinstance(value, tirx.FloatImm):
            return tirx.const(float(value.value), "float32")
        known = self._wide.get(int(value.__chandle__()))
        return _wide(value) if known is None else known[1]

    def _narrow(self, value: Any) -> Any:
        narrow = _narrow(value)
        self._wide[int(narrow.__chandle__())] = narrow, value
        return narrow


def _wide(value: Any) -> Any:
    bits = tirx.Cast("uint32", tirx.reinterpret("uint16", value))
    return tirx.reinterpret("float32", bits << tirx.const(16, "uint32"))


def _narrow(value: Any) -> Any:
    var = tirx.Var("wide", tvm.ir.PrimType("float32"))
    bits = tirx.reinterpret("uint32", var)
    sixteen, one = tirx.const(16, "uint32"), tirx.const(1, "uint32")
    upper = bits >> sixteen
    rounded = (bits + tirx.const(0x7FFF, "uint32") + (upper & one)) >> sixteen
    # A NaN is made quiet instead: the carry could make it infinite. It is told by its bits, since
    # TVM takes a number for equal to itself.
    quiet = upper | tirx.const(0x40, "uint32")
    number = (bits & tirx.const(0x7FFFFFFF, "uint32")) <= tirx.const(0x7F800000, "uint32")
    kept = tirx.Cast("uint16", tirx.Select(number, rounded, quiet))
    return tirx.Let(var, value, tirx.reinterpret(_BRAIN, kept))


def _type(value: Any) -> str:
    return str(value.ty.dtype) if hasattr(value.ty, "dtype") else ""
