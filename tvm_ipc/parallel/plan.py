# SPDX-License-Identifier: Apache-2.0
"""Which parameters are cut how: patterns of names, and styles or placements.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}

Of parameters that are "auto", by a pattern or all by the plan, it is found how they are cut.

A pattern is a name, the end of one from a dot on, or either without the last part, such as the name
of a module whose weight and bias are meant; `*` stands for anything between two dots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Partial, Placement, Replica, Shard
from tvm_ipc.comm.placements import Placements, placement_of
from tvm_ipc.parallel.styles import Style, Use, placement_of_torch, style_of, unknown_style

#: What is to be found.
AUTO: Final = "auto"
#: The axis of a mesh along which ranks have different layers.
PIPELINE: Final = "pp"
#: Extents of parameters by their names.
Shapes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Planned:
    """What a plan says of a model.

    Attributes
    ----------
    placements : where parameters lie.
    styles : of parameters, by the axes of the mesh along which they have one.
    wanted : parameters that no other pattern means, and that are to be cut in the best way.
    """

    placements: dict[str, Placements] = field(default_factory=dict)
    styles: dict[str, dict[str, Style]] = field(default_factory=dict)
    wanted: dict[str, None] = field(default_factory=dict)


def read_plan(
    plan: Any, mesh: Mesh, shapes: Shapes, use_of: Callable[[str], Use] = lambda _: Use()
) -> Planned:
    """Return what a plan says; raise ValueError where it fits nothing.

    Parameters
    ----------
    plan : a mapping from patterns, a model of transformers that has a plan of its own, or "auto".
    shapes : of parameters.
    use_of : what the program does with a parameter.
    """
    if _is_model(plan):
        plan = _plan_of_model(plan)
    if isinstance(plan, str) and plan == AUTO:
        plan = {"*": AUTO}
    arguments.instance(
        "parallelize: plan",
        plan,
        Mapping,
        "a mapping from patterns of names, a model with one, or 'auto'",
    )
    planned = Planned()
    by: dict[str, str] = {}
    for pattern, given in plan.items():
        arguments.text("parallelize: plan, a pattern", pattern, "a name, or a pattern of names")
        if isinstance(given, str) and given == AUTO:
            found = [name for name in shapes if matches(pattern, name)]
            if not found and pattern != "*":
                raise no_name("plan", pattern, shapes)
            planned.wanted.update(dict.fromkeys(found))
            continue
        by_axis = _by_axis(f"parallelize: plan, of {pattern!r}", given, mesh)
        names = _names(pattern, by_axis, shapes)
        if not names:
            raise no_name("plan", pattern, shapes)
        if all(isinstance(one, Style) and one.hook for one in by_axis.values()):
            continue
        for name in names:
            placements = _placements(pattern, by_axis, mesh, name, shapes[name], use_of(name))
            if planned.placements.setdefault(name, placements) != placements:
                raise ValueError(
                    f"parallelize: plan: {by[name]!r} and {pattern!r} are both patterns of "
                    f"{name!r}, and differ; leave one of them out"
                )
            by[name] = pattern
            planned.styles[name] = {
                axis: one for axis, one in by_axis.items() if isinstance(one, Style)
            }
    for name in planned.placements:
        planned.wanted.pop(name, None)
    return planned


# ---- models of transformers ------------------------------------------------------------------


def _is_model(plan: Any) -> bool:
    return not isinstance(plan, (Mapping, str)) and all(
        hasattr(plan, one) for one in ("tp_plan", "named_modules", "named_parameters")
    )


def _plan_of_model(model: Any) -> dict[str, Any]:
    """Return a model's own plan, without what is for layers that this one does not have."""
    kind = type(model).__name__
    if not model.tp_plan:
        raise ValueError(
            f"parallelize: plan: {kind} has no plan of its own; write one, or 'auto' finds one"
        )
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {
        pattern: style
        for pattern, style in model.tp_plan.items()
        if any(matches(pattern, f"{name}.weight") for name in names)
    }


# ---- patterns --------------------------------------------------------------------------------


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a parameter, by its name or that of its module."""
    wanted, parts = pattern.split("."), name.split(".")
    return any(_ends(one, wanted) for one in (parts, parts[:-1]))


def _ends(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _names(pattern: str, by_axis: Mapping[str, Placement | Style], shapes: Shapes) -> list[str]:
    """Return which parameters a pattern means; a hook may be one of any module around them."""
    found = [name for name in shapes if matches(pattern, name)]
    if found or not any(isinstance(one, Style) and one.hook for one in by_axis.values()):
        return found
    wanted = pattern.split(".")
    if any(isinstance(one, Style) and one.weightless for one in by_axis.values()):
        wanted.pop()
    return [name for name in shapes if any(_ends(one, wanted) for one in modules_of(name))]


def modules_of(name: str) -> Iterable[list[str]]:
    """Return the modules around a parameter, by the parts of their names, the outermost first."""
    parts = name.split(".")
    return (parts[:end] for end in range(1, len(parts)))


def no_name(argument: str, pattern: str, shapes: Shapes) -> ValueError:
    """Return the error for a pattern that means nothing, with what it may have meant."""
    near = _near(pattern, shapes)
    return ValueError(f"parallelize: {argument}: {pattern!r} is the name of no parameter; {near}")


def _near(pattern: str, shapes: Shapes) -> str:
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


# ---- what is said of them --------------------------------------------------------------------


def _by_axis(where: str, given: Any, mesh: Mesh) -> dict[str, Any]:
    """Return styles and placements by axes of the mesh."""
    axes = [axis for axis in mesh.axes if axis != PIPELINE]
    if isinstance(given, Mapping):
        unknown = [axis for axis in given if axis not in mesh.axes]
        if unknown:
            known = ", ".join(map(repr, mesh.axes))
            raise ValueError(f"{where}: {unknown[0]!r} is no axis of the mesh, which has {known}")
        by_axis = dict(given)
        if PIPELINE in by_axis:
            raise ValueError(
                f"{where}: nothing is divided along {PIPELINE!r}, whose ranks have different "
                "layers; say with which these begin: stages=[...]"
            )
    elif len(axes) == 1:
        by_axis = dict.fromkeys(axes, given)
    elif not axes:
        raise ValueError(
            f"{where}: {mesh} has no axis along which weights are divided; leave it out"
        )
    else:
        raise ValueError(
            f"{where}: {arguments.show(given)} is along which axis of {mesh}? Say it by the name "
            "of the axis"
        )
    return {axis: style_of(where, one) or one for axis, one in by_axis.items()}


def _placements(
    pattern: str,
    by_axis: Mapping[str, Any],
    mesh: Mesh,
    name: str,
    shape: Sequence[Any],
    use: Use,
) -> Placements:
    where = f"parallelize: plan, of {pattern!r}"

    def placement(given: Any) -> Placement:
        if isinstance(given, Style):
            return given.cuts(where, name, shape, use)
        try:
            found = placement_of_torch(given, len(shape)) or placement_of(where, given)
        except (TypeError, ValueError):
            raise unknown_style(where, given) from None
        if isinstance(found, Partial):
            raise ValueError(f"{where}: a parameter is no part of a reduction: {given}")
        return found

    placements = tuple(placement(by_axis.get(axis, Replica())) for axis in mesh.axes)
    cut = [one.axis for one in placements if isinstance(one, Shard)]
    for axis in cut:
        if axis >= len(shape):
            shown = ", ".join(map(str, shape))
            raise ValueError(f"{where}: S[{axis}]: there is no axis {axis} in {name!r}, ({shown})")
        if cut.count(axis) > 1:
            raise ValueError(f"{where}: axis {axis} of {name!r} is divided twice, on {mesh}")
    return placements
