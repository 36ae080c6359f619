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

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from tvm_ipc.analysis.collective_calls import Collective
from tvm_ipc.analysis.ffi_arrays import as_list


@dataclass(eq=False)
class Region:
    """The bindings of a function body or of one branch, in order."""

    parent: Step | None  #: the if that has this branch, None for the function body
    body: Any  #: the sequence of bindings
    begin: int  #: the first event
    end: int = -1  #: the last event, `begin - 1` if there is none
    blocks: list[Any] = field(default_factory=list)  #: the binding blocks of the sequence
    #: Steps in which ranks may synchronize: collectives, calls of Relax functions, ifs.
    crossings: list[Step] = field(default_factory=list)
    #: The ifs around it, from outside in, and the branch of each.
    path: tuple[tuple[Step, int], ...] = ()

    @property
    def result(self) -> Any:
        """Return the value at the end."""
        return self.body.body if isinstance(self.body, relax.SeqExpr) else self.body

    def within(self, region: Region) -> bool:
        """Return whether this is a region or nested in it."""
        return self.path[: len(region.path)] == region.path

    def holds(self, point: int) -> bool:
        """Return whether an event is in this region or a nested one."""
        return self.begin <= point <= self.end


@dataclass(eq=False, slots=True)
class Step:
    """One binding. It caches fields of the IR, because access to the IR is slow."""

    binding: Any  #: None for the use of a result at the end of a region
    var: Any
    value: Any
    region: Region
    block: int  #: index of its binding block in the region
    entry: int  #: the event at which it begins
    index: int  #: the event at which its value exists; differs from `entry` only for an if
    branches: tuple[Region, ...] = ()
    collective: Collective | None = None  #: the collective that it calls, if any

    @property
    def in_dataflow(self) -> bool:
        """Return whether it is in a dataflow block."""
        return type(self.region.blocks[self.block]) is relax.DataflowBlock

    def shares_block(self, other: Step) -> bool:
        """Return whether another binding is in the same binding block."""
        return self.region is other.region and self.block == other.block


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
    program = Linear(name, function, Region(None, function.body, 0))
    _enter(program, program.body)
    return program


def _enter(program: Linear, region: Region) -> None:
    """Append the events of a region to a program."""
    events, body = program.points, region.body
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
                    branches.append(Region(step, inner, len(events), path=path))
                    _enter(program, branches[-1])
                step.branches = tuple(branches)
                step.index = len(events)
                events.append(step)
    region.end = len(events) - 1


def common_region(regions: Iterable[Region]) -> Region:
    """Return the innermost region that contains all of some regions, which are of one function."""
    common, *others = regions
    for region in others:
        while not region.within(common):
            assert common.parent is not None
            common = common.parent.region
    return common


def ancestor(step: Step, region: Region) -> Step:
    """Return the step of a region that is a step, or the if around it."""
    return step if step.region is region else step.region.path[len(region.path)][0]


def exclusive(a: Region, b: Region) -> bool:
    """Return whether at most one of two regions runs."""
    if a is b:
        return False
    depth = len(common_region((a, b)).path)
    return depth < len(a.path) and depth < len(b.path) and a.path[depth][0] is b.path[depth][0]
