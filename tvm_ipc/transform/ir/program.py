# SPDX-License-Identifier: Apache-2.0
"""A function as a sequence of events, with its if branches as regions of them.

    x = f(a)            event 0
    if c:               event 1: the condition is read
        y = g(x)        event 2, region `then`
    else:
        y = h(x)        event 3, region `else`
    z = k(y)            event 5; event 4 is where the branches meet

Only one of two sibling regions runs. Relax has no loops: events run in order, each at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from tvm_ipc.transform.ir.collectives import Collective


@dataclass(eq=False)
class Region:
    """The bindings of a function body or of one branch, in order."""

    parent: Step | None  #: the if whose branch it is
    begin: int  #: the first event
    end: int = -1  #: the last event, `begin - 1` where there is none
    blocks: list[Any] = field(default_factory=list)  #: of bindings, as the function has them
    #: Those of them in which ranks may meet: collectives, calls of Relax functions, ifs
    crossings: list[Step] = field(default_factory=list)
    #: The ifs around it, from outside in, and which branch of each
    path: tuple[tuple[Step, int], ...] = ()

    def within(self, other: Region) -> bool:
        """Whether this is `other` or a part of it."""
        return self.path[: len(other.path)] == other.path

    def holds(self, event: int) -> bool:
        """Whether an event is in it, or in a branch in it."""
        return self.begin <= event <= self.end


@dataclass(eq=False, slots=True)
class Step:
    """One binding. What it holds of the IR is here, since every look into the IR takes its time."""

    binding: relax.Binding
    var: Any
    value: Any
    region: Region
    block: int  #: which binding block of its region
    entry: int  #: the event at which it begins
    index: int  #: the event at which its value is there; another one only for an if
    branches: tuple[Region, ...] = ()
    collective: Collective | None = None  #: what it calls, if it is one


@dataclass(eq=False)
class Program:
    """The events of one function.

    Steps know their region, and not the other way round: what refers to each other lives until
    Python looks for garbage, which takes its time.
    """

    name: str
    function: relax.Function
    body: Region
    events: list[Step] = field(default_factory=list)  #: by event; an if is there twice
    steps: dict[Region, list[Step]] = field(default_factory=dict)  #: in order


def linearise(name: str, function: relax.Function) -> Program:
    """Return the events of a function whose expressions are in normal form."""
    program = Program(name, function, Region(None, 0))
    _enter(program, program.body, function.body)
    return program


def _enter(program: Program, region: Region, body: relax.Expr) -> None:
    events = program.events
    steps = program.steps[region] = []
    region.blocks = body.blocks[:] if isinstance(body, relax.SeqExpr) else []
    for number, block in enumerate(region.blocks):
        for binding in block.bindings[:]:  # a slice is made faster than an iteration
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


def common_region(one: Region, other: Region) -> tuple[tuple[Step, int], ...]:
    """Return the path of the innermost region that both lie in."""
    if one is other:
        return one.path
    length = 0
    for a, b in zip(one.path, other.path, strict=False):
        if a != b:
            break
        length += 1
    return one.path[:length]


def exclusive(one: Region, other: Region) -> bool:
    """Whether at most one of the two runs."""
    depth = len(common_region(one, other))
    return (
        depth < len(one.path)
        and depth < len(other.path)
        and one.path[depth][0] is other.path[depth][0]
    )
