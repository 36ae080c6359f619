# SPDX-License-Identifier: Apache-2.0
"""Reading of plans, which map patterns of parameter names to styles or placements.

    {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}

The style "auto", for a pattern or for the whole plan, leaves the choice to automatic sharding.

A pattern is a name, or the end of one after a dot. The last component may be missing, so that the
name of a module stands for its weight and bias. `*` stands for anything between two dots.
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
from tvm_ipc.spmd.weight_placements_of_styles import (
    Style,
    Use,
    placement_of_torch,
    style_of,
    transformers_plan,
    unknown_style,
)

#: The plan or style that requests automatic sharding.
AUTO: Final = "auto"
#: The axis of a mesh along which ranks have different layers.
PIPELINE: Final = "pp"
#: Extents of parameters by their names.
Shapes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Planned:
    """A plan for the parameters of a model.

    Attributes
    ----------
    placements : the placements of parameters.
    styles : the styles of parameters, by axis of the mesh.
    automatic : parameters with the style "auto" that no other pattern matches, in order.
    """

    placements: dict[str, Placements] = field(default_factory=dict)
    styles: dict[str, dict[str, Style]] = field(default_factory=dict)
    automatic: dict[str, None] = field(default_factory=dict)


def read_plan(
    plan: Any, mesh: Mesh, shapes: Shapes, use_of: Callable[[str], Use] = lambda _: Use(unused=True)
) -> Planned:
    """Return a plan for the parameters of a model; raise ValueError if it does not fit them.

    Parameters
    ----------
    plan : a mapping from patterns, a transformers model that has a plan of its own, or "auto".
    mesh : the mesh of the ranks.
    shapes : the shapes of the parameters.
    use_of : returns how the program uses a parameter. Without it, no parameter is used.
    """
    if _is_model(plan):
        plan = transformers_plan(
            _plan_of_model(plan),
            lambda pattern: (len(shapes[name]) for name in shapes if matches(pattern, name)),
        )
    if isinstance(plan, str) and plan == AUTO:
        plan = {"*": AUTO}
    arguments.instance(
        "parallelize: plan",
        plan,
        Mapping,
        "a mapping from patterns of names, a model with one, or 'auto'",
    )
    planned = Planned()
    pattern_of: dict[str, str] = {}
    for pattern, entry in plan.items():
        arguments.text("parallelize: plan, a pattern", pattern, "a name, or a pattern of names")
        if isinstance(entry, str) and entry == AUTO:
            matched = [name for name in shapes if matches(pattern, name)]
            if not matched and pattern != "*":
                raise unmatched_pattern("plan", pattern, shapes)
            planned.automatic.update(dict.fromkeys(matched))
            continue
        by_axis = _by_axis(f"parallelize: plan, of {pattern!r}", entry, mesh)
        names = _names(pattern, by_axis, shapes)
        if not names:
            raise unmatched_pattern("plan", pattern, shapes)
        if all(isinstance(style, Style) and style.hook for style in by_axis.values()):
            continue
        for name in names:
            placements = _placements(pattern, by_axis, mesh, name, shapes[name], use_of(name))
            if planned.placements.setdefault(name, placements) != placements:
                raise ValueError(
                    f"parallelize: plan: {pattern_of[name]!r} and {pattern!r} both match "
                    f"{name!r}, with different placements; remove one of them"
                )
            pattern_of[name] = pattern
            planned.styles[name] = {
                axis: style for axis, style in by_axis.items() if isinstance(style, Style)
            }
    for name in planned.placements:
        planned.automatic.pop(name, None)
    return planned


# ---- plans of transformers models ------------------------------------------------------------


def _is_model(plan: Any) -> bool:
    return not isinstance(plan, (Mapping, str)) and all(
        hasattr(plan, name) for name in ("tp_plan", "named_modules", "named_parameters")
    )


def _plan_of_model(model: Any) -> dict[str, Any]:
    """Return a model's own plan, without entries for layers that the model does not have."""
    kind = type(model).__name__
    if not model.tp_plan:
        raise ValueError(
            f"parallelize: plan: {kind} has no plan of its own; write one, or pass 'auto'"
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
    """Return whether a pattern matches the name of a parameter or of its module."""
    components = name.split(".")
    pattern_components = pattern.split(".")
    return any(_ends_with(path, pattern_components) for path in (components, components[:-1]))


def _ends_with(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(pattern) <= len(path) and all(map(fnmatchcase, path[-len(pattern) :], pattern))


def _names(pattern: str, by_axis: Mapping[str, Placement | Style], shapes: Shapes) -> list[str]:
    """Return the parameters that a pattern matches; a hook also matches modules around them."""
    matched = [name for name in shapes if matches(pattern, name)]
    styles = [style for style in by_axis.values() if isinstance(style, Style)]
    if matched or not any(style.hook for style in styles):
        return matched
    components = pattern.split(".")
    if any(style.weightless for style in styles):
        components.pop()
    return [
        name
        for name in shapes
        if any(_ends_with(module, components) for module in modules_of(name))
    ]


def modules_of(name: str) -> Iterable[list[str]]:
    """Yield the components of the names of the modules around a parameter, the outermost first."""
    components = name.split(".")
    return (components[:end] for end in range(1, len(components)))


def unmatched_pattern(argument: str, pattern: str, shapes: Shapes) -> ValueError:
    """Return the error for a pattern that matches no parameter, with a list of similar names."""
    similar = _similar_names(pattern, shapes)
    return ValueError(f"parallelize: {argument}: {pattern!r} matches no parameter; {similar}")


def _similar_names(pattern: str, shapes: Shapes) -> str:
    length = pattern.count(".") + 1
    ends: dict[str, None] = {}
    for name in shapes:
        components = name.split(".")
        for path in (components, components[:-1]):
            end = ["*" if component.isdigit() else component for component in path[-length:]]
            ends[".".join(end)] = None
    similar = get_close_matches(pattern, [end for end in ends if end], n=3, cutoff=0.5)
    return arguments.similar(similar) if similar else arguments.listed("parameter", list(shapes))


# ---- styles and placements -------------------------------------------------------------------


def _by_axis(where: str, entry: Any, mesh: Mesh) -> dict[str, Any]:
    """Return the styles or placements of an entry, by axis of the mesh."""
    axes = [axis for axis in mesh.axes if axis != PIPELINE]
    if isinstance(entry, Mapping):
        unknown = [axis for axis in entry if axis not in mesh.axes]
        if unknown:
            axes_text = arguments.listed("axis", list(mesh.axes))
            raise ValueError(f"{where}: {unknown[0]!r} is no axis of the mesh; {axes_text}")
        by_axis = dict(entry)
        if PIPELINE in by_axis:
            raise ValueError(
                f"{where}: no weight is sharded along {PIPELINE!r}, whose ranks have different "
                "layers; specify the first weights of the stages with stages=[...]"
            )
    elif len(axes) == 1:
        by_axis = dict.fromkeys(axes, entry)
    elif not axes:
        raise ValueError(
            f"{where}: {mesh} has no axis along which weights are sharded; remove the entry"
        )
    else:
        raise ValueError(
            f"{where}: {arguments.quote(entry)} is ambiguous, since {mesh} has several axes; pass "
            f"a mapping from an axis, such as {{{axes[0]!r}: ...}}"
        )
    return {axis: style_of(where, value) or value for axis, value in by_axis.items()}


def _placements(
    pattern: str,
    by_axis: Mapping[str, Any],
    mesh: Mesh,
    name: str,
    shape: Sequence[Any],
    use: Use,
) -> Placements:
    where = f"parallelize: plan, of {pattern!r}"

    def placement(value: Any) -> Placement:
        if isinstance(value, Style):
            return value.placement(where, name, shape, use)
        try:
            converted = placement_of_torch(value, len(shape)) or placement_of(where, value)
        except (TypeError, ValueError):
            raise unknown_style(where, value) from None
        if isinstance(converted, Partial):
            raise ValueError(
                f"{where}: a parameter cannot be a partial result, {value}; pass a shard, or "
                "comm.Replica()"
            )
        return converted

    placements = tuple(placement(by_axis.get(axis, Replica())) for axis in mesh.axes)
    axes = [shard.axis for shard in placements if isinstance(shard, Shard)]
    for axis in axes:
        if axis >= len(shape):
            extents = ", ".join(map(str, shape))
            raise ValueError(
                f"{where}: S[{axis}]: {name!r} has no axis {axis}, since its shape is ({extents})"
            )
        if axes.count(axis) > 1:
            raise ValueError(f"{where}: axis {axis} of {name!r} is sharded twice, on {mesh}")
    return placements
