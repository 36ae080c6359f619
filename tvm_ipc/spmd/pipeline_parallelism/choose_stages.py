# SPDX-License-Identifier: Apache-2.0
"""The choice of the layers of each pipeline stage.

    mesh = Mesh({"pp": 2, "tp": 2})          # two stages along "pp", with two ranks each

    parallelize(mod, plan, mesh, stages=["layers.16"])     # the second stage begins with this layer
    parallelize(mod, plan, mesh)                           # stages are balanced by predicted time

Weights whose names agree up to the first number, such as `layers.3`, are one layer; without a
number it is those of one module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.op_costs import Costs
from tvm_ipc.spmd.pipeline_split_point_analysis import OpOrder
from tvm_ipc.spmd.plan_parser import PIPELINE, matches, modules_of, unmatched_pattern

_NUMBER: Final = re.compile(r"(?:^|[._])\d+(?=[._]|$)")


@dataclass(frozen=True)
class Stages:
    """The begins and the predicted times of pipeline stages.

    Attributes
    ----------
    begins : for each function, the first position of each stage but the first.
    names : the layer, or the pattern, with which each stage but the first begins.
    seconds : the predicted seconds of each stage for one call of each function.
    """

    begins: list[list[int]]
    names: list[str]
    seconds: list[float]


def stages_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the ranks of each stage; a mesh without the axis "pp" has one stage."""
    if PIPELINE not in mesh.axes:
        return [mesh.ranks]
    return list(zip(*mesh.teams(PIPELINE), strict=True))


def check_stages(stages: object, mesh: Mesh) -> list[str] | None:
    """Return the patterns with which stages begin, or None if they are chosen automatically."""
    expected = "for each stage but the first a pattern of weights with which it begins, or None"
    if stages is None:
        return None
    patterns = list(arguments.texts("parallelize: stages", stages, expected))
    count = mesh.axes.get(PIPELINE, 1)
    if len(patterns) != count - 1:
        raise ValueError(
            f"parallelize: stages: {mesh} has {arguments.counted(count, 'stage')} along "
            f"{PIPELINE!r}, but {arguments.quote(patterns)} has "
            f"{arguments.counted(len(patterns), 'pattern')}; pass {expected}"
        )
    return patterns


def choose_stages(
    lines: Sequence[OpOrder], count: int, patterns: Sequence[str] | None, costs: Costs
) -> Stages:
    """Return the begins of the stages in each function.

    Parameters
    ----------
    lines : the operators of the functions that use weights.
    count : the number of stages.
    patterns : the weights with which each stage but the first begins; None balances the stages.
    costs : the predicted costs of operators, for the balance.
    """
    seconds = [line.seconds(costs) for line in lines]
    if patterns is None:
        names, firsts = _balanced(lines, count, seconds)
    else:
        names = list(patterns)
        firsts = [_first_positions(lines, pattern) for pattern in patterns]
    begins = [[line.begin(first[k]) for first in firsts] for k, line in enumerate(lines)]
    for line, of_line in zip(lines, begins, strict=True):
        for k, (begin, end) in enumerate(pairwise([0, *of_line, len(line.positions)])):
            if not any(line.weights_at[begin:end]):
                begins_with = f", which begins with {names[k - 1]!r}," if k else ""
                raise ValueError(
                    f"parallelize: stages: in function {line.name!r} stage {k}{begins_with} uses "
                    "no weight; name layers in the order in which the function uses them"
                )
    return Stages(begins, names, _sums(seconds, begins, count))


def _sums(
    seconds: Sequence[Sequence[float]], begins: Sequence[Sequence[int]], count: int
) -> list[float]:
    """Return the seconds of each segment, summed over all functions.

    Parameters
    ----------
    seconds : for each function, the seconds of each position.
    begins : for each function, the first position of each segment but the first.
    count : the number of segments.
    """
    sums = [0.0] * count
    for of_positions, of_segments in zip(seconds, begins, strict=True):
        for k, (begin, end) in enumerate(pairwise([0, *of_segments, len(of_positions)])):
            sums[k] += sum(of_positions[begin:end])
    return sums


def _first_positions(lines: Sequence[OpOrder], pattern: str) -> list[int]:
    """Return the first position in each function that uses a weight that a pattern matches."""
    weight_names = {name: () for line in lines for name in line.weights.values()}
    matched = [
        name for name in weight_names if matches(pattern, name) or _matches_module(pattern, name)
    ]
    if not matched:
        raise unmatched_pattern("stages", pattern, weight_names)
    positions = []
    for line in lines:
        first = line.first(matched)
        if first is None:
            raise ValueError(
                f"parallelize: stages: function {line.name!r} uses no weight of {pattern!r}; name "
                "layers that all functions have"
            )
        positions.append(first)
    return positions


def _matches_module(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a module around a parameter."""
    return any(matches(pattern, ".".join(module)) for module in modules_of(name))


# ---- balanced stages -------------------------------------------------------------------------


def layer_of(name: str) -> str:
    """Return the name of the layer that a weight belongs to."""
    number = _NUMBER.search(name)
    return name[: number.end()] if number else name.rpartition(".")[0] or name


def _balanced(
    lines: Sequence[OpOrder], count: int, seconds: Sequence[Sequence[float]]
) -> tuple[list[str], list[list[int]]]:
    """Return the layers with which stages begin, and their first positions in each function."""
    if not lines:
        raise ValueError(
            f"parallelize: mesh: no function uses weights, so none has stages; pass a mesh without "
            f"the axis {PIPELINE!r}"
        )
    of_lines = [_layers(line) for line in lines]
    order = max(map(list, of_lines), key=len)
    for line, layers in zip(lines, of_lines, strict=True):
        if list(layers) != order:
            raise TransformError(
                f"parallelize: function {line.name!r} has the layers {_abbreviate(list(layers))}, "
                f"and another function {_abbreviate(order)}; specify the stages with stages="
            )
    if len(order) < count:
        raise ValueError(
            f"parallelize: mesh: {count} stages along {PIPELINE!r}, and the program has "
            f"{arguments.counted(len(order), 'layer')}, {_abbreviate(order)}; each stage needs "
            f"a layer, so {PIPELINE!r} must be {len(order)} or less"
        )
    of_layers = [
        [line.begin(position) for position in list(layers.values())[1:]]
        for line, layers in zip(lines, of_lines, strict=True)
    ]
    first_layers = _balance(_sums(seconds, of_layers, len(order)), count)
    names = [order[k] for k in first_layers]
    return names, [[layers[name] for layers in of_lines] for name in names]


def _layers(line: OpOrder) -> dict[str, int]:
    """Return the layers in the order of their uses, with the first position of each."""
    positions: dict[str, int] = {}
    seen: set[str] = set()
    for position, used in enumerate(line.weights_at):
        new = [name for name in line.weights.values() if name in used and name not in seen]
        seen.update(new)
        if new and not any(layer_of(name) in positions for name in new):
            positions[layer_of(new[0])] = position
    return positions


def _balance(seconds: Sequence[float], count: int) -> list[int]:
    """Return the begins of the segments after the first that minimize the longest segment."""
    n = len(seconds)
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    # For segments of the first k elements: the longest segment, and the begin of the last one.
    best = [(total[k], 0) for k in range(n + 1)]
    rows = [best]
    for segments in range(2, count + 1):
        best = [
            min((max(best[j][0], total[k] - total[j]), j) for j in range(segments - 1, k))
            if k >= segments
            else (float("inf"), 0)
            for k in range(n + 1)
        ]
        rows.append(best)
    begins: list[int] = []
    end = n
    for row in rows[:0:-1]:
        end = row[end][1]
        begins.append(end)
    return begins[::-1]


def _abbreviate(layers: Sequence[str]) -> str:
    return ", ".join([*layers[:3], "...", layers[-1]] if len(layers) > 5 else layers)
