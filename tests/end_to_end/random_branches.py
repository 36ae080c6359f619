# SPDX-License-Identifier: Apache-2.0
"""Random programs whose branches make the same collectives, from a seed, and what they compute.

Ranks take different branches, by their number or by an argument that differs among them. Each
branch computes something else, in memory of its own, around the same sequence of collectives. Sizes
are static and symbolic, types differ, and one branch may call a function where the other one has
the collective itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from tests.collective_results import results_of

COLUMNS = 12  #: divisible by all numbers of ranks
STATIC = 4
#: Rows of the values, by what they are in the program.
ROWS = {"n": "n", "m": "m", "3 * n": "(3 * n)", "4": "4"}
DTYPES = ("float32", "float64", "int32")
KINDS = ("allreduce", "allreduce", "allreduce", "allgather", "broadcast", "scatter")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Collective:
    """A collective that both branches make."""

    kind: str
    how: str
    rows: str
    dtype: str
    in_function: bool

    def text(self, operand: str, world: int) -> str:
        """Return the call, as TVMScript."""
        if self.kind == "allreduce":
            return f'R.ccl.allreduce({operand}, "{self.how}", False)'
        if self.kind == "allgather":
            return f"R.ccl.allgather({operand}, {world}, False)"
        if self.kind == "broadcast":
            return f"R.ccl.broadcast_from_worker0({operand})"
        return f"R.ccl.scatter_from_worker0({operand}, {world}, 1)"

    def run(self, given: list[Array]) -> list[Array]:
        """Return what each rank gets."""
        return results_of(self.kind, given, reduction=self.how, axis=int(self.kind == "scatter"))


@dataclass
class Branch:
    """A step of a branch before a collective: a value, and numbers to multiply and add."""

    steps: list[tuple[int, int, int]]
    calls: bool  #: whether it calls the function that has the collective


class BranchProgram:
    """A function `main` of two tensors of each type, one of static size, and a condition."""

    def __init__(self, seed: int, world: int, by_rank: bool, ifs: int = 3) -> None:
        self.seed, self.world, self.by_rank = seed, world, by_rank
        rng = random.Random(seed)
        self.members = sorted(rng.sample(range(world), rng.randint(1, world - 1)))
        self.ifs: list[tuple[list[Collective], list[Branch]]] = []
        for _ in range(ifs):
            made = [self._collective(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
            branches = [
                Branch(
                    [
                        (rng.randrange(3), rng.randint(1, 2), rng.randint(-2, 2))
                        for _ in range(sum(2 + rng.randrange(3) for _ in made))
                    ],
                    rng.random() < 0.5,
                )
                for _ in range(2)
            ]
            self.ifs.append((made, branches))
        self.module = tvm.script.from_source(self.source())

    def _collective(self, rng: random.Random) -> Collective:
        kind, dtype = rng.choice(KINDS), rng.choice(DTYPES)
        static = kind == "allreduce" and rng.random() < 0.2
        rows = "4" if static else rng.choice(list(ROWS))
        return Collective(kind, rng.choice(("sum", "max", "min")), rows, dtype, static)

    # ---- the program --------------------------------------------------------------------------

    def source(self) -> str:
        """Return the module as TVMScript."""
        given = [
            f'{name}_{dtype}: R.Tensor(({rows}, {COLUMNS}), "{dtype}")'
            for dtype in DTYPES
            for name, rows in (("x", '"n"'), ("y", '"m"'), ("s", "4"))
        ]
        lines = ["@I.ir_module", "class Module:"]
        for dtype in DTYPES:
            for how in ("sum", "max", "min"):
                tensor = f'R.Tensor(({STATIC}, {COLUMNS}), "{dtype}")'
                lines += [
                    "    @R.function(private=True)",
                    f"    def {how}_{dtype}(a: {tensor}) -> {tensor}:",
                    f'        b = R.multiply(a, R.const(2, "{dtype}"))',
                    f'        return R.ccl.allreduce(b, "{how}", False)',
                ]
        lines += ["    @R.function(pure=False)"]
        lines += [f'    def main({", ".join(given)}, c: R.Tensor((), "bool")):']
        lines += ["        " + line for line in self._body()]
        return "\n".join(lines) + "\n"

    def _body(self) -> list[str]:
        lines = ["n, m = T.int64(), T.int64()"]
        if self.by_rank:
            rank = 'R.call_packed("runtime.disco.worker_rank", ty_args=(R.Prim("int64"),))'
            lines.append(f"q = {rank}")
        results: list[str] = []
        for number, (made, branches) in enumerate(self.ifs):
            condition = self._rank_condition() if self.by_rank else "c"
            for k, branch in enumerate(branches):
                lines.append("else:" if k else f"if {condition}:")
                lines += ["    " + line for line in self._branch(number, k, made, branch)]
            results.append(f"r{number}")
        lines.append(f"return ({', '.join(results)},)")
        return lines

    def _rank_condition(self) -> str:
        first, *others = [f"q == {rank}" for rank in self.members]
        for other in others:
            first = f"T.Or({first}, {other})"
        return first

    def _branch(self, number: int, k: int, made: list[Collective], branch: Branch) -> list[str]:
        lines: list[str] = []
        steps = iter(branch.steps)
        names = []
        for j, one in enumerate(made):
            name = f"v{number}_{k}_{j}"
            lines.append(f"{name} = {self._start(one)}")
            for _ in range(len(branch.steps) // len(made)):
                which, factor, term = next(steps)
                lines.append(
                    f"{name}_{len(lines)} = {self._compute(which, factor, term, name, one)}"
                )
                name = lines[-1].partition(" ")[0]
            result = f"w{number}_{k}_{j}"
            if one.in_function:
                if branch.calls:
                    lines.append(f"{result} = Module.{one.how}_{one.dtype}({name})")
                else:
                    lines.append(f'{result}d = R.multiply({name}, R.const(2, "{one.dtype}"))')
                    lines.append(f"{result} = {one.text(result + 'd', self.world)}")
            else:
                lines.append(f"{result} = {one.text(name, self.world)}")
            names.append(result)
        lines.append(f"r{number} = ({', '.join(names)},)")
        return lines

    def _start(self, one: Collective) -> str:
        x, y, s = (f"{name}_{one.dtype}" for name in "xys")
        if one.rows == "3 * n":
            return f"R.concat(({x}, {x}, {x}), axis=0)"
        name = {"n": x, "m": y, "4": s}[one.rows]
        return f'R.add({name}, R.const(1, "{one.dtype}"))'

    def _compute(self, which: int, factor: int, term: int, name: str, one: Collective) -> str:
        if which == 0:
            return f'R.multiply({name}, R.const({factor}, "{one.dtype}"))'
        if which == 1:
            return f'R.add({name}, R.const({term}, "{one.dtype}"))'
        return f"R.subtract({name}, {name})" if factor > 1 else f"R.add({name}, {name})"

    # ---- what it gives ------------------------------------------------------------------------

    def arguments(self, sizes: dict[str, int], seed: int) -> list[list[Array]]:
        """Return the tensors, rank by rank."""
        drawn = np.random.default_rng([self.seed, seed])
        shapes = [(sizes["n"], COLUMNS), (sizes["m"], COLUMNS), (STATIC, COLUMNS)]
        return [
            [drawn.integers(-3, 4, shape).astype(dtype) for _ in range(self.world)]
            for dtype in DTYPES
            for shape in shapes
        ]

    def conditions(self, round_: int) -> list[bool]:
        """Return which branch each rank takes."""
        if self.by_rank:
            return [rank in self.members for rank in range(self.world)]
        return [bool((self.seed + round_ + rank) % 2 == 0) for rank in range(self.world)]

    def wanted(self, given: list[list[Array]], conditions: list[bool]) -> list[list[list[Array]]]:
        """Return what each rank gets, by the `if` and the collective."""
        results = []
        for made, branches in self.ifs:
            group = []
            for j, one in enumerate(made):
                sent = []
                for rank, taken in enumerate(conditions):
                    branch = branches[0 if taken else 1]
                    count = len(branch.steps) // len(made)
                    value = self._started(one, given, rank)
                    for which, factor, term in branch.steps[j * count :][:count]:
                        value = _computed(which, factor, term, value)
                    sent.append(value * 2 if one.in_function else value)
                group.append(one.run(sent))
            results.append(group)
        return results

    def _started(self, one: Collective, given: list[list[Array]], rank: int) -> Array:
        first = 3 * DTYPES.index(one.dtype)
        x, y, s = (given[first + k][rank] for k in range(3))
        if one.rows == "3 * n":
            return np.concatenate([x, x, x])
        return ({"n": x, "m": y, "4": s}[one.rows] + 1).astype(one.dtype)


def _computed(which: int, factor: int, term: int, value: Array) -> Array:
    if which == 0:
        return (value * factor).astype(value.dtype)
    if which == 1:
        return (value + term).astype(value.dtype)
    return value - value if factor > 1 else value + value
