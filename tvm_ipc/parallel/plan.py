# SPDX-License-Identifier: Apache-2.0
"""Which parameters are cut how: patterns of names, and styles.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}

A pattern is a name, the end of one from a dot on, or either without the last part, such as the name
of a module whose weight and bias are meant; `*` stands for anything between two dots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.placements import Placements, placement_of

#: Styles, for weights whose first axis is that of outputs, and for vectors.
STYLES: Final[dict[str, tuple[Placement, Placement]]] = {
    **dict.fromkeys(
        ("colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise"),
        (Shard(0), Shard(0)),
    ),
    **dict.fromkeys(("rowwise", "rowwise_rep", "embedding_colwise"), (Shard(1), Replica())),
    **dict.fromkeys(("replicated", "replicate"), (Replica(), Replica())),
}
_WANTED: Final = (
    "a placement, such as comm.Shard(0), or one of the styles "
    f"{', '.join(map(repr, STYLES))}; or these by axes of the mesh"
)

#: Extents of parameters by their names.
Shapes = Mapping[str, Sequence[Any]]


def placements_by_plan(plan: Any, mesh: Mesh, shapes: Shapes) -> dict[str, Placements]:
    """Return where parameters lie that a plan names; raise ValueError where it fits nothing."""
    arguments.instance("parallelize: plan", plan, Mapping, "a mapping from patterns of names")
    found: dict[str, Placements] = {}
    by: dict[str, str] = {}
    for pattern, given in plan.items():
        arguments.text("parallelize: plan, a pattern", pattern, "a name, or a pattern of names")
        names = [name for name in shapes if _matches(pattern, name)]
        if not names:
            near = _near(pattern, shapes)
            raise ValueError(f"parallelize: plan: {pattern!r} is the name of no parameter; {near}")
        for name in names:
            placements = _placements(pattern, given, mesh, name, shapes[name])
            if found.setdefault(name, placements) != placements:
                raise ValueError(
                    f"parallelize: plan: {by[name]!r} and {pattern!r} are both patterns of "
                    f"{name!r}, and differ; leave one of them out"
                )
            by[name] = pattern
    return found


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        len(wanted) <= len(one) and all(map(fnmatchcase, one[len(one) - len(wanted) :], wanted))
        for one in (parts, parts[:-1])
    )


def _near(pattern: str, shapes: Shapes) -> str:
    """Return what a pattern may have meant."""
    length = pattern.count(".") + 1
    ends: dict[str, None] = {}
    for name in shapes:
        parts = name.split(".")
        for one in (parts, parts[:-1]):
            ends[".".join("*" if part.isdigit() else part for part in one[-length:])] = None
    near = get_close_matches(pattern, [one for one in ends if one], n=3, cutoff=0.5)
    if near:
        return f"near it are {', '.join(map(repr, near))}"
    return f"there are {', '.join(map(repr, list(shapes)[:5]))} and so on"


def _placements(
    pattern: str, given: Any, mesh: Mesh, name: str, shape: Sequence[Any]
) -> Placements:
    where = f"parallelize: plan, of {pattern!r}"
    if isinstance(given, Mapping):
        unknown = [axis for axis in given if axis not in mesh.axes]
        if unknown:
            known = ", ".join(map(repr, mesh.axes))
            raise ValueError(f"{where}: {unknown[0]!r} is no axis of the mesh, which has {known}")
        by_axis = given
    elif len(mesh.axes) == 1:
        by_axis = dict.fromkeys(mesh.axes, given)
    else:
        raise ValueError(
            f"{where}: {arguments.show(given)} is along which axis of {mesh}? Say it by the name "
            "of the axis"
        )
    placements = tuple(
        _placement(where, by_axis.get(axis, Replica()), len(shape)) for axis in mesh.axes
    )
    cut = [one.axis for one in placements if isinstance(one, Shard)]
    for axis in cut:
        if axis >= len(shape):
            shown = ", ".join(map(str, shape))
            raise ValueError(f"{where}: S[{axis}]: there is no axis {axis} in {name!r}, ({shown})")
        if cut.count(axis) > 1:
            raise ValueError(f"{where}: axis {axis} of {name!r} is divided twice, on {mesh}")
    return placements


def _placement(where: str, given: Any, ndim: int) -> Placement:
    if isinstance(given, str) and given in STYLES:
        return STYLES[given][ndim < 2]
    try:
        placement = placement_of(where, given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where} is {_WANTED}, not {arguments.show(given)}") from None
    if isinstance(placement, Partial):
        raise ValueError(f"{where}: a parameter is no part of a reduction: {given}")
    return placement
