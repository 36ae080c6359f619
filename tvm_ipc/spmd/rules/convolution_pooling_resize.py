# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of convolutions, pooling and resizing.

Every rank needs all of height, width and depth.
"""

from __future__ import annotations

from typing import Any, Final

from tvm import relax

from tvm_ipc.spmd.rules.axis_label_rule import (
    Labels,
    LocalCall,
    Refusal,
    Rule,
    all_partial_sums,
    needs_all,
    one_partial_sum,
)
from tvm_ipc.spmd.rules.matmul_attention import sum_of_products, whole_blocks
from tvm_ipc.spmd.rules.operation import Operation

#: Labels of the batch, and of the channels of the operand and of the result. Other axes have the
#: codes of their letters, added to `_REST`.
_BATCH, _IN, _OUT, _REST = range(4)


def _labels(layout: str, **named: int) -> Labels:
    """Return the labels of a layout such as NCHW."""
    if not layout.isalpha():
        raise Refusal(f"its layout {layout!r} has blocks of channels")
    return tuple(named.get(letter, _REST + ord(letter)) for letter in layout)


def _rest(*tensors: Labels) -> set[int | None]:
    every = (label for labels in tensors for label in labels)
    return {label for label in every if label is not None and label >= _REST}


def _layouts(op: Operation) -> tuple[str, str]:
    """Return the layouts of the operand and of the result."""
    attrs = op.attrs
    layout = str(getattr(attrs, "data_layout", None) or attrs.layout)
    return layout, str(getattr(attrs, "out_layout", None) or layout)


def _conv(op: Operation) -> Rule:
    """Return the rule of a convolution.

    Ranks may share the batch, the channels of the result and the channels that are summed over;
    groups stay whole. The spatial axes of the kernel have other labels than those of the data.
    """
    data_layout, out_layout = _layouts(op)
    groups = int(op.attrs.groups)
    kernel_layout = str(op.attrs.kernel_layout)
    transposed = op.name.endswith("_transpose")
    out_channels = _OUT if groups == 1 else _IN
    data = _labels(data_layout, N=_BATCH, C=_IN)
    result_labels = _labels(out_layout, N=_BATCH, C=out_channels)
    in_group = _REST + ord("I")
    if groups == 1:
        kernel = _labels(kernel_layout, I=_IN, O=_OUT)
        sums = sum_of_products(op, [_IN], _rest(data, kernel))
        return Rule((data, kernel), (result_labels,), **sums)
    # One axis of the kernel covers the channels of all groups, the other those within a group.
    named = {"I": _IN, "O": in_group} if transposed else {"O": _IN, "I": in_group}
    kernel = _labels(kernel_layout, **named)

    def local(local_call: LocalCall) -> relax.Expr:
        attrs = op.attrs
        attributes: dict[str, Any] = {
            "strides": _numbers(attrs.strides),
            "padding": _numbers(attrs.padding),
            "dilation": _numbers(attrs.dilation),
            "groups": groups // local_call.workers.get(_IN, 1),
            "data_layout": data_layout,
            "kernel_layout": kernel_layout,
            "out_layout": out_layout,
            "out_dtype": attrs.out_dtype,
        }
        if transposed:
            attributes["output_padding"] = _numbers(attrs.output_padding)
        make = getattr(relax.op.nn, op.name.removeprefix("nn."))
        return make(*local_call.call.args, **attributes)

    return Rule(
        (data, kernel),
        (result_labels,),
        whole=needs_all(*_rest(data, kernel)),
        divisibility={_IN: whole_blocks(groups, "groups of channels")},
        partial_linear=one_partial_sum,
        local=local,
    )


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def _pool(op: Operation) -> Rule:
    data_layout, out_layout = _layouts(op)
    data = _labels(data_layout, N=_BATCH, C=_IN)
    result_labels = _labels(out_layout, N=_BATCH, C=_IN)
    linear = (
        all_partial_sums
        if "avg" in op.name
        else (lambda placements: str(placements[0]) == "P[max]")
    )
    return Rule(
        (data,),
        (result_labels,),
        whole=needs_all(*_rest(data)),
        partial_linear=linear,
        preserves_zeros=all,
    )


def _resize(op: Operation) -> Rule:
    data = _labels(str(op.attrs.layout), N=_BATCH, C=_IN)
    return Rule((data,), (data,), whole=needs_all(*_rest(data)))


def _grid_sample(op: Operation) -> Rule:
    layout = str(op.attrs.layout)
    data = _labels(layout, N=_BATCH, C=_IN)
    grid = (_BATCH, *range(_REST + 200, _REST + 199 + op.ndim(1)))
    return Rule((data, grid), (data,), whole=needs_all(*_rest(data, grid)))


def _batch_only(op: Operation) -> Rule:
    """Return the rule of an operator that mixes all axes but the first."""
    result = (0, *range(op.ndim(), op.ndim() + len(op.result_dims()) - 1))
    return Rule((op.labels,), (result,), whole=needs_all(*op.labels[1:]))


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
    "image.affine_grid": _batch_only,
}
