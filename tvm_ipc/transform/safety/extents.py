# SPDX-License-Identifier: Apache-2.0
"""What can be proved of sizes and offsets, and what can be refuted.

That one number is at most another is asked of sizes at which certain numbers are not negative: the
extents of tensors that are there. It is proved for all such sizes, refuted by an example, or
neither. Layers of a model repeat the same differences, so each is looked at only once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import ConstIntBound

from tvm_ipc.transform.ir.polynomials import (
    Number,
    Polynomial,
    is_multiple,
    pack,
    replaced,
)
from tvm_ipc.transform.safety.examples import POINTS, coordinate, evaluate
from tvm_ipc.transform.safety.numbers import MOST, Numbers

#: Numbers that are not negative where a tensor is.
Given = tuple[Polynomial, ...]
#: How many numbers a proof may look at.
_TRIES = 200
#: Sizes at which something is so, such as "n = 1"; "" where no size is symbolic.
Example = str


class Extents(Numbers):
    """Numbers, and what is known of them."""

    def __init__(self) -> None:
        super().__init__()
        self._orders: dict[tuple[Number, Number, Given], bool] = {}
        self._proofs: dict[tuple[Polynomial, Given], bool] = {}
        self._examples: dict[tuple[Number, ...], Example | None] = {}
        self._not_negative: dict[int, bool] = {}
        self._values: dict[tuple[int, int], int | None] = {}
        self._tries = 0

    def given(self, numbers: list[Number | None]) -> Given:
        """Return those of the numbers that, where they are not negative, tell something."""
        return tuple(
            dict.fromkeys(
                number
                for number in numbers
                if isinstance(number, tuple) and not self._is_sum(number)
            )
        )

    def at_most(self, a: Number, b: Number, given: Given = ()) -> bool:
        """Whether a <= b is proved."""
        if isinstance(a, int) and isinstance(b, int):
            return a <= b
        known = self._orders.get((a, b, given))
        if known is None:
            self._tries = _TRIES
            known = self._orders[a, b, given] = self._proves(self.subtract(b, a), given)
        return known

    def example(self, *numbers: Number) -> Example | None:
        """Return sizes at which none of the numbers is negative, None if none were found."""
        if numbers not in self._examples:
            self._examples[numbers] = self._find(numbers)
        return self._examples[numbers]

    # ---- proofs ---------------------------------------------------------------------------

    def _proves(self, number: Number, given: Given) -> bool:
        """Whether a number is never negative."""
        if isinstance(number, int):
            return number >= 0
        known = self._proofs.get((number, given))
        if known is None:
            self._tries -= 1
            if self._tries < 0:
                return False
            known = self._proofs[number, given] = (
                self._is_sum(number)
                or any(is_multiple(number, one) for one in given)
                or (
                    self.example(*given, self.subtract(-1, number)) is None
                    and (self._proves_parts(number, given) or self._ask(number, given))
                )
            )
        return known

    def _is_sum(self, number: Polynomial) -> bool:
        """Whether it is a sum of what is not negative."""
        return all(
            factor >= 0 and all(map(self._is_not_negative, monomial)) for monomial, factor in number
        )

    def _is_not_negative(self, index: int) -> bool:
        known = self._not_negative.get(index)
        if known is None:
            atom = self._atoms[index]
            known = isinstance(atom, ir.Var) or bool(self._analyzer.can_prove(atom >= 0))
            self._not_negative[index] = known
        return known

    def _proves_parts(self, number: Polynomial, given: Given) -> bool:
        """Whether it is proved by what takes the place of one atom."""
        places = [(monomial, index) for monomial, _ in number for index in monomial]
        for index in dict.fromkeys(index for _, index in places):
            ends = self._ends(number, index)
            if ends and all(self._proves(end, given) for end in ends):
                return True
        factors = dict(number)
        for monomial, index in places:
            atom = self._atoms[index]
            cases = [replaced(number, monomial, index, case, 1) for case in self._cases(atom)]
            if cases and all(self._proves(case, given) for case in cases):
                return True
            rest = list(monomial)
            rest.remove(index)
            factor = factors[monomial]
            # All else is a whole number of times the atom.
            whole = not rest and all(other % factor == 0 for other in factors.values())
            if all(map(self._is_not_negative, rest)):
                for bound in self._bounds_of(atom, factor > 0, whole):
                    if self._proves(replaced(number, monomial, index, *bound), given):
                        return True
        return False

    def _ends(self, number: Polynomial, index: int) -> list[Number]:
        """Return a number with the least and the most that an atom can be in its place.

        Where the number is linear in the atom, it is least at one of them.
        """
        limits = self._analyzer.const_int_bound(self._atoms[index])
        ends = [int(limits.min_value), int(limits.max_value)]
        if ends[0] == ConstIntBound.NEG_INF or ends[1] >= MOST:
            return []
        if any(monomial.count(index) > 1 for monomial, _ in number):
            return []
        found: list[Number] = []
        for end in ends:
            value: Number = number
            for monomial, _ in number:
                if index in monomial and not isinstance(value, int):
                    value = replaced(value, monomial, index, end, 1)
            found.append(value)
        return found

    def _cases(self, atom: Any) -> list[Number]:
        """Return the numbers of which an atom is one."""
        if isinstance(atom, (tirx.Max, tirx.Min)):
            cases = [atom.a, atom.b]
        elif isinstance(atom, tirx.Select):
            cases = [atom.true_value, atom.false_value]
        elif isinstance(atom, ir.Call) and getattr(atom.op, "name", "") == "prim.if_then_else":
            cases = list(atom.args)[1:]
        else:
            return []
        return [pack(self._terms(case)) for case in cases]

    def _bounds_of(self, atom: Any, lower: bool, whole: bool) -> list[tuple[Number, int]]:
        """Return numbers, and what to divide them by, that an atom is at least, or at most.

        With `whole` it is compared with whole numbers alone, of which none lies between.
        """
        if isinstance(atom, tirx.Max if lower else tirx.Min):
            return [(case, 1) for case in self._cases(atom)]
        if isinstance(atom, tirx.FloorDiv) and isinstance(atom.b, tirx.IntImm):
            by = int(atom.b.value)
            if by > 0:  # by * (a // by) lies between a - by + 1 and a
                dividend = pack(self._terms(atom.a))
                # a // by >= m is a >= by * m, and a // by <= m is a - by + 1 <= by * m.
                less = by - 1 if lower is not whole else 0
                return [(self.subtract(dividend, less), by)]
        return []

    def _ask(self, number: Polynomial, given: Given) -> bool:
        """Let TVM's analyzer prove it."""
        analyzer = self._analyzer
        with ExitStack() as stack:
            for one in given:
                assumed = analyzer.simplify(self._expression(one) >= 0)
                stack.enter_context(analyzer.constraint_scope(assumed))
            return bool(analyzer.can_prove(self._expression(number) >= 0))

    # ---- examples -------------------------------------------------------------------------

    def _find(self, numbers: tuple[Number, ...]) -> Example | None:
        variables = self._variables_in(numbers)
        for point in range(POINTS if variables else 1):
            if all(self._at(number, point) for number in numbers):
                return ", ".join(
                    f"{variable.name} = {self._coordinate(variable, point)}"
                    for variable in variables
                )
        return None

    def _variables_in(self, numbers: tuple[Number, ...]) -> list[Any]:
        """Return the variables of some numbers, in the order in which they came up."""
        found: set[int] = set()
        atoms = {
            index for number in numbers for monomial, _ in _terms_of(number) for index in monomial
        }
        for index in atoms:
            tvm_ffi.structural_walk(
                self._atoms[index], [(ir.Var, lambda one: found.add(self._variables[one]))]
            )
        return [self._atoms[index] for index in sorted(found)]

    def _coordinate(self, variable: Any, point: int) -> int:
        index = self._variables[variable]
        least, most = self._bounds[index]
        return least + coordinate(point, index) % (most - least + 1)

    def _at(self, number: Number, point: int) -> bool:
        """Whether a number has a value at a point, and is not negative there."""
        total = 0
        for monomial, factor in _terms_of(number):
            for index in monomial:
                if (index, point) not in self._values:
                    self._values[index, point] = evaluate(
                        self._atoms[index], lambda one: self._coordinate(one, point)
                    )
                value = self._values[index, point]
                if value is None:
                    return False
                factor *= value
            total += factor
        return total >= 0


def _terms_of(number: Number) -> Polynomial:
    return (((), number),) if isinstance(number, int) else number
