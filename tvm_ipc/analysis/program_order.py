# SPDX-License-Identifier: Apache-2.0
"""Represent a function as a sequence of events, with the branches of ifs as regions.

    x = f(a)            event 0
    if c:               event 1: the condition is read
        y = g(x)        event 2, region `then`
    else:
        y = h(x)        event 3, region `else`
    z = k(y)            event 5; event 4 is where the branches join

Only one of two sibling regions runs. Relax has no loops: events run in order, each at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from tvm_ipc.analysis.collective_calls import Collective
from tvm_ipc.analysis.ffi_arrays import as_list


@dataclass(eq=False)
class Region:
    """The bindings of a function body or of one branch, in order."""

    parent: Step | None  #: the if that has this branch, None for the function body
    begin: int  #: the first event
    end: int = -1  #: the last event, `begin - 1` if there is none
    blocks: list[Any] = field(default_factory=list)  #: the binding blocks of the function
    #: Steps in which ranks may synchronize: collectives, calls of Relax functions, ifs.
    crossings: list[Step] = field(default_factory=list)
    #: The ifs around it, from outside in, and the branch of each.
    path: tuple[tuple[Step, int], ...] = ()

    def within(self, region: Region) -> bool:
        """Return whether this is a region or nested in it."""
        return self.path[: len(region.path)] == region.path

    def holds(self, point: int) -> bool:
        """Return whether an event is in this region or a nested one."""
        return self.begin <= point <= self.end


@dataclass(eq=False, slots=True)
class Step:
    """One binding. It caches fields of the IR, because access to the IR is slow."""

    binding: relax.Binding
    var: Any
    value: Any
    region: Region
    block: int  #: index of its binding block in the region
    entry: int  #: the event at which it begins
    index: int  #: the event at which its value exists; differs from `entry` only for an if
    branches: tuple[Region, ...] = ()
    collective: Collective | None = None  #: the collective that it calls, if any


@dataclass(eq=False)
class Linear:
    """The events of one function.

    Steps refer to their region but not the other way round: reference cycles would live until the
    next garbage collection.
    """

    name: str
    function: relax.Function
    body: Region
    points: list[Step] = field(default_factory=list)  #: by event; an if has two
    steps: dict[Region, list[Step]] = field(default_factory=dict)  #: in order


def linearize(name: str, function: relax.Function) -> Linear:
    """Return the events of a function in normal form."""
    program = Linear(name, function, Region(None, 0))
    _enter(program, program.body, function.body)
    return program


def _enter(program: Linear, region: Region, body: relax.Expr) -> None:
    """Append the events of a body, which is the region's, to a program."""
    events = program.points
    steps = program.steps[region] = []
    region.blocks = as_list(body.blocks) if isinstance(body, relax.SeqExpr) else []
    for number, block in enumerate(region.blocks):
        for binding in as_list(block.bindings):
            event = len(events)
            value = binding.value
            step = Step(binding, binding.var, value, region, number, event, event)
            events.append(step)
            steps.append(step)
            if type(value) is relax.If:
                branches = []
                for branch, inner in enumerate((value.true_branch, value.false_branch)):
                    path = (*region.path, (step, branch))
                    branches.append(Region(step, len(events), path=path))
                    _enter(program, branches[-1], inner)
                step.branches = tuple(branches)
                step.index = len(events)
                events.append(step)
    region.end = len(events) - 1


def common_region(a: Region, b: Region) -> tuple[tuple[Step, int], ...]:
    """Return the path of the innermost region that contains both regions."""
    if a is b:
        return a.path
    length = 0
    for in_a, in_b in zip(a.path, b.path, strict=False):
        if in_a != in_b:
            break
        length += 1
    return a.path[:length]


def exclusive(a: Region, b: Region) -> bool:
    """Return whether at most one of two regions runs."""
    depth = len(common_region(a, b))
    return depth < len(a.path) and depth < len(b.path) and a.path[depth][0] is b.path[depth][0]
