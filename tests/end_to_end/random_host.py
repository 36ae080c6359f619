# SPDX-License-Identifier: Apache-2.0
"""Random programs that say themselves when they communicate, and what they give in NumPy.

Works, waits, views, shows, messages, and branches that all ranks take alike or each for itself.
Each program is right: what a work uses is left alone until its wait, what is shown until it is
hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, te

from tests.collective_results import results_of
from tests.end_to_end.host_programs import HostBuilder
from tvm_ipc.comm import Mesh

CHUNK = 16  #: elements of 4 bytes, so that views are aligned for kernels
CHUNKS = 4
LARGEST = 1 << 24
KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast", "permute", "all_to_all")

Array = np.ndarray[Any, Any]
#: Of each buffer, what each rank has.
State = dict[int, list[Array]]
#: What a step does where some ranks do it; `c` is what the caller's condition is.
Run = Callable[[State, list[int], bool], None]


@dataclass(frozen=True)
class Part:
    """Chunks of a buffer."""

    buffer: int
    first: int
    count: int

    def overlaps(self, other: Part) -> bool:
        same = self.buffer == other.buffer
        return (
            same
            and self.first < other.first + other.count
            and other.first < self.first + self.count
        )

    @property
    def slice(self) -> slice:
        return slice(self.first * CHUNK, (self.first + self.count) * CHUNK)


@dataclass(eq=False)
class Open:
    """A work, or what is shown."""

    var: Any
    reads: list[Part]
    writes: list[Part]
    team: int = -1  #: to which it is shown


@dataclass
class Scope:
    """What goes on in a body, and what can be used there."""

    open: list[Open] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


class HostProgram(HostBuilder):
    """A function `main` of two tensors and a condition, drawn from a seed."""

    def __init__(self, seed: int, world: int, steps: int) -> None:
        self.rng, self.seed, self.world = random.Random(seed), seed, world
        super().__init__()
        self.made_of: set[str] = set()
        self.vars: dict[int, Any] = {}
        self.bounds: dict[int, int] = {}
        self.runs: list[Run] = []
        self.scope = Scope()
        self.teams = self._teams()
        self.kernels = {
            (name, count): self._kernel(name, count, function)
            for count in range(1, CHUNKS + 1)
            for name, function in (("sub", lambda a, b: a - b), ("least", te_min))
        }
        ty = relax.TensorType([CHUNK * CHUNKS], "int32")
        x, y = (relax.Var(name, ty) for name in "xy")
        c = relax.Var("c", relax.TensorType([], "bool"))
        self.condition = c
        with self.builder.function("main", [x, y, c], pure=False):
            self.rank = self.packed("runtime.disco.worker_rank", ty=tvm.ir.PrimType("int64"))
            for number, var in enumerate((x, y)):
                self.vars[number], self.bounds[number] = var, 5
                self.scope.made.append(number)
            for _ in range(steps):
                self.step(self.scope)
            for one in [*self.scope.open]:
                self.finish(self.scope, one)
            self.results = self.scope.made[2:][-4:] or [0]
            result = relax.Tuple([self.vars[number] for number in self.results])
            self.builder.emit_func_output(self.builder.emit(result))
        self.module = self.builder.get()

    # ---- what it gives ------------------------------------------------------------------------

    def arguments(self, round_: int) -> list[list[Array]]:
        """What the ranks give for x and y."""
        drawn = np.random.default_rng([self.seed, round_])
        shape = (2, self.world, CHUNK * CHUNKS)
        return [list(one) for one in drawn.integers(-5, 6, shape).astype("int32")]

    def wanted(self, given: list[list[Array]], c: bool) -> list[list[Array]]:
        """What each rank gets, result by result."""
        state: State = {k: [one.copy() for one in arrays] for k, arrays in enumerate(given)}
        for run in self.runs:
            run(state, list(range(self.world)), c)
        return [state[number] for number in self.results]

    # ---- building blocks ----------------------------------------------------------------------

    def _teams(self) -> list[tuple[Any, list[list[int]]]]:
        """The world, and the divisions along the axes of a mesh, with what calls are given."""
        world = list(range(self.world))
        found: list[tuple[Any, list[list[int]]]] = [(relax.prim_value(0), [world])]
        ranks = self.rng.sample(world, self.world)
        for size in range(2, self.world):
            if self.world % size == 0:
                mesh = Mesh({"a": self.world // size, "b": size}, ranks)
                for axis in "ab":
                    teams = [[*team] for team in mesh.teams(axis)]
                    numbers = [len(teams[0]), *(rank for team in teams for rank in team)]
                    found.append((relax.ShapeExpr(numbers), teams))
        return found

    def _kernel(self, name: str, count: int, function: Any) -> relax.GlobalVar:
        a, b = (te.placeholder((count * CHUNK,), "int32") for _ in range(2))
        out = te.compute((count * CHUNK,), lambda i: function(a[i], b[i]))
        kernel = te.create_prim_func([a, b, out]).with_attr("global_symbol", f"{name}{count}")
        return self.builder.add_func(kernel, f"{name}{count}")

    def at(self, part: Part) -> Any:
        """The tensor of some chunks."""
        whole = self.vars[part.buffer]
        if part.count == CHUNKS:
            return whole
        shape, ty = [part.count * CHUNK], relax.TensorType([part.count * CHUNK], "int32")
        return self.packed("view", whole, 4 * CHUNK * part.first, relax.ShapeExpr(shape), ty=ty)

    def source(self, scope: Scope, count: int) -> Part:
        """Draw chunks that no work writes."""
        while True:
            part = Part(self.rng.choice(scope.made), self.rng.randint(0, CHUNKS - count), count)
            if not any(part.overlaps(other) for one in scope.open for other in one.writes):
                return part

    def target(
        self, scope: Scope, count: int, apart: list[Part], bound: int, of_all: bool = True
    ) -> Part:
        """Draw chunks that nobody uses, of a new buffer or another one but the parameters.

        Unless ranks `of_all` write them, the others have something there too.
        """
        for _ in range(6):
            numbers = scope.made[2:]
            if not numbers or self.rng.random() < 0.4:
                break
            part = Part(self.rng.choice(numbers), self.rng.randint(0, CHUNKS - count), count)
            used = [p for one in scope.open for p in (*one.reads, *one.writes)] + apart
            if not any(part.overlaps(other) for other in used):
                self.bounds[part.buffer] = max(bound, self.bounds[part.buffer])
                return part
        number = self.allocate(scope)
        self.bounds[number] = max(bound, 5)
        if count < CHUNKS or not of_all:  # the rest is of x
            whole, x = Part(number, 0, CHUNKS), Part(0, 0, CHUNKS)
            self.compute(self.runs, "least", x, x, whole)
        return Part(number, self.rng.randint(0, CHUNKS - count), count)

    def allocate(self, scope: Scope) -> int:
        number = len(self.vars)
        self.vars[number] = self.empty(CHUNK * CHUNKS, dtype="int32")
        scope.made.append(number)

        def run(state: State, ranks: list[int], c: bool) -> None:
            state.setdefault(number, [np.zeros(CHUNK * CHUNKS, "int32") for _ in range(self.world)])

        self.runs.append(run)
        return number

    def compute(self, runs: list[Run], name: str, a: Part, b: Part, out: Part) -> None:
        kernel = self.kernels[name, a.count]
        self.call(kernel, self.at(a), self.at(b), self.at(out))
        function = np.subtract if name == "sub" else np.minimum

        def run(state: State, ranks: list[int], c: bool) -> None:
            for rank in ranks:
                found = function(state[a.buffer][rank][a.slice], state[b.buffer][rank][b.slice])
                state[out.buffer][rank][out.slice] = found

        runs.append(run)

    # ---- steps --------------------------------------------------------------------------------

    def step(self, scope: Scope) -> None:
        draw = self.rng.random()
        shown = [one for one in scope.open if one.team >= 0]
        if draw < 0.2:
            self.kernel(scope)
        elif draw < 0.35:
            self.collective(scope, post=False)
        elif draw < 0.5:
            self.collective(scope, post=True)
        elif draw < 0.58 and scope.open:
            self.finish(scope, self.rng.choice(scope.open))
        elif draw < 0.72 and len(shown) < 6:
            self.expose(scope)
        elif draw < 0.9 and shown:
            self.peer_view(scope, self.rng.choice(shown))
        elif draw < 0.93 and scope is self.scope:
            self.branch(scope)
        elif scope is self.scope:
            self.branch_of_ranks(scope)

    def kernel(self, scope: Scope) -> None:
        count = self.rng.randint(1, CHUNKS)
        a, b = self.source(scope, count), self.source(scope, count)
        bound = self.bounds[a.buffer] + self.bounds[b.buffer]
        name = "sub" if bound < LARGEST else "least"
        out = self.target(scope, count, [a, b], bound if name == "sub" else LARGEST)
        self.compute(self.runs, name, a, b, out)

    def collective(self, scope: Scope, post: bool) -> None:
        made = self.draw_collective(scope)
        if made is None:
            return
        name, operands, send, recv, run = made
        if post:
            work = self.packed(
                "start", tvm.ir.StringImm(f"tvm_ipc.{name}"), *operands, ty=relax.AnyType()
            )
            scope.open.append(Open(work, [send], [recv]))
        else:
            self.packed(name, *operands)
        self.made_of.add(f"start of {name}" if post else name)
        self.runs.append(run)

    def draw_collective(self, scope: Scope) -> Any:
        rng = self.rng
        name = rng.choice(KINDS)
        given, teams = rng.choice(self.teams)
        n = len(teams[0])
        sends = n if name in ("reduce_scatter", "all_to_all") else rng.randint(1, CHUNKS)
        sends = 1 if name == "allgather" else sends
        receives = {"allgather": n, "reduce_scatter": 1}.get(name, sends)
        if max(sends, receives) > CHUNKS:
            return None
        send = self.source(scope, sends)
        bound = self.bounds[send.buffer]
        how = rng.choice(("sum", "max")) if bound * n < LARGEST else "max"
        kind = {"sum": 0, "max": 3}[how]
        recv = self.target(scope, receives, [send], bound * n if how == "sum" else bound)
        root, shift = rng.randrange(n), rng.randrange(n)
        sources = [(place + shift) % n for place in range(n)]
        numbers: list[Any] = {
            "allreduce": [kind, given, 3, 0],
            "allgather": [given, 0],
            "reduce_scatter": [kind, given, 0],
            "broadcast": [root, given, 0],
            "permute": [relax.ShapeExpr(sources), given, 0],
            "all_to_all": [relax.ShapeExpr([]), given, 0],
        }[name]

        def together(xs: list[Array]) -> Any:
            pairs = [(source, k) for k, source in enumerate(sources)]
            return results_of(name, xs, reduction=how, root=root, pairs=pairs)

        def run(state: State, ranks: list[int], c: bool) -> None:
            for team in teams:
                if team[0] not in ranks:
                    continue
                results = together([state[send.buffer][rank][send.slice].copy() for rank in team])
                for rank, result in zip(team, results, strict=True):
                    state[recv.buffer][rank][recv.slice] = result

        return name, [self.at(send), *numbers, self.at(recv)], send, recv, run

    def finish(self, scope: Scope, one: Open) -> None:
        """Wait for a work, or hide what is shown, and what else is shown to the same team."""
        if one.team < 0:
            self.packed("wait", one.var)
            scope.open.remove(one)
            self.made_of.add("wait")
            return
        group = [other for other in scope.open if other.team == one.team]
        hidden = [other for other in group if other is one or self.rng.random() < 0.6]
        self.packed("release", self.teams[one.team][0], *(other.var for other in hidden))
        for other in hidden:
            scope.open.remove(other)
        self.made_of.add("release")

    def expose(self, scope: Scope) -> None:
        count = self.rng.randint(1, CHUNKS)
        part = self.source(scope, count)
        for _ in range(4):
            if part.buffer > 1:
                break
            part = self.source(scope, count)
        if part.buffer < 2:
            return  # of the caller: shown is a copy
        team = self.rng.randrange(len(self.teams))
        shown = self.packed("expose", self.at(part), self.teams[team][0], ty=relax.AnyType())
        scope.open.append(Open(shown, [part], [], team))

    def peer_view(self, scope: Scope, one: Open) -> None:
        (part,) = one.reads
        teams = self.teams[one.team][1]
        shift = self.rng.randint(-1, len(teams[0]))
        own = self.source(scope, part.count)
        bound = self.bounds[part.buffer] + self.bounds[own.buffer]
        if bound >= LARGEST:
            return
        out = self.target(scope, part.count, [own, part], bound)
        shape, ty = [part.count * CHUNK], relax.TensorType([part.count * CHUNK], "int32")
        seen = self.packed("peer_view", one.var, shift, relax.ShapeExpr(shape), ty=ty)
        self.call(self.kernels["sub", part.count], seen, self.at(own), self.at(out))
        self.made_of.add("peer_view")

        def run(state: State, ranks: list[int], c: bool) -> None:
            found = {}
            for team in teams:
                for place, rank in enumerate(team):
                    theirs = state[part.buffer][team[(place + shift) % len(team)]][part.slice]
                    found[rank] = theirs - state[own.buffer][rank][own.slice]
            for rank in ranks:
                state[out.buffer][rank][out.slice] = found[rank]

        self.runs.append(run)

    # ---- branches -----------------------------------------------------------------------------

    def body(self, scope: Scope, fill: Callable[[Scope], None]) -> tuple[Any, list[Run]]:
        """A body of its own, in which works and shows end that begin there; and what it does."""
        outer, self.runs = self.runs, []
        inner = Scope([*scope.open], [*scope.made])
        self.builder._begin_binding_block()
        fill(inner)
        for one in [one for one in inner.open if one not in scope.open]:
            if one in inner.open:
                self.finish_inside(inner, one, scope)
        block = self.builder._end_block()
        runs, self.runs = self.runs, outer
        return relax.SeqExpr([block], self.vars[0]), runs

    def finish_inside(self, inner: Scope, one: Open, outer: Scope) -> None:
        """End what began inside, and nothing that began outside."""
        kept = [other for other in inner.open if other in outer.open]
        inner.open = [other for other in inner.open if other not in outer.open]
        self.finish(inner, one)
        inner.open = kept + inner.open

    def inside(self, scope: Scope, outer: Scope) -> None:
        draw = self.rng.random()
        if draw < 0.4:
            self.kernel(scope)
        elif draw < 0.6:
            self.collective(scope, post=False)
        elif draw < 0.8:
            self.collective(scope, post=True)
        else:
            self.expose(scope)

    def choose(self, condition: Any, then: Any, otherwise: Any) -> None:
        self.builder.emit(relax.If(condition, then, otherwise))

    def branch(self, scope: Scope) -> None:
        """Branches of the caller's condition, which do what they like."""
        steps = [self.rng.randint(0, 3) for _ in range(2)]

        def fill(count: int) -> Callable[[Scope], None]:
            return lambda inner: [self.inside(inner, scope) for _ in range(count)] and None

        (then, first), (otherwise, second) = (self.body(scope, fill(count)) for count in steps)
        self.choose(self.condition, then, otherwise)
        self.made_of.add("if of all")

        def run(state: State, ranks: list[int], c: bool) -> None:
            for one in first if c else second:
                one(state, ranks, c)

        self.runs.append(run)

    def branch_of_ranks(self, scope: Scope) -> None:
        """Branches of the rank's number."""
        if self.rng.random() < 0.4 and self.world > 1:
            self.message(scope)
            return
        given, teams = self.rng.choice(self.teams)
        some = [team for team in teams if self.rng.random() < 0.5]
        members = sorted(rank for team in some for rank in team)
        condition: Any = self.rank < 0
        for rank in members:
            condition = tvm.tirx.Or(condition, self.rank == rank)
        chosen = self.teams
        # The ranks of whole teams do what they like among themselves.
        self.teams = [(given, teams)]

        def fill(inner: Scope) -> None:
            for _ in range(self.rng.randint(0, 3)):
                self.inside(inner, scope)

        (then, first), (otherwise, second) = (self.body(scope, fill) for _ in range(2))
        self.teams = chosen
        self.choose(condition, then, otherwise)
        self.made_of.add("if of ranks")
        others = [rank for rank in range(self.world) if rank not in members]

        def run(state: State, ranks: list[int], c: bool) -> None:
            for part, runs in ((members, first), (others, second)):
                for one in runs:
                    one(state, part, c)

        self.runs.append(run)

    def message(self, scope: Scope) -> None:
        """One rank sends, another one receives."""
        count = self.rng.randint(1, CHUNKS)
        send = self.source(scope, count)
        recv = self.target(scope, count, [send], self.bounds[send.buffer], of_all=False)
        source, target = self.rng.sample(range(self.world), 2)

        def sends(inner: Scope) -> None:
            self.packed("runtime.disco.send_to_worker", self.at(send), target)

        def receives(inner: Scope) -> None:
            self.packed("runtime.disco.recv_from_worker", self.at(recv), source)

        def others(inner: Scope) -> None:
            inside, _ = self.body(inner, receives)
            nothing, _ = self.body(inner, lambda _: None)
            self.choose(self.rank == target, inside, nothing)

        (then, _), (otherwise, _) = self.body(scope, sends), self.body(scope, others)
        self.choose(self.rank == source, then, otherwise)
        self.made_of.add("message")

        def run(state: State, ranks: list[int], c: bool) -> None:
            sent = state[send.buffer][source][send.slice]
            state[recv.buffer][target][recv.slice] = sent

        self.runs.append(run)


def te_min(a: Any, b: Any) -> Any:
    return tvm.tirx.min(a, b)
