# SPDX-License-Identifier: Apache-2.0
"""Tensor expressions for mixtures of experts: sorting rows by expert, and matmuls by expert.

They have no control flow over values, so they run on CPUs and GPUs with TVM's schedules.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

#: The expert of a row that no expert gets.
NO_EXPERT = -1


def _is_expert(expert: Any, num_experts: int) -> Any:
    return tirx.And(expert >= 0, expert < num_experts)


def sort_keys(experts: te.Tensor, num_experts: int, last: int) -> te.Tensor:
    """Return the expert of each pair of a token and a choice, `last` for pairs without one."""
    tokens, choices = experts.shape

    def key(pair: tirx.Var) -> Any:
        expert = experts(tirx.floordiv(pair, choices), tirx.floormod(pair, choices))
        is_sent = _is_expert(expert, num_experts)
        return tirx.if_then_else(is_sent, expert, tirx.const(last, "int64"))

    return te.compute((tokens * choices,), key, name="sort_keys")


def count_keys(keys: te.Tensor, workers: int, groups: int) -> te.Tensor:
    """Return the number of pairs for each expert, by the rank that has it."""
    pair = te.reduce_axis((0, keys.shape[0]), "pair")
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")

    def count(worker: tirx.Var, group: tirx.Var) -> Any:
        expert = worker.astype("int64") * groups + group
        return te.sum(tirx.if_then_else(keys(pair) == expert, one, zero), axis=pair)

    return te.compute((workers, groups), count, name="counts")


def sorted_rows(x: te.Tensor, order: te.Tensor, choices: int) -> te.Tensor:
    """Return the rows of the tokens of sorted pairs."""
    row = x.shape[1:]

    def element(position: tirx.Var, *index: tirx.Var) -> Any:
        return x(tirx.floordiv(order(position), choices), *index)

    return te.compute((order.shape[0], *row), element, name="sorted_rows")


def positions_of(experts: te.Tensor, inverse: te.Tensor, num_experts: int) -> te.Tensor:
    """Return the position of each pair among the sorted ones, -1 for those that are not sent."""
    _, choices = experts.shape

    def position(token: tirx.Var, choice: tirx.Var) -> Any:
        own = inverse(token * choices + choice)
        is_sent = _is_expert(experts(token, choice), num_experts)
        return tirx.if_then_else(is_sent, own, tirx.const(NO_EXPERT, "int64"))

    return te.compute(experts.shape, position, name="positions")


def ends_of(counts: te.Tensor) -> te.Tensor:
    """Return the end of each block of received rows: the sum of all counts up to its own."""
    workers, groups = counts.shape
    sender = te.reduce_axis((0, workers), "sender")
    group = te.reduce_axis((0, groups), "group")
    zero = tirx.const(0, "int64")

    def end(block: tirx.Var) -> Any:
        is_before = sender * groups + group <= block
        return te.sum(
            tirx.if_then_else(is_before, counts(sender, group), zero), axis=[sender, group]
        )

    return te.compute((workers * groups,), end, name="ends")


def experts_of_rows(ends: te.Tensor, groups: int, rows: Any) -> te.Tensor:
    """Return the expert of each received row, -1 for rows that were not received."""
    blocks = ends.shape[0]
    block = te.reduce_axis((0, blocks), "block")
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")

    def ended(row: tirx.Var) -> Any:
        has_ended = ends(block) <= row.astype("int64")
        return te.sum(tirx.if_then_else(has_ended, one, zero), axis=block)

    number = te.compute((rows,), ended, name="block_of_row")

    def expert(row: tirx.Var) -> Any:
        own = tirx.floormod(number(row), tirx.const(groups, "int64"))
        return tirx.if_then_else(number(row) < blocks, own, tirx.const(NO_EXPERT, "int64"))

    return te.compute((rows,), expert, name="expert_of_row")


def rows_by_sender(counts: te.Tensor) -> te.Tensor:
    """Return the number of rows of each sender."""
    workers, groups = counts.shape
    group = te.reduce_axis((0, groups), "group")
    return te.compute(
        (workers,), lambda sender: te.sum(counts(sender, group), axis=group), name="rows_by_sender"
    )


def matmul_by_expert(rows: te.Tensor, experts: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """Return each row times the transposed matrix of its expert, summed in float32 or wider."""
    wide = "float32" if rows.dtype in ("float16", "bfloat16") else rows.dtype
    inner = te.reduce_axis((0, rows.shape[1]), "inner")

    def element(row: tirx.Var, column: tirx.Var) -> Any:
        expert = experts(row)
        own = rows(row, inner).astype(wide) * weight(expert, column, inner).astype(wide)
        return te.sum(
            tirx.if_then_else(expert >= 0, own, tirx.const(0, wide)),
            axis=inner,
        )

    shape = (rows.shape[0], weight.shape[1])
    product = te.compute(shape, element, name="expert_matmul")
    if wide == rows.dtype:
        return product
    return te.compute(shape, lambda *index: product(*index).astype(rows.dtype), name="rounded")


def weighted_sum(rows: te.Tensor, positions: te.Tensor, weights: te.Tensor) -> te.Tensor:
    """Return for each token the sum of its choices' rows times their weights, in float32."""
    tokens, choices = positions.shape
    shape = (tokens, rows.shape[1])
    wide = "float64" if rows.dtype == "float64" else "float32"
    choice = te.reduce_axis((0, choices), "choice")

    def element(token: tirx.Var, column: tirx.Var) -> Any:
        at = positions(token, choice)
        own = weights(token, choice).astype(wide) * rows(at, column).astype(wide)
        return te.sum(tirx.if_then_else(at >= 0, own, tirx.const(0, wide)), axis=choice)

    total = te.compute(shape, element, name="weighted_sum")
    if wide == rows.dtype:
        return total
    return te.compute(shape, lambda *index: total(*index).astype(rows.dtype), name="rounded")
