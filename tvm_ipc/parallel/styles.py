# SPDX-License-Identifier: Apache-2.0
"""Styles of plans: what `transformers` and PyTorch call the ways to divide a module.

A style says which axis of the weights is divided, and for some styles where the results of the
module lie. What is gathered or summed in between follows from the program, which is one for all
ranks. Weights have their outputs before their inputs, as PyTorch has them; before these may be an
axis of experts.
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
    """What a program does with a parameter.

    Attributes
    ----------
    table : it takes rows of it.
    matrix : it does something else with it, such as a product.
    """

    table: bool = False
    matrix: bool = True


@dataclass(frozen=True)
class Style:
    """What a style says.

    Attributes
    ----------
    divides : of the weights: "outputs", "inputs", "rows" or "columns" of a table, "experts", or ""
        for nothing.
    segments : how many tensors the weights are that are joined along that axis.
    result : the axis of the result that is divided, from the end if below 0; None says nothing.
    sequence : whether what the module is given is divided as its result is.
    hook : whether it says nothing of weights, but what the module does in a program of one rank,
        which here follows from the program.
    weightless : whether the module has no weights, so that its name is that of no parameter.
    """

    divides: str = ""
    segments: int = 1
    result: int | None = None
    sequence: bool = False
    hook: bool = False
    weightless: bool = False

    def cuts(self, where: str, name: str, shape: Sequence[Any], use: Use) -> Placement:
        """Return where a parameter lies."""
        ndim, divides = len(shape), self.divides
        # Of a stack of experts rows are taken too, which are matrices.
        if use.table and ndim == 2 and divides in ("outputs", "inputs"):
            if use.matrix and divides == "inputs":
                raise ValueError(
                    f"{where}: {name!r} is a table and a matrix of this program, whose rows are "
                    "its outputs; write 'embedding_rowwise' to divide these, or comm.Shard(1)"
                )
            if not use.matrix:
                divides = {"outputs": "columns", "inputs": "rows"}[divides]
        if not divides or ndim == 0 or (ndim == 1 and divides in ("inputs", "columns")):
            return Replica()
        if ndim > 3 and divides in ("outputs", "inputs"):
            shown = ", ".join(map(str, shape))
            raise ValueError(
                f"{where}: the style is one of matrices, and {name!r} is ({shown}); write a "
                "placement, such as comm.Shard(0)"
            )
        if ndim == 1:
            return Shard(0)
        return Shard({"outputs": ndim - 2, "inputs": ndim - 1, "columns": 1}.get(divides, 0))


_OUTPUTS: Final = Style("outputs")
_INPUTS: Final = Style("inputs")
_NOTHING: Final = Style()
_HOOK: Final = Style(hook=True)

#: By the names that versions 4.5x and 5.x of transformers have in their plans, and PyTorch.
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
    "is a style of plans for data parallelism, which gather weights while they are used; write "
    "{'dp': 'colwise'} on a mesh with an axis 'dp' to store a part of them, or leave it out"
)
#: What to write instead of names that other plans have.
_INSTEAD: Final[dict[str, str]] = {
    "keep_full_weight": _OF_DATA,
    "free_full_weight": _OF_DATA,
}


def style_of(where: str, given: Any) -> Style | None:
    """Return the style that is given by its name, or as an object of PyTorch; None for others."""
    if isinstance(given, str):
        if given in _INSTEAD:
            raise ValueError(f"{where}: {given!r} {_INSTEAD[given]}")
        return STYLES.get(given)
    kind = next((one.__name__ for one in type(given).__mro__ if one.__name__ in STYLES), None)
    if kind is None:
        return None
    if kind.startswith("PrepareModule"):
        return _prepared(where, given)
    style = STYLES[kind]
    if kind == "SequenceParallel":
        # transformers has sequence_dim, PyTorch sequence_sharding.
        layout = getattr(given, "sequence_sharding", None)
        axis = getattr(given, "sequence_dim", None) if layout is None else _divided(layout)
        return style if axis is None else replace(style, result=axis)
    axis = _divided(getattr(given, "output_layouts", None))
    follows = {"ColwiseParallel": -1}.get(kind)  # what comes of the weights without more ado
    return style if axis in (None, follows) else replace(style, result=axis)


def _prepared(where: str, given: Any) -> Style:
    """Check that what a module is given, or gives, is whole, as modules after it expect."""
    parts = [getattr(given, f"prepare_module_{one}", None) for one in ("input", "output")]
    layouts: list[Any] = []
    for one in (given, *parts):
        for name in ("desired_input_layouts", "desired_output_layouts"):
            found = getattr(one, name, None)
            layouts += found if isinstance(found, (tuple, list)) else [found]
        layouts += (getattr(one, "desired_input_kwarg_layouts", None) or {}).values()
    divided = [one for one in layouts if _divided(one) is not None]
    if divided:
        raise ValueError(
            f"{where}: a {type(given).__name__} that divides axis {_divided(divided[0])}: a plan "
            "places results of modules that have weights; give output_layouts of the one before "
            "it, or put R.comm.place in the program"
        )
    return STYLES[type(given).__name__]


def placement_of_torch(given: Any, ndim: int) -> Placement | None:
    """Return a placement of PyTorch as one of ours; None for other values."""
    if not isinstance(given, (Replica, Shard)) and type(given).__name__ == "Replicate":
        return Replica()
    axis = _divided(given) if type(given).__name__ == "Shard" else None
    return None if axis is None else Shard(axis + ndim if -ndim <= axis < 0 else axis)


def _divided(layout: Any) -> int | None:
    """Return which axis a layout of PyTorch divides."""
    if isinstance(layout, (tuple, list)):
        layout = layout[0] if len(layout) == 1 else None
    axis = getattr(layout, "dim", None)
    return int(axis) if isinstance(axis, int) else None


def unknown_style(where: str, given: Any) -> Exception:
    """Return the error for what is no style and no placement."""
    known = ", ".join(map(repr, STYLES))
    wanted = (
        f"a placement, such as comm.Shard(0), or one of the styles {known}; or these by axes of "
        "the mesh"
    )
    error = ValueError if isinstance(given, str) else TypeError
    near = get_close_matches(given, STYLES, n=1) if isinstance(given, str) else []
    hint = f"; near it is {near[0]!r}" if near else ""
    return error(f"{where} is {wanted}, not {arguments.show(given)}{hint}")
