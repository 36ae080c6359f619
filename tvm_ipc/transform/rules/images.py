# SPDX-License-Identifier: Apache-2.0
"""Convolutions, pooling, and resizing. Of height, width and depth every rank needs all."""

from __future__ import annotations

from typing import Any, Final

from tvm import relax

from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation
from tvm_ipc.transform.rules.products import among, summed
from tvm_ipc.transform.rules.rule import Labels, Part, Refusal, Rule, needs_all

#: Labels of the batch, channels of the operand and of the result; others are of letters.
_BATCH, _IN, _OUT, _REST = range(4)


def _labels(layout: str, **named: int) -> Labels:
    """Return the labels of a layout such as NCHW."""
    if not layout.isalpha():
        raise Refusal(f"its layout {layout!r} has blocks of channels")
    return tuple(named.get(letter, _REST + ord(letter)) for letter in layout)


def _rest(*tensors: Labels) -> set[int | None]:
    return {one for labels in tensors for one in labels if one is not None and one >= _REST}


def _layouts(op: Operation) -> tuple[str, str]:
    """Return the layouts of the operand and of the result."""
    attrs = op.attrs
    layout = str(getattr(attrs, "data_layout", None) or attrs.layout)
    return layout, str(getattr(attrs, "out_layout", None) or layout)


def _conv(op: Operation) -> Rule:
    """Batch, channels of the result, and channels that are summed over; groups stay whole.

    The taps of a kernel have labels of their own, since they are no height and width.
    """
    data_layout, out_layout = _layouts(op)
    groups = int(op.attrs.groups)
    kernel_layout = str(op.attrs.kernel_layout)
    transposed = op.name.endswith("_transpose")
    result = _OUT if groups == 1 else _IN
    data = _labels(data_layout, N=_BATCH, C=_IN)
    made = _labels(out_layout, N=_BATCH, C=result)
    in_group = _REST + ord("I")
    if groups == 1:
        kernel = _labels(kernel_layout, I=_IN, O=_OUT)
        parts = summed(op, {_IN})
        whole = {**needs_all(*_rest(data, kernel)), **parts.pop("whole", {})}
        return Rule((data, kernel), (made,), whole=whole, keeps=keeps.one_sum, **parts)
    # The axis of the kernel that goes through all groups, and the one within each.
    named = {"I": _IN, "O": in_group} if transposed else {"O": _IN, "I": in_group}
    kernel = _labels(kernel_layout, **named)

    def local(part: Part) -> relax.Expr:
        attrs = op.attrs
        given: dict[str, Any] = {
            "strides": _numbers(attrs.strides),
            "padding": _numbers(attrs.padding),
            "dilation": _numbers(attrs.dilation),
            "groups": groups // part.workers.get(_IN, 1),
            "data_layout": data_layout,
            "kernel_layout": kernel_layout,
            "out_layout": out_layout,
            "out_dtype": attrs.out_dtype,
        }
        if transposed:
            given["output_padding"] = _numbers(attrs.output_padding)
        make = getattr(relax.op.nn, op.name.removeprefix("nn."))
        return make(*part.call.args, **given)

    return Rule(
        (data, kernel),
        (made,),
        whole=needs_all(*_rest(data, kernel)),
        among={_IN: among(groups, "groups of channels")},
        keeps=keeps.one_sum,
        local=local,
    )


def _numbers(values: Any) -> list[int]:
    return [int(one) for one in values]


def _pool(op: Operation) -> Rule:
    data_layout, out_layout = _layouts(op)
    data = _labels(data_layout, N=_BATCH, C=_IN)
    made = _labels(out_layout, N=_BATCH, C=_IN)
    linear = keeps.all_sums if "avg" in op.name else (lambda here: str(here[0]) == "P[max]")
    return Rule((data,), (made,), whole=needs_all(*_rest(data)), keeps=linear, zeros=all)


def _resize(op: Operation) -> Rule:
    data = _labels(str(op.attrs.layout), N=_BATCH, C=_IN)
    return Rule((data,), (data,), whole=needs_all(*_rest(data)))


def _grid_sample(op: Operation) -> Rule:
    layout = str(op.attrs.layout)
    data = _labels(layout, N=_BATCH, C=_IN)
    grid = (_BATCH, *range(_REST + 200, _REST + 199 + op.ndim(1)))
    return Rule((data, grid), (data,), whole=needs_all(*_rest(data, grid)))


def _batch_alone(op: Operation) -> Rule:
    """Axes that come out as others, or are mixed: all but the first."""
    operand = tuple(range(op.ndim()))
    result = (0, *range(op.ndim(), op.ndim() + len(op.made()) - 1))
    return Rule((operand,), (result,), whole=needs_all(*operand[1:]))


RULES: Final = {
    **{
        f"nn.{kind}{n}d{end}": make
        for n in (1, 2, 3)
        for kind, end, make in (
            ("conv", "", _conv),
            ("conv", "_transpose", _conv),
            ("max_pool", "", _pool),
            ("avg_pool", "", _pool),
            ("adaptive_avg_pool", "", _pool),
        )
    },
    "image.resize2d": _resize,
    "image.resize3d": _resize,
    "image.grid_sample": _grid_sample,
    "image.affine_grid": _batch_alone,
}
