# SPDX-License-Identifier: Apache-2.0
"""Styles of plans: the names that `transformers` and PyTorch give to ways of sharding a module.

A style specifies the axis along which weights are sharded, and sometimes the placement of the
module's result. The collectives between modules follow from the program. Weights have their output
axis before their input axis, as in PyTorch, possibly after an axis of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm import Placement, Replica, Shard


@dataclass(frozen=True)
class Use:
    """The ways in which a program uses a parameter.

    Attributes
    ----------
    table : whether the program takes rows of it, as of an embedding.
    matrix : whether the program uses it in another way, such as in a matmul.
    """

    table: bool = False
    matrix: bool = True


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
        # A take from a stack of experts returns matrices, so the stack is no table.
        if use.table and ndim == 2 and shards in ("outputs", "inputs"):
            if use.matrix and shards == "inputs":
                raise ValueError(
                    f"{where}: the program uses {name!r} both as a table and as a matrix, so its "
                    "rows are its outputs; write 'embedding_rowwise' to shard the rows, or "
                    "comm.Shard(1)"
                )
            if not use.matrix:
                shards = {"outputs": "columns", "inputs": "rows"}[shards]
        if not shards or ndim == 0 or (ndim == 1 and shards in ("inputs", "columns")):
            return Replica()
        if ndim > 3 and shards in ("outputs", "inputs"):
            extents = ", ".join(map(str, shape))
            raise ValueError(
                f"{where}: the style is for matrices, but {name!r} has the shape ({extents}); "
                "write a placement, such as comm.Shard(0)"
            )
        if ndim == 1:
            return Shard(0)
        return Shard({"outputs": ndim - 2, "inputs": ndim - 1, "columns": 1}.get(shards, 0))


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
