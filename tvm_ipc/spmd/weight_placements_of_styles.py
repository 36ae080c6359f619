# SPDX-License-Identifier: Apache-2.0
"""Styles of plans: the names that `transformers` and PyTorch give to ways of sharding a module.

A style specifies the features along which weights are sharded, and sometimes the placement of the
module's result. The collectives between modules follow from the program, and so does the axis of a
weight that has these features. A weight that no function uses has its output axis before its input
axis, as in PyTorch, possibly after an axis of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm import Placement, Replica, Shard
from tvm_ipc.comm.extent_arithmetic import constant


@dataclass(frozen=True)
class Matmul:
    """A matmul, einsum or convolution that a program uses a parameter in.

    Attributes
    ----------
    result : the variable of the result.
    outputs : the axes of the parameter that the result has, and no other operand.
    inputs : the axes of the parameter that the matmul sums over.
    """

    result: str
    outputs: frozenset[int]
    inputs: frozenset[int]


@dataclass
class Use:
    """The ways in which a program uses a parameter.

    Attributes
    ----------
    rows : the axes along which the program looks up rows of it, as of an embedding.
    matmuls : the matmuls that the program uses it in.
    unused : whether no function uses it.
    """

    rows: set[int] = field(default_factory=set)
    matmuls: list[Matmul] = field(default_factory=list)
    unused: bool = False


@dataclass(frozen=True)
class Style:
    """The sharding that a style specifies.

    Attributes
    ----------
    shards : the axis of the weights: "outputs", "inputs", "rows" or "columns" of a table,
        "experts", or "" for no axis.
    segments : the number of tensors that are fused in the weights along that axis.
    result : the axis of the result that is sharded, negative to count from the end; None if the
        style does not specify it.
    sequence : whether the operands of the module are sharded in the same way as its result.
    hook : whether the style only describes the behavior of the module on one rank, which
        `parallelize` derives from the program.
    weightless : whether the module has no weights, so that no parameter has its name.
    """

    shards: str = ""
    segments: int = 1
    result: int | None = None
    sequence: bool = False
    hook: bool = False
    weightless: bool = False

    def placement(self, where: str, name: str, shape: Sequence[Any], use: Use) -> Placement:
        """Return the placement of a parameter."""
        ndim, shards = len(shape), self.shards
        if not shards or ndim == 0:
            return Replica()
        if shards in ("outputs", "inputs"):
            return _placement_by_features(f"{where}: {name!r}", shape, use, shards)
        if ndim == 1:
            return Replica() if shards == "columns" else Shard(0)
        row = next(iter(use.rows)) if ndim == 2 and len(use.rows) == 1 else 0
        return Shard({"rows": row, "columns": 1 - row}.get(shards, 0))


def _placement_by_features(where: str, shape: Sequence[Any], use: Use, shards: str) -> Placement:
    """Return the placement of a parameter that is sharded by output or input features."""
    ndim = len(shape)
    outputs = frozenset[int]().union(*(matmul.outputs for matmul in use.matmuls))
    inputs = frozenset[int]().union(*(matmul.inputs for matmul in use.matmuls))
    long_axes = [axis for axis, extent in enumerate(shape) if constant(extent) != 1]
    if ndim == 1 or (len(long_axes) <= 1 and not (outputs and inputs)):
        # A bias, a scale or the weight of a norm, which has one element for each output feature.
        return Shard(long_axes[0] if long_axes else 0) if shards == "outputs" else Replica()
    described = f"{where} has the shape ({', '.join(map(str, shape))})"
    if use.unused:
        if ndim > 3:
            raise ValueError(f"{described}; write a placement, such as comm.Shard(0)")
        return Shard(ndim - 2 if shards == "outputs" else ndim - 1)
    if use.rows and ndim == 2:
        if not use.matmuls and len(use.rows) == 1:
            (row,) = use.rows
            return Shard(1 - row if shards == "outputs" else row)
        if shards == "inputs" and len(inputs) == 1 and use.rows != inputs:
            raise ValueError(
                f"{where}: the program uses it both as a table and as a matrix; its rows are "
                f"axis {_format_axes(use.rows)}, and its input features are axis "
                f"{_format_axes(inputs)}; write 'embedding_rowwise' to shard the rows, or "
                f"comm.Shard({_format_axes(inputs)}) to shard the input features"
            )
    axes, others = (outputs, inputs) if shards == "outputs" else (inputs, outputs)
    axes = axes.intersection(long_axes) or axes
    if len(axes) == 1 and not axes & others:
        return Shard(next(iter(axes)))
    features = "output" if shards == "outputs" else "input"
    if not use.matmuls:
        raise ValueError(
            f"{described}, and the program uses it in no matmul, so that it is unknown which axis "
            f"has its {features} features; {_readings(ndim, shards)}"
        )
    raise ValueError(f"{described}, and {_ambiguity(use, shards, features, axes, axes & others)}")


def _readings(ndim: int, shards: str) -> str:
    """Return what to write for each of the two orders of the feature axes of a parameter."""
    if ndim > 3:
        return "write the axis, such as comm.Shard(0)"
    last, before = ndim - 1, ndim - 2
    by_torch, by_relax = (before, last) if shards == "outputs" else (last, before)
    return (
        f"if its output features come first, as in PyTorch, write comm.Shard({by_torch}); if its "
        f"input features come first, as in x @ w, write comm.Shard({by_relax})"
    )


def _ambiguity(
    use: Use, shards: str, features: str, axes: frozenset[int], conflicts: frozenset[int]
) -> str:
    """Return why the axis with the features of a style is not unique, and what to write instead."""
    if not axes:
        return (
            f"in the matmul of {use.matmuls[0].result!r} no axis of it has {features} features; "
            "write the axis, such as comm.Shard(0), or comm.Replica()"
        )
    readings = {
        getattr(matmul, shards): matmul for matmul in use.matmuls if getattr(matmul, shards)
    }
    if len(readings) > 1 or conflicts:
        texts = [
            f"its {features} features are axis {_format_axes(each)} in the matmul of "
            f"{matmul.result!r}"
            for each, matmul in readings.items()
        ]
        prefix = "the program uses it in two orientations: "
    else:
        texts = [f"its {features} features are axes {_format_axes(axes)}"]
        prefix = ""
    choices = " or ".join(f"comm.Shard({axis})" for axis in sorted(axes))
    return f"{prefix}{' and '.join(texts)}; write the one to shard: {choices}"


def _format_axes(axes: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(axes)))


_OUTPUTS: Final = Style("outputs")
_INPUTS: Final = Style("inputs")
_NOTHING: Final = Style()
_HOOK: Final = Style(hook=True)

#: Styles by their names in transformers 4.5x and 5.x, and in PyTorch.
STYLES: Final[dict[str, Style]] = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "local_colwise"), _OUTPUTS),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep", "local_rowwise"), _INPUTS),
    "packed_colwise": Style("outputs", segments=2),
    **dict.fromkeys(("packed_rowwise", "local_packed_rowwise"), Style("inputs", segments=2)),
    "embedding_rowwise": Style("rows"),
    "embedding_colwise": Style("columns"),
    "grouped_gemm": Style("experts"),
    "sequence_parallel": Style(result=-2, sequence=True),
    **dict.fromkeys(
        ("replicated", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "ep_router"),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
            "all_reduce",
            "ep_dispatch_experts",
            "gather",
            "isolated",
            "local",
            "local_params",
            "moe_tp_experts",
        ),
        _HOOK,
    ),
    "moe_identity_expert": Style(hook=True, weightless=True),
    "ColwiseParallel": _OUTPUTS,
    "RowwiseParallel": _INPUTS,
    "SequenceParallel": Style(result=1, sequence=True),
    **dict.fromkeys(
        ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"), _HOOK
    ),
}

_OF_DATA: Final = (
    "is a style for data parallelism, where ranks gather weights before each use; write "
    "{'dp': 'colwise'} on a mesh with an axis 'dp' to store a shard of them, or remove it"
)
#: For unsupported styles, the rest of the error message.
_UNSUPPORTED: Final[dict[str, str]] = {
    "keep_full_weight": _OF_DATA,
    "free_full_weight": _OF_DATA,
}


def style_of(where: str, value: Any) -> Style | None:
    """Return the style with a name, or of a PyTorch style object; None for other values."""
    if isinstance(value, str):
        if value in _UNSUPPORTED:
            raise ValueError(f"{where}: {value!r} {_UNSUPPORTED[value]}")
        return STYLES.get(value)
    kind = next((base.__name__ for base in type(value).__mro__ if base.__name__ in STYLES), None)
    if kind is None:
        return None
    if kind.startswith("PrepareModule"):
        return _prepare_module_style(where, value)
    style = STYLES[kind]
    if kind == "SequenceParallel":
        # transformers has sequence_dim, PyTorch sequence_sharding.
        layout = getattr(value, "sequence_sharding", None)
        axis = getattr(value, "sequence_dim", None) if layout is None else _sharded_axis(layout)
        return style if axis is None else replace(style, result=axis)
    axis = _sharded_axis(getattr(value, "output_layouts", None))
    default = {"ColwiseParallel": -1}.get(kind)  # the result of sharded outputs
    return style if axis in (None, default) else replace(style, result=axis)


def _prepare_module_style(where: str, value: Any) -> Style:
    """Return the style of a PrepareModule object, whose layouts must all be replicated."""
    nested = [getattr(value, f"prepare_module_{side}", None) for side in ("input", "output")]
    layouts: list[Any] = []
    for preparation in (value, *nested):
        for name in ("desired_input_layouts", "desired_output_layouts"):
            layout = getattr(preparation, name, None)
            layouts += layout if isinstance(layout, (tuple, list)) else [layout]
        layouts += (getattr(preparation, "desired_input_kwarg_layouts", None) or {}).values()
    sharded = [layout for layout in layouts if _sharded_axis(layout) is not None]
    if sharded:
        raise ValueError(
            f"{where}: the {type(value).__name__} shards axis {_sharded_axis(sharded[0])}, but a "
            "plan only places results of modules with weights; pass output_layouts to the style of "
            "the module before it, or write R.comm.place in the program"
        )
    return STYLES[type(value).__name__]


def placement_of_torch(value: Any, ndim: int) -> Placement | None:
    """Return the placement that a PyTorch placement corresponds to, or None for other values."""
    if not isinstance(value, (Replica, Shard)) and type(value).__name__ == "Replicate":
        return Replica()
    axis = _sharded_axis(value) if type(value).__name__ == "Shard" else None
    return None if axis is None else Shard(axis + ndim if -ndim <= axis < 0 else axis)


def _sharded_axis(layout: Any) -> int | None:
    """Return the axis that a PyTorch layout shards, or None."""
    if isinstance(layout, (tuple, list)):
        layout = layout[0] if len(layout) == 1 else None
    axis = getattr(layout, "dim", None)
    return int(axis) if isinstance(axis, int) else None


def transformers_plan(
    plan: Mapping[str, Any], ndims: Callable[[str], Iterable[int]]
) -> dict[str, Any]:
    """Return a plan of a transformers model, with placements for stacks of matrices.

    Transformers counts the axes of a stack from the end, whatever the model does with them: in
    Llama 4, whose experts compute `x @ w`, "colwise" shards their input features.

    Parameters
    ----------
    plan : the styles by patterns of names.
    ndims : returns the numbers of axes of the parameters that a pattern matches.
    """
    explicit = dict(plan)
    for pattern, value in plan.items():
        style = STYLES.get(value) if isinstance(value, str) else None
        shards = "" if style is None else style.shards
        if shards in ("outputs", "inputs") and set(ndims(pattern)) == {3}:
            explicit[pattern] = str(Shard(1 if shards == "outputs" else 2))
    return explicit


def unknown_style(where: str, value: Any) -> Exception:
    """Return the error for a value that is neither a style nor a placement."""
    styles = ", ".join(map(repr, STYLES))
    expected = (
        f"a placement, such as comm.Shard(0), or one of the styles {styles}; or a mapping from "
        "axes of the mesh to these"
    )
    error = ValueError if isinstance(value, str) else TypeError
    similar = get_close_matches(value, STYLES, n=1) if isinstance(value, str) else []
    hint = f"; a similar style is {similar[0]!r}" if similar else ""
    return error(f"{where} is {expected}, not {arguments.quote(value)}{hint}")
