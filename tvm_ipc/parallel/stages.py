# SPDX-License-Identifier: Apache-2.0
"""Which layers the stages of a pipeline have.

mesh = Mesh({"pp": 2, "tp": 2})          # along "pp" two stages, each of two ranks

parallelize(mod, plan, mesh, stages=["layers.16"])     the second one begins with that layer
parallelize(mod, plan, mesh)                           with the one that makes them equally long

A layer is what is given weights of one name up to its first number, such as `layers.3`, or of one
module. Where the stages are to be found they are as even as layers can be, by predicted time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.errors import TransformError
from tvm_ipc.parallel.costs import Costs
from tvm_ipc.parallel.line import Line
from tvm_ipc.parallel.plan import PIPELINE, matches, modules_of, no_name

_NUMBER: Final = re.compile(r"(?:^|[._])\d+(?=[._]|$)")


@dataclass(frozen=True)
class Stages:
    """Where stages begin, and how long they are predicted to take.

    Attributes
    ----------
    begins : of each stage but the first, in each line: the place with which it begins.
    names : of the layers, or patterns, with which they begin.
    seconds : of each stage, for a call of each function.
    """

    begins: list[list[int]]
    names: list[str]
    seconds: list[float]


def stages_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the ranks of each stage; of a mesh without a pipeline there is one."""
    if PIPELINE not in mesh.axes:
        return [mesh.ranks]
    return list(zip(*mesh.teams(PIPELINE), strict=True))


def check_stages(given: object, mesh: Mesh) -> list[str] | None:
    """Return the patterns that stages begin with, None if these are to be found."""
    wanted = "for each stage but the first a pattern of weights with which it begins, or None"
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise arguments.wrong_type("parallelize: stages", wanted, given)
    patterns = list(given)
    if not all(isinstance(one, str) for one in patterns):
        raise arguments.wrong_type("parallelize: stages", wanted, given)
    count = mesh.axes.get(PIPELINE, 1)
    if len(patterns) != count - 1:
        raise ValueError(
            f"parallelize: stages: {wanted}; {mesh} has {count} along {PIPELINE!r}, and "
            f"{arguments.show(patterns)} begins {len(patterns)}"
        )
    return patterns


def find_stages(
    lines: Sequence[Line], count: int, patterns: Sequence[str] | None, costs: Costs
) -> Stages:
    """Return where stages begin.

    Parameters
    ----------
    lines : of the functions that are given weights.
    count : of the stages.
    patterns : with which all but the first one begin, None if that is to be found.
    costs : by which they are to be even.
    """
    seconds = [line.seconds(costs) for line in lines]
    if patterns is None:
        names, firsts = _even(lines, count, seconds)
    else:
        names, firsts = list(patterns), [_first(lines, one) for one in patterns]
    begins = [
        [line.begin(at) for at in of]
        for line, of in zip(lines, _by_line(firsts, lines), strict=True)
    ]
    for line, of in zip(lines, begins, strict=True):
        for k, (begin, end) in enumerate(pairwise([0, *of, len(line.places)])):
            if not any(line.given[begin:end]):
                after = f", which begins with {names[k - 1]!r}," if k else ""
                raise ValueError(
                    f"parallelize: stages: of function {line.name!r} stage {k}{after} is given no "
                    "weight; name layers in the order in which the function uses them"
                )
    return Stages(begins, names, _sums(seconds, begins, count))


def _sums(
    seconds: Sequence[Sequence[float]], begins: Sequence[Sequence[int]], count: int
) -> list[float]:
    """Return how long parts of all lines take together, by where parts but the first one begin."""
    found = [0.0] * count
    for each, of in zip(seconds, begins, strict=True):
        for k, (begin, end) in enumerate(pairwise([0, *of, len(each)])):
            found[k] += sum(each[begin:end])
    return found


def _by_line(firsts: Sequence[Sequence[int]], lines: Sequence[Line]) -> list[list[int]]:
    return [[first[k] for first in firsts] for k in range(len(lines))]


def _first(lines: Sequence[Line], pattern: str) -> list[int]:
    """Return the first place in each line that is given a weight of a pattern."""
    known = {name: () for line in lines for name in line.weights.values()}
    meant = [name for name in known if matches(pattern, name) or _within(pattern, name)]
    if not meant:
        raise no_name("stages", pattern, known)
    found = []
    for line in lines:
        first = line.first(meant)
        if first is None:
            raise ValueError(
                f"parallelize: stages: function {line.name!r} uses no weight of {pattern!r}; name "
                "layers that all functions have"
            )
        found.append(first)
    return found


def _within(pattern: str, name: str) -> bool:
    """Whether a pattern means a module around a parameter."""
    return any(matches(pattern, ".".join(module)) for module in modules_of(name))


# ---- even stages -----------------------------------------------------------------------------


def layer_of(name: str) -> str:
    """Return the layer that a weight is of."""
    number = _NUMBER.search(name)
    return name[: number.end()] if number else name.rpartition(".")[0] or name


def _even(
    lines: Sequence[Line], count: int, seconds: Sequence[Sequence[float]]
) -> tuple[list[str], list[list[int]]]:
    """Return the layers with which stages begin, and their first places in each line."""
    if not lines:
        raise ValueError("parallelize: mesh: no function is given weights, so it has no stages")
    of_lines = [_layers(line) for line in lines]
    order = max(map(list, of_lines), key=len)
    for line, layers in zip(lines, of_lines, strict=True):
        if list(layers) != order:
            raise TransformError(
                f"parallelize: function {line.name!r} has the layers {_shown(list(layers))}, and "
                f"another one {_shown(order)}; say where stages begin, with stages="
            )
    if len(order) < count:
        raise ValueError(
            f"parallelize: mesh: {count} stages along {PIPELINE!r}, and the program has "
            f"{len(order)} layer{'s' * (len(order) != 1)}, {_shown(order)}; a stage has one at "
            f"least, so let {PIPELINE!r} be {len(order)} or less"
        )
    of_layers = [
        [line.begin(at) for at in list(layers.values())[1:]]
        for line, layers in zip(lines, of_lines, strict=True)
    ]
    begins = _shortest(_sums(seconds, of_layers, len(order)), count)
    return [order[k] for k in begins], [[of[order[k]] for of in of_lines] for k in begins]


def _layers(line: Line) -> dict[str, int]:
    """Return layers in the order of a line, and the first place of each."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    for place, given in enumerate(line.given):
        fresh = [name for name in line.weights.values() if name in given and name not in seen]
        seen.update(fresh)
        if fresh and not any(layer_of(one) in found for one in fresh):
            found[layer_of(fresh[0])] = place
    return found


def _shortest(seconds: Sequence[float], count: int) -> list[int]:
    """Return where parts of a row begin, but the first one, so that the longest is short."""
    n = len(seconds)
    total = [0.0]
    for one in seconds:
        total.append(total[-1] + one)
    #: For so many parts of the first k: the longest one, and where the last one begins.
    best = [(total[k], 0) for k in range(n + 1)]
    rows = [best]
    for parts in range(2, count + 1):
        best = [
            min((max(best[j][0], total[k] - total[j]), j) for j in range(parts - 1, k))
            if k >= parts
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


def _shown(layers: Sequence[str]) -> str:
    some = [*layers[:3], "...", layers[-1]] if len(layers) > 5 else layers
    return ", ".join(some)
