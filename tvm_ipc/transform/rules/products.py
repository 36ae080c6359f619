# SPDX-License-Identifier: Apache-2.0
"""Matrix products, `einsum`, and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

from tvm_ipc.comm import Division, Placement, Shard
from tvm_ipc.comm.extents import constant, show_extent
from tvm_ipc.comm.placements import reduces
from tvm_ipc.transform.rules import keeps
from tvm_ipc.transform.rules.operation import Operation, aligned, same
from tvm_ipc.transform.rules.rule import Carry, Labels, Refusal, Related, Rule, needs_all, shard


def summed(op: Operation, labels: set[int]) -> dict[str, Any]:
    """Return labels as those that are summed over, if the runtime has that sum."""
    if reduces("sum", op.dtype()):
        return {"reduced": dict.fromkeys(labels, "sum")}
    return {"whole": needs_all(*labels)}


def _matmul(op: Operation) -> Rule:
    a, b, dims = op.dims(0), op.dims(1), op.made()
    rows, columns = len(a) > 1, len(b) > 1
    batch = len(dims) - rows - columns
    inner = len(dims)
    of_a = aligned(a[:-2], dims[:batch]) + ((batch,) if rows else ()) + (inner,)
    of_b = aligned(b[:-2], dims[:batch]) + (inner,) + ((len(dims) - 1,) if columns else ())
    made = tuple(range(len(dims)))
    return Rule((of_a, of_b), (made,), keeps=keeps.one_sum, **summed(op, {inner}))


def _outer(_op: Operation) -> Rule:
    return Rule(((0,), (1,)), ((0, 1),), keeps=keeps.one_sum)


def _einsum(op: Operation) -> Rule:
    """Letters are labels; those of an ellipsis are aligned at its end."""
    text = str(op.attrs.subscripts).replace(" ", "")
    given, arrow, result = text.partition("->")
    terms = given.split(",")
    if len(terms) != len(op.operands):
        raise Refusal(f"its subscripts {text!r} are not those of {len(op.operands)} operands")
    made = len(op.made())
    if not arrow:
        once = sorted(c for c in set(given) - set(",.") if given.count(c) == 1)
        result = "..." * ("..." in given) + "".join(once)
    fresh = count()
    letters: dict[Any, int] = {}

    def label(key: Any) -> int:
        return letters.setdefault(key, next(fresh))

    def labels(term: str, ndim: int) -> list[int]:
        before, dots, after = term.partition("...")
        if not dots:
            return [label(c) for c in term]
        more = ndim - len(before) - len(after)
        middle = [label(k - more) for k in range(more)]  # -1 is the last one of the ellipsis
        return [*map(label, before), *middle, *map(label, after)]

    operands = [labels(term, op.ndim(k)) for k, term in enumerate(terms)]
    out = labels(result, made)
    longest: dict[int, Any] = {}
    for k, axes in enumerate(operands):
        for axis, one in enumerate(axes):
            if constant(op.dims(k)[axis]) != 1 or one not in longest:
                longest[one] = op.dims(k)[axis]
    of_operands: list[Labels] = [
        tuple(
            None if constant(op.dims(k)[axis]) == 1 != constant(longest[one]) else one
            for axis, one in enumerate(axes)
        )
        for k, axes in enumerate(operands)
    ]
    # A letter twice in a term is a diagonal, of which a rank's part has no piece.
    twice = {one for axes in (*operands, out) for one in axes if axes.count(one) > 1}
    over = set(longest) - set(out) - twice
    rest = summed(op, over)
    whole = {**rest.pop("whole", {}), **needs_all(*twice)}
    return Rule(tuple(of_operands), (tuple(out),), whole=whole, keeps=keeps.one_sum, **rest)


def among(blocks: Any, what: str) -> Callable[[int], str]:
    """Return the condition that ranks divide some blocks of an axis, which are called so."""

    def why_not(workers: int) -> str:
        number = constant(blocks)
        if number is not None and number % workers == 0:
            return ""
        return f"{workers} ranks do not divide its {show_extent(blocks)} {what}"

    return why_not


def _attention(op: Operation) -> Rule:
    """Batch and heads; rows of the queries, if each sees all keys."""
    batch, rows, head, width, keys, value = range(6)
    q, k = op.dims(0), op.dims(1)
    whole = needs_all(width, keys, value)
    if op.attrs.causal_mask is not None or op.attrs.window_size is not None:
        whole |= needs_all(rows)
    operands: list[Labels] = [(batch, rows, head, width), (batch, keys, head, width)]
    operands.append((batch, keys, head, value))
    if len(op.operands) > 3:
        labels = (batch, head, rows, keys)
        whole_of = (q[0], q[2], q[1], k[1])
        operands.append(
            tuple(
                None if constant(extent) == 1 != constant(all_of_it) else label
                for label, extent, all_of_it in zip(labels, op.dims(3), whole_of, strict=True)
            )
        )
    made = ((batch, rows, head, value),)
    if same(q[2], k[2]):
        return Rule(tuple(operands), made, whole=whole)
    return Rule(
        tuple(operands),
        made,
        related={head: _shared_heads(constant(q[2]), constant(k[2]))},
        carry=_carry_heads(made[0], head, whole, constant(q[2]), constant(k[2])),
    )


def _shared_heads(queries: int | None, keys: int | None) -> Related:
    """Heads of queries, each some of which go with one of keys and values."""

    def common(given: Mapping[int, Division | None], workers: int) -> Division | None:
        if not queries or not keys or queries % keys:
            return None
        for k in (1, 2):
            if k in given:
                return given[k] or Division.plain(keys, workers)
        of_queries = next(iter(given.values())) or Division.plain(queries, workers)
        return of_queries.unrepeated(queries // keys, workers)

    def of_operand(operand: int, division: Division, workers: int) -> Division:
        if operand in (1, 2):
            return division
        return division.repeated((queries or 0) // (keys or 1), workers)

    return Related(common, of_operand)


def _carry_heads(
    labels: Labels, head: int, whole: Mapping[int, str], queries: int | None, keys: int | None
) -> Carry:
    def carry(label: int, division: Division | None, workers: int) -> list[Placement] | str:
        if label in whole:
            return whole[label]
        if label != head:
            return [Shard(labels.index(label), division)]
        if division is None:
            return f"heads of keys and values, {keys}, are not divided as those of queries are"
        if len(set(division.copies_of(workers))) > 1:
            return f"of segments of {division} there are different numbers of copies"
        repeated = division.repeated((queries or 0) // (keys or 1), workers)
        return [shard(labels.index(head), repeated, workers)]

    return carry


RULES: Final = {
    "matmul": _matmul,
    "outer": _outer,
    "einsum": _einsum,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
}
