# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of matmul, einsum and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Final

from tvm_ipc.arguments import counted
from tvm_ipc.comm import Division, Placement
from tvm_ipc.comm.extent_arithmetic import constant, format_extent
from tvm_ipc.comm.placements import reduces
from tvm_ipc.spmd.rules.axis_label_rule import (
    Labels,
    Refusal,
    Related,
    Rule,
    needs_all,
    one_partial_sum,
    shard,
)
from tvm_ipc.spmd.rules.operation import Operation, aligned, same


def sum_of_products(
    op: Operation, labels: Iterable[int], whole: Iterable[int | None] = ()
) -> dict[str, Any]:
    """Return arguments of the `Rule` of an operator that sums products over labels.

    Parameters
    ----------
    op : the call. The labels are sharded only if the runtime can sum the type of its result.
    labels : the labels that are summed over.
    whole : further labels that must not be sharded.
    """
    arguments: dict[str, Any] = {"partial_linear": one_partial_sum}
    if reduces("sum", op.dtype()):
        return {**arguments, "reduced": dict.fromkeys(labels, "sum"), "whole": needs_all(*whole)}
    return {**arguments, "whole": needs_all(*whole, *labels)}


def _matmul(op: Operation) -> Rule:
    a, b, dims = op.dims(0), op.dims(1), op.result_dims()
    rows, columns = len(a) > 1, len(b) > 1
    batch = len(dims) - rows - columns
    inner = len(dims)
    of_a = aligned(a[:-2], dims[:batch]) + ((batch,) if rows else ()) + (inner,)
    of_b = aligned(b[:-2], dims[:batch]) + (inner,) + ((len(dims) - 1,) if columns else ())
    result = tuple(range(len(dims)))
    return Rule((of_a, of_b), (result,), **sum_of_products(op, [inner]))


def _outer(_op: Operation) -> Rule:
    return Rule(((0,), (1,)), ((0, 1),), partial_linear=one_partial_sum)


def _einsum(op: Operation) -> Rule:
    """Return the rule of an einsum: letters are labels, and ellipses are aligned at their ends."""
    text = str(op.attrs.subscripts).replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(op.operands):
        found = counted(len(op.operands), "operand")
        raise Refusal(f"its subscripts {text!r} are not those of {found}")
    if not arrow:
        once = sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1)
        result = "..." * ("..." in inputs) + "".join(once)
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
    out = labels(result, len(op.result_dims()))
    longest: dict[int, Any] = {}
    for k, axes in enumerate(operands):
        for axis, letter in enumerate(axes):
            if constant(op.dims(k)[axis]) != 1 or letter not in longest:
                longest[letter] = op.dims(k)[axis]
    of_operands: list[Labels] = [
        tuple(
            None if constant(op.dims(k)[axis]) == 1 != constant(longest[letter]) else letter
            for axis, letter in enumerate(axes)
        )
        for k, axes in enumerate(operands)
    ]
    # A letter that occurs twice in a term selects a diagonal, which is not sharded along an axis.
    twice = {label for axes in (*operands, out) for label in axes if axes.count(label) > 1}
    sums = set(longest) - set(out) - twice
    return Rule(tuple(of_operands), (tuple(out),), **sum_of_products(op, sums, twice))


def whole_blocks(blocks: Any, name: str) -> Callable[[int], str]:
    """Return the condition that the number of ranks divides a number of blocks.

    Parameters
    ----------
    blocks : their number, which may be symbolic.
    name : their name in the reason why a number of ranks does not fit.
    """

    def why_not(workers: int) -> str:
        number = constant(blocks)
        if number is not None and number % workers == 0:
            return ""
        number_text = format_extent(blocks)
        return f"its number of {name}, {number_text}, cannot be split evenly over {workers} ranks"

    return why_not


def _attention(op: Operation) -> Rule:
    """Return the rule of attention: ranks share batch and heads.

    They may also share the rows of the queries if each row attends to all keys.
    """
    batch, rows, head, width, keys, value = range(6)
    q, k = op.dims(0), op.dims(1)
    whole = needs_all(width, keys, value)
    if op.attrs.causal_mask is not None or op.attrs.window_size is not None:
        whole |= needs_all(rows)
    operands: list[Labels] = [(batch, rows, head, width), (batch, keys, head, width)]
    operands.append((batch, keys, head, value))
    if len(op.operands) > 3:
        labels = (batch, head, rows, keys)
        dims = (q[0], q[2], q[1], k[1])
        operands.append(
            tuple(
                None if constant(bias_extent) == 1 != constant(extent) else label
                for label, bias_extent, extent in zip(labels, op.dims(3), dims, strict=True)
            )
        )
    result_labels = ((batch, rows, head, value),)
    rule = Rule(tuple(operands), result_labels, whole=whole)
    return (
        rule if same(q[2], k[2]) else _with_shared_heads(rule, head, constant(q[2]), constant(k[2]))
    )


def _with_shared_heads(rule: Rule, head: int, queries: int | None, keys: int | None) -> Rule:
    """Return the rule of grouped-query attention, where queries have more heads than keys."""
    times = (queries or 0) // (keys or 1)

    def common(divisions: Mapping[int, Division | None], workers: int) -> Division | None:
        if not queries or not keys or queries % keys:
            return None
        for k in (1, 2):
            if k in divisions:
                return divisions[k] or Division.plain(keys, workers)
        of_queries = next(iter(divisions.values())) or Division.plain(queries, workers)
        return of_queries.unrepeated(times, workers)

    def of_operand(operand: int, division: Division, workers: int) -> Division:
        if operand in (1, 2):
            return division
        return division.repeated(times, workers)

    def propagate(division: Division | None, workers: int) -> list[Placement] | str:
        if division is None:
            heads = counted(keys or 0, "head")
            return f"the shards of the queries do not match its {heads} of keys and values"
        if len(set(division.copies_of(workers))) > 1:
            return f"segments of {division} are on different numbers of ranks"
        (result,) = rule.results
        return [shard(result.index(head), division.repeated(times, workers), workers)]

    related = {head: Related(common, of_operand)}
    return replace(rule, related=related, propagate={head: propagate})


RULES: Final = {
    "matmul": _matmul,
    "outer": _outer,
    "einsum": _einsum,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
}
