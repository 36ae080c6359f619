# SPDX-License-Identifier: Apache-2.0
"""What a planned program does on every rank, with works, shows, messages and branches.

It shares nothing with the passes nor with their checker but the contract. Each rank is two threads,
its program and what does its works, and each thread has a clock of what it knows to be done. Two
accesses to the same bytes, one of which writes, are wrong if neither knows of the other; and so are
ranks that wait for each other, or meet in different collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_ipc.packed_functions import IPC_MEMORY, CollectiveFlag, Function, Sync, find


@dataclass(frozen=True)
class Where:
    """Bytes of a rank."""

    rank: int
    storage: Any
    begin: int
    end: int
    shared: bool = False  #: peers read it where it lies
    dtype: str = ""
    #: What was allocated there: of two in the same bytes the contents of the first one are lost.
    owner: Any = None

    def overlaps(self, other: Where) -> bool:
        return (
            (self.rank, self.storage) == (other.rank, other.storage)
            and self.begin < other.end
            and other.begin < self.end
        )


@dataclass(eq=False)
class Thread:
    """The program of a rank, or what does its works."""

    number: int
    rank: int
    clock: list[int]
    steps: list[Any] = field(default_factory=list)
    at: int = 0
    entered: bool = False

    def learn(self, clock: list[int]) -> None:
        self.clock = np.maximum(self.clock, clock).tolist()


@dataclass(eq=False)
class Call:
    """A step, with what it is given."""

    name: str
    function: Function | None
    args: list[Any]
    result: Any = None


@dataclass(eq=False)
class Work:
    """What was posted."""

    call: Call
    clock: list[int]
    done: list[int] | None = None


@dataclass(eq=False)
class ExposedTensor:
    """What a rank shows."""

    where: Where
    team: tuple[Any, tuple[int, ...]]
    number: int
    clock: list[int]
    hidden: bool = False


class WrongError(Exception):
    """What is wrong."""


class Schedule:
    """A function `main` on all ranks, where conditions of the caller are given."""

    def __init__(
        self,
        mod: tvm.IRModule,
        world: int,
        rows: int | Mapping[str, int],
        decide: Callable[[Any, int], bool],
    ) -> None:
        self.mod, self.world, self.rows, self.decide = mod, world, rows, decide
        size = 2 * world
        self.threads = [Thread(k, k % world, [0] * size) for k in range(size)]
        self.accesses: defaultdict[Any, list[tuple[Where, bool, int, int, str]]] = defaultdict(list)
        self.meetings: defaultdict[Any, dict[int, list[Any]]] = defaultdict(dict)
        self.counts: defaultdict[Any, int] = defaultdict(int)
        self.passed: set[Any] = set()
        self.shows: defaultdict[Any, list[ExposedTensor]] = defaultdict(list)
        self.messages: defaultdict[Any, list[list[int]]] = defaultdict(list)
        self.taken: defaultdict[Any, int] = defaultdict(int)
        self.stored: list[dict[Any, int]] = [{} for _ in range(world)]
        self.made: defaultdict[Any, int] = defaultdict(int)
        self.owners: defaultdict[Any, list[Where]] = defaultdict(list)

    # ---- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Raise what is wrong."""
        programs = [self.program(thread) for thread in self.threads[: self.world]]
        waiting: list[Any] = [None] * (2 * self.world)
        workers = [self.worker(thread) for thread in self.threads[self.world :]]
        running = [*programs, *workers]
        ended: set[int] = set()
        moved = True
        while moved:
            moved = False
            for k, generator in enumerate(running):
                while k not in ended:
                    ready = waiting[k]
                    if ready is not None and not ready():
                        break
                    waiting[k] = None
                    moved = True
                    try:
                        waiting[k] = next(generator)
                    except StopIteration:
                        ended.add(k)
                        break
        for k in range(self.world):
            if k not in ended:
                raise WrongError(f"rank {k} waits for ever")

    def tick(self, thread: Thread) -> None:
        thread.clock[thread.number] += 1

    def access(self, thread: Thread, where: Where | None, writes: bool, what: str) -> None:
        """Read or write; raise if somebody else does so at the same time."""
        if where is None or where.begin >= where.end:
            return
        key = (where.rank, where.storage)
        if writes:
            self.owners[key].append(where)
        elif where.rank == thread.rank and where.owner is not None:
            self.check_contents(where, self.owners[key], what)
        for other, other_writes, number, time, text in self.accesses[key]:
            knows = number == thread.number or thread.clock[number] >= time
            if (writes or other_writes) and not knows and other.overlaps(where):
                raise WrongError(f"{what} of rank {thread.rank} and {text}: {where}")
        time = thread.clock[thread.number] + 1
        self.accesses[key].append((where, writes, thread.number, time, what))

    def check_contents(self, where: Where, written: list[Where], what: str) -> None:
        """Raise if something else was written where a tensor is, after the tensor was."""
        mine = [k for k, one in enumerate(written) if one.owner == where.owner]
        for one in written[mine[-1] :] if mine else ():
            if one.owner not in (None, where.owner) and one.overlaps(where):
                raise WrongError(f"{what} of rank {where.rank} reads what was overwritten")

    def program(self, thread: Thread) -> Iterator[Any]:
        """Run the program of a rank; yield what tells whether it can go on."""
        rank = thread.rank
        env: dict[Any, Any] = {}
        function = self.mod["main"]
        for parameter in function.params:
            env[parameter] = self.parameter(parameter, rank)
        result = yield from self.body(thread, function.body, env)
        for where in flat(result):
            if isinstance(where, Where):
                self.access(thread, where, False, "the caller's read of the result")
        # The caller goes on with its arguments; all else is memory for others.
        kept = {where.storage for where in flat(result) if isinstance(where, Where)}
        for storage, end in self.stored[rank].items():
            if storage not in kept:
                self.access(thread, Where(rank, storage, 0, end), True, "the end")
        for parameter in function.params:
            self.access(thread, env[parameter], True, "the caller's write of an argument")
        self.tick(thread)
        if any(
            not one.hidden
            for team in self.shows
            for one in self.shows[team]
            if one.where.rank == rank
        ):
            raise WrongError(f"rank {rank} does not hide what it shows")

    def parameter(self, parameter: Any, rank: int) -> Where:
        ty = parameter.ty
        size = allocated_bytes(relax.ShapeExpr(ty.shape.values), ty.dtype, self.rows)
        return Where(rank, parameter.name, 0, size, False, name_of(ty.dtype), parameter)

    def body(self, thread: Thread, body: Any, env: dict[Any, Any]) -> Any:
        if not isinstance(body, relax.SeqExpr):
            return self.value(body, env)
        for block in body.blocks:
            for binding in block.bindings:
                value = binding.value
                if isinstance(value, relax.If):
                    holds = self.holds(value.cond, env, thread.rank)
                    branch = value.true_branch if holds else value.false_branch
                    env[binding.var] = yield from self.body(thread, branch, env)
                elif isinstance(value, relax.Call):
                    env[binding.var] = yield from self.call(thread, binding.var, value, env)
                else:
                    env[binding.var] = self.value(value, env)
                self.tick(thread)
        return self.value(body.body, env)

    def value(self, expr: Any, env: dict[Any, Any]) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(one, env) for one in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value, env)[expr.index]
        if isinstance(expr, tvm.ir.Var) and expr in env:
            return env[expr]
        return expr

    def holds(self, condition: Any, env: dict[Any, Any], rank: int) -> bool:
        value = self.value(condition, env)
        if isinstance(value, Where):
            return self.decide((value.storage, value.begin), rank)
        numbers = {var: one for var, one in env.items() if isinstance(one, int)}
        analyzer = tvm.sym.Analyzer()

        def bind(var: Any) -> None:
            analyzer.bind(var, tirx.IntImm("int64", numbers[var]))

        tvm_ffi.structural_walk(condition, [(tvm.ir.Var, bind)])
        return bool(analyzer.simplify(condition))

    # ---- calls --------------------------------------------------------------------------------

    def call(self, thread: Thread, var: Any, call: relax.Call, env: dict[Any, Any]) -> Any:
        rank = thread.rank
        made = self.allocated(thread, var, call, env)
        if made is not None:
            return made
        args = [self.value(one, env) for one in call.args]
        if isinstance(call.op, tvm.ir.Op):
            return args[0] if call.op.name == "relax.reshape" else None
        callee = self.mod[call.op] if isinstance(call.op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function):
            inner = dict(zip(callee.params, args, strict=True))
            return (yield from self.body(thread, callee.body, inner))
        if callee is not None:
            *reads, write = args
            for one in reads:
                self.access(
                    thread, one if isinstance(one, Where) else None, False, call.op.name_hint
                )
            self.access(thread, write, True, call.op.name_hint)
            return None
        name = str(call.op.global_symbol)
        function = find(name)
        assert function is not None, name
        short = name.rpartition(".")[2]
        if short == "worker_rank":
            return rank
        if short in ("view", "own_slice"):
            return self.view(short, args, call, rank)
        if short == "start":
            inner = Call(str(call.args[0].value), find(str(call.args[0].value)), args[1:])
            self.tick(thread)
            work = Work(inner, list(thread.clock))
            self.threads[self.world + rank].steps.append(work)
            return work
        if short == "wait":
            (work,) = args
            yield lambda: work.done is not None
            thread.learn(work.done)
            return None
        if short == "expose":
            return self.expose(thread, args)
        if short == "peer_view":
            return (yield from self.peer_view(thread, args))
        if short == "release":
            yield from self.meet(thread, "release", function, args, works=False)
            for one in args[1:]:
                one.hidden = True
            return None
        if function.sync is Sync.P2P:
            yield from self.message(thread, short, args)
            return None
        yield from self.collective(thread, Call(name, function, args), works=False)
        return None

    def allocated(self, thread: Thread, var: Any, call: relax.Call, env: dict[Any, Any]) -> Any:
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
        rank = thread.rank
        made = (var, self.made[rank, var])  # a function may be called more than once
        self.made[rank, var] += 1
        if name == "relax.memory.alloc_storage":
            size = number_of(call.args[0].values[0], self.rows)
            self.stored[rank][made] = size
            return Where(rank, made, 0, size, str(call.args[2].value) == IPC_MEMORY)
        if name == "relax.builtin.alloc_tensor":
            size = allocated_bytes(call.args[0], call.args[1], self.rows)
            self.stored[rank][made] = size
            shared = str(call.args[3].value) == IPC_MEMORY
            return Where(rank, made, 0, size, shared, name_of(call.args[1]), made)
        if name == "relax.memory.alloc_tensor":
            storage = env[call.args[0]]
            begin = number_of(call.args[1], self.rows)
            end = begin + allocated_bytes(call.args[2], call.args[3], self.rows)
            if end > self.stored[rank].get(storage.storage, end):
                raise WrongError(f"{var.name} ends outside of its storage")
            dtype = name_of(call.args[3])
            return Where(rank, storage.storage, begin, end, storage.shared, dtype, made)
        return None

    def view(self, short: str, args: list[Any], call: relax.Call, rank: int) -> Where:
        tensor: Where = args[0]
        ty = call.ty_args[0]
        size = allocated_bytes(relax.ShapeExpr(ty.shape.values), ty.dtype, self.rows)
        if short == "view":
            begin = number_of(args[1], self.rows)
        else:
            team = self.team(args[1], rank)[1]
            shift, stride, offset = (number_of(one, self.rows) for one in args[2:5])
            begin = (team.index(rank) + shift) % len(team) * stride + offset
        begin += tensor.begin
        return replace(tensor, begin=begin, end=begin + size)

    def team(self, given: Any, rank: int) -> tuple[Any, tuple[int, ...]]:
        """Return the team of a rank, and what tells it from others."""
        if not isinstance(given, relax.ShapeExpr):
            return "world", tuple(range(self.world))
        size, *members = map(int, given.values)
        for first in range(0, len(members), size):
            if rank in members[first : first + size]:
                return "division", tuple(members[first : first + size])
        raise WrongError(f"rank {rank} is in no team")

    def team_of(self, function: Function, args: list[Any], rank: int) -> Any:
        name = function.parameter_of_type("Team")
        if name is None:
            return "world", tuple(range(self.world))
        (at,) = function.positions((name,), len(args))
        return self.team(args[at], rank)

    def meet(
        self, thread: Thread, what: Any, function: Function, args: list[Any], works: bool
    ) -> Iterator[Any]:
        """Wait until all of the team are there."""
        team = self.team_of(function, args, thread.rank)
        key = (team, works)
        number = self.counts[key, thread.rank]
        self.counts[key, thread.rank] += 1
        here = self.meetings[key, number]
        self.tick(thread)
        here[thread.rank] = (what, list(thread.clock))
        if {one for one, _ in here.values()} != {what}:
            raise WrongError(f"rank {thread.rank} is in {what}, others are in another collective")
        yield lambda: len(here) == len(team[1])
        for _, clock in here.values():
            thread.learn(clock)

    def collective(self, thread: Thread, call: Call, works: bool) -> Iterator[Any]:
        function, args = call.function, call.args
        assert function is not None

        def of(names: tuple[str, ...]) -> list[Where]:
            return [
                args[k] for k in function.positions(names, len(args)) if isinstance(args[k], Where)
            ]

        what = f"{call.name}{' as a work' if works else ''} of rank {thread.rank}"
        if function.sync is Sync.NONE:
            for one in of(function.reads):
                self.access(thread, one, False, what)
            for one in of(function.writes):
                self.access(thread, one, True, what)
            return
        for one in of(function.reads):
            self.access(thread, one, False, what)
        team = self.team_of(function, args, thread.rank)
        key = (team, works, "inputs", self.counts[(team, works), thread.rank])
        self.meetings[key][thread.rank] = of(function.peers_read)
        name = call.name.rpartition(".")[2]
        yield from self.meet(thread, descriptor(name, function, args), function, args, works)
        # What peers have in memory that all map is read where it lies, by the ranks that get it.
        for rank, inputs in self.meetings[key].items():
            for one in inputs:
                if rank != thread.rank and one.shared:
                    self.access(thread, one, False, what)
        for one in of(function.writes):
            self.access(thread, one, True, what)
        self.tick(thread)
        if not leaves_out(function, args):
            yield from self.meet(thread, f"the end of {name}", function, args, works)

    def worker(self, thread: Thread) -> Iterator[Any]:
        """Do the works of a rank."""
        done = 0
        while True:
            yield lambda done=done: len(thread.steps) > done
            work = thread.steps[done]
            thread.learn(work.clock)
            yield from self.collective(thread, work.call, works=True)
            self.tick(thread)
            work.done = list(thread.clock)
            done += 1

    def expose(self, thread: Thread, args: list[Any]) -> ExposedTensor:
        team = self.team(args[1], thread.rank)
        mine = self.shows[team, thread.rank]
        self.tick(thread)
        mine.append(ExposedTensor(args[0], team, len(mine), list(thread.clock)))
        return mine[-1]

    def peer_view(self, thread: Thread, args: list[Any]) -> Iterator[Any]:
        shown: ExposedTensor = args[0]
        if shown.hidden:
            raise WrongError("what is hidden is asked for")
        team = shown.team[1]
        other = team[(team.index(thread.rank) + number_of(args[1], 0)) % len(team)]
        theirs = self.shows[shown.team, other]
        yield lambda: len(theirs) > shown.number
        found = theirs[shown.number]
        thread.learn(found.clock)
        return found.where

    def message(self, thread: Thread, name: str, args: list[Any]) -> Iterator[Any]:
        peer = number_of(args[1], 0)
        if name == "send_to_worker":
            self.access(thread, args[0], False, name)
            self.tick(thread)
            self.messages[thread.rank, peer].append(list(thread.clock))
            return
        key = (peer, thread.rank)
        number = self.taken[key]
        self.taken[key] += 1
        yield lambda: len(self.messages[key]) > number
        thread.learn(self.messages[key][number])
        self.access(thread, args[0], True, name)


def allocated_bytes(shape: Any, dtype: Any, rows: int | Mapping[str, int]) -> int:
    """Return the bytes of a tensor of a shape."""
    name = str(dtype.value if hasattr(dtype, "value") else getattr(dtype, "dtype", dtype))
    return prod(number_of(one, rows) for one in shape.values) * np.dtype(name).itemsize


def number_of(extent: Any, rows: int | Mapping[str, int]) -> int:
    """Return a number where all variables are `rows`, or what it has for their names."""
    extent = extent.value if isinstance(extent, tvm.ir.GenericConst) else extent
    if isinstance(extent, (int, tirx.IntImm)):
        return int(extent)
    analyzer = tvm.sym.Analyzer()

    def bind(var: Any) -> None:
        value = rows if isinstance(rows, int) else rows[str(var.name)]
        analyzer.bind(var, tirx.IntImm(str(var.ty), value))

    tvm_ffi.structural_walk(extent, [(tvm.ir.Var, bind)])
    return int(analyzer.simplify(extent))


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for one in value:
            yield from flat(one)
    else:
        yield value


def name_of(dtype: Any) -> str:
    return str(dtype.value if hasattr(dtype, "value") else getattr(dtype, "dtype", dtype))


#: What upstream's names leave open.
FLAGS = {"flags": 0, "strategy": 0}
#: The tensor that has to be the same on all ranks.
COMPARED = {"broadcast": "recv", "scatter": "recv"}


def descriptor(name: str, function: Function, args: list[Any]) -> tuple[Any, ...]:
    """Return what ranks in one collective compare: see `Descriptor` of
    core/shared_memory_layout.h."""
    short = name.partition("_from_worker0")[0].partition("_to_worker0")[0]
    short = short.removeprefix("custom_")
    numbers = dict(FLAGS) if "allreduce" in short else {"flags": 0}
    if short != name.removeprefix("custom_"):
        numbers["root"] = 0
    numbers |= {key: int(value) for key, value in function.defaults.items() if key != "team"}
    bound = zip(function.bind(len(args)) or (), args, strict=True)
    for parameter, arg in bound:
        if parameter.type in ("Team", "InGroup") or isinstance(arg, Where):
            continue
        if isinstance(arg, relax.ShapeExpr):
            whole = tuple(map(int, arg.values))
            one = parameter.type == "ReduceKindInShape"
            numbers["kind" if one else parameter.name] = whole[0] if one else whole
        elif parameter.type != "Tensor | None":
            numbers[parameter.name] = getattr(arg, "value", arg)
    numbers["strategy"] = numbers.get("strategy", 0) % 3  # 0 and 3 are one
    compared = COMPARED.get(short, "send")
    (at,) = function.positions((compared,), len(args))
    tensor = args[at]
    if isinstance(tensor, Where):
        size = (tensor.dtype, tensor.end - tensor.begin)
    else:  # a constant
        ty = tensor.ty
        size = (name_of(ty.dtype), allocated_bytes(relax.ShapeExpr(ty.shape.values), ty.dtype, 0))
    if numbers.get("parts"):
        size = (size[0], 0)
    return short, tuple(sorted((k, str(v)) for k, v in numbers.items())), size


def leaves_out(function: Function, args: list[Any]) -> bool:
    name = function.parameter_of_type("CollectiveFlag")
    if name is None:
        return False
    (at,) = function.positions((name,), len(args))
    return bool(number_of(args[at], 0) & CollectiveFlag.NO_EXIT_BARRIER)


def wrongs(
    mod: tvm.IRModule,
    world: int,
    rows: int | Mapping[str, int] = 0,
    choices: Iterable[Sequence[bool]] | None = None,
) -> list[str]:
    """Return what is wrong on some rank, whatever comes out of the caller's condition.

    It is the same on all ranks; `choices` has what it is on each of them otherwise.
    """
    found = []
    decided: set[Any] = set()
    for holds in choices or ([True] * world, [False] * world):

        def decide(of: Any, rank: int, holds: Sequence[bool] = holds) -> bool:
            decided.add(of)
            return holds[rank]

        try:
            Schedule(mod, world, rows, decide).run()
        except WrongError as error:
            found.append(str(error))
        if not decided:
            break
    assert len(decided) < 2, "a program has one condition"
    return found
