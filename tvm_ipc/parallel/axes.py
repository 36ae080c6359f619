# SPDX-License-Identifier: Apache-2.0
"""Which axes of a program are the same axis, and which are made of others.

    q = R.matmul(x, R.permute_dims(wq))         (n, 24)         axis 0 of wq is axis 1 of q
    heads = R.reshape(q, (n, 6, 4))             24 is 6 times 4
    keys = R.repeat(k, 3, axis=1)               (n, 2, 4) -> (n, 6, 4): 6 is 2, each 3 times
    scores = R.einsum("nhw,mhw->hnm", ...)      6 is 6: heads are in the order of those of keys
    q = R.strided_slice(qkv, [1], [0], [24])    the first 24 of 40

The rules of operators say which axes are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from tvm import relax

from tvm_ipc.comm.extents import constant
from tvm_ipc.transform.rules.moving import slices_of
from tvm_ipc.transform.rules.operation import Operation, axis_of, operation_of, same
from tvm_ipc.transform.rules.reshape import RULES as RESHAPES
from tvm_ipc.transform.rules.reshape import groups_of
from tvm_ipc.transform.rules.rule import Refusal
from tvm_ipc.transform.rules.table import rule_of

#: An axis of a tensor: a variable or the name of a weight, the place in a tuple, the axis.
Node: TypeAlias = tuple[Any, tuple[int, ...], int]
#: A tensor: a variable or the name of a weight, and the place in a tuple.
Tensor: TypeAlias = tuple[Any, tuple[int, ...]]


@dataclass(frozen=True)
class MadeOf:
    """How an axis is made of another one: it is repeated, or has axes outside and inside of it."""

    base: Node
    outer: int = 1
    inner: int = 1
    times: int = 1


class Axes:
    """The axes of functions.

    Parameters
    ----------
    functions : for one device.
    weights : names of parameters by their variables; those of one name are one tensor.
    """

    def __init__(self, functions: Iterable[relax.Function], weights: dict[relax.Var, str]) -> None:
        self._parent: dict[Node, Node] = {}
        self._weights = weights
        self._made: list[tuple[Node, MadeOf]] = []
        self._products: list[tuple[Node, list[tuple[Node, int]]]] = []
        self._slices: list[tuple[Node, int, int, Node]] = []
        self._beside_ones: list[tuple[Node, Node, int, list[Node]]] = []
        self._needed: list[Node] = []
        self._consecutive: list[Node] = []
        for function in functions:
            for block in function.body.blocks:
                for binding in block.bindings:
                    if isinstance(binding, relax.VarBinding):
                        self._bind(binding.var, binding.value)
        # One head that is repeated is an axis of its own, other axes of extent 1 are none.
        for node, other, extent, ones in self._beside_ones:
            repeated = {self.of(made.base) for _, made in self._made if made.times > 1}
            base = next((one for one in ones if self.of(one) in repeated), None)
            if base is None:
                self._same(node, other)
            else:
                self._made.append((node, MadeOf(base, inner=extent)))
        #: Axes of which parts have to be consecutive.
        self.consecutive = {self.of(node) for node in self._consecutive}
        needed = {self.of(node) for node in self._needed}
        for node, factors in self._products:
            first = 1 if len(factors) > 2 and self.of(factors[0][0]) in needed else 0
            sizes = [extent for _, extent in factors]
            outer, inner = prod(sizes[:first]), prod(sizes[first + 1 :])
            self._made.append((node, MadeOf(factors[first][0], outer, inner)))
        while self._merge():
            pass
        #: How axes are made of others.
        self.made: dict[Node, list[MadeOf]] = defaultdict(list)
        for node, made in self._made:
            node, base = self.of(node), self.of(made.base)
            found = replace(made, base=base)
            if node != base and found not in self.made[node]:
                self.made[node].append(found)
        #: Pieces of axes: where each begins and ends, and which axis it is.
        self.slices: dict[Node, dict[tuple[int, int], Node]] = defaultdict(dict)
        for node, begin, end, piece in self._slices:
            if self.of(node) != self.of(piece):
                self.slices[self.of(node)].setdefault((begin, end), self.of(piece))

    def of(self, node: Node) -> Node:
        """Return the one that stands for all nodes of an axis."""
        while (parent := self._parent.get(node, node)) != node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def _merge(self) -> bool:
        """Let axes be one that are the same of the same axis; say whether some are.

        That is what the same axis is made of in the same way, and the same piece of it, such as
        the keys in the product with a fused weight, in two functions that share the weight.
        """
        merged = False
        known: dict[tuple[Node, int, int, int], Node] = {}
        for node, made in self._made:
            key = (self.of(node), made.outer, made.inner, made.times)
            base = known.setdefault(key, made.base)
            if self.of(base) != self.of(made.base):
                self._same(base, made.base)
                merged = True
        pieces: dict[tuple[Node, int, int], Node] = {}
        for node, begin, end, piece in self._slices:
            if self.of(node) != self.of(piece):
                first = pieces.setdefault((self.of(node), begin, end), piece)
                if self.of(first) != self.of(piece):
                    self._same(first, piece)
                    merged = True
        return merged

    def _same(self, one: Node, other: Node) -> None:
        one, other = self.of(one), self.of(other)
        if one != other:
            self._parent[other] = one

    # ---- bindings ---------------------------------------------------------------------------

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        results = list(self._tensors(var))
        if isinstance(value, relax.Call):
            operation = operation_of(value, var.ty)
            if operation is None:
                return
            operands = [one for x in value.args for one in self._tensors(x)]
            self._call(operation, [one for one, _ in operands], [one for one, _ in results])
        elif isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem)):
            for (one, ty), (other, _) in zip(results, self._tensors(value), strict=True):
                for axis in range(int(ty.ndim)):
                    self._same((*one, axis), (*other, axis))

    def _tensors(self, x: relax.Expr) -> Iterator[tuple[Tensor, relax.TensorType]]:
        if isinstance(x, relax.Tuple):
            for field in x.fields:
                yield from self._tensors(field)
            return
        path: tuple[int, ...] = ()
        ty = x.ty
        while isinstance(x, relax.TupleGetItem):
            path, x = (int(x.index), *path), x.tuple_value
        key = self._weights.get(x, x) if isinstance(x, relax.Var) else x
        yield from _in_tuple(key, path, ty)

    def _call(self, op: Operation, operands: list[Tensor], results: list[Tensor]) -> None:
        if op.name in RESHAPES:
            self._reshape(op, operands[0], results[0])
            return
        if op.name == "comm.place":
            for axis in range(op.ndim()):
                self._same((*operands[0], axis), (*results[0], axis))
            return
        try:
            rule = rule_of(op)
        except Refusal:
            return
        if rule is None:
            return
        by_label: dict[int, tuple[Node, Any]] = {}
        for tensors, labels, dims in (
            (operands, rule.operands, op.dims),
            (results, rule.results, op.made),
        ):
            for k, (tensor, axes) in enumerate(zip(tensors, labels, strict=True)):
                for axis, label in enumerate(axes):
                    if label is None or label in rule.related:
                        continue
                    if label in rule.whole or (op.name == "take" and label in rule.reduced):
                        self._needed.append((*tensor, axis))
                    if label in rule.plain:
                        self._consecutive.append((*tensor, axis))
                    node, extent = (*tensor, axis), dims(k)[axis]
                    known = by_label.setdefault(label, (node, extent))
                    if same(known[1], extent):
                        self._same(known[0], node)
        self._pieces(op, operands, results)

    def _pieces(self, op: Operation, operands: list[Tensor], results: list[Tensor]) -> None:
        """Note what repeats an axis, and what is a slice of one."""
        if op.name == "repeat" and op.attrs.axis is not None:
            axis = axis_of(op.attrs.axis, op.ndim())
            made = MadeOf((*operands[0], axis), times=int(op.attrs.repeats))
            self._made.append(((*results[0], axis), made))
        elif op.name == "split":
            axis = axis_of(op.attrs.axis, op.ndim())
            begin = 0
            for k, result in enumerate(results):
                extent = constant(op.made(k)[axis])
                if extent is None:
                    return
                node = (*operands[0], axis)
                self._slices.append((node, begin, begin + extent, (*result, axis)))
                begin += extent
        elif op.name == "concat":
            axis, begin = axis_of(op.attrs.axis, op.ndim()), 0
            extents = [constant(op.dims(k)[axis]) for k in range(len(operands))]
            if None in extents:
                return
            for operand, extent in zip(operands, extents, strict=True):
                if 0 < (extent or 0) < sum(one or 0 for one in extents):
                    piece = (*results[0], axis), begin, begin + (extent or 0), (*operand, axis)
                    self._slices.append(piece)
                begin += extent or 0
        elif op.name in ("nn.attention", "nn.attention_bias"):
            queries, keys = (constant(op.dims(k)[2]) for k in range(2))
            self._same((*operands[1], 2), (*operands[2], 2))
            self._same((*operands[0], 2), (*results[0], 2))
            if queries and keys and queries != keys and queries % keys == 0:
                made = MadeOf((*operands[1], 2), times=queries // keys)
                self._made.append(((*operands[0], 2), made))
        elif op.name == "strided_slice":
            for axis, begin, end in slices_of(op):
                node = (*operands[0], axis)
                self._slices.append((node, begin, end, (*results[0], axis)))

    def _reshape(self, op: Operation, operand: Tensor, result: Tensor) -> None:
        before, after = op.dims(), op.made()
        for old, new in groups_of(before, after):
            one = [((*operand, axis), before[axis]) for axis in old]
            other = [((*result, axis), after[axis]) for axis in new]
            self._group(one, other)

    def _group(self, one: list[tuple[Node, Any]], other: list[tuple[Node, Any]]) -> None:
        """Note axes before and after a reshape that have as many elements."""
        long = [
            [(node, extent) for node, extent in axes if constant(extent) != 1]
            for axes in (one, other)
        ]
        if len(long[0]) == len(long[1]) == 1:
            ((node, extent),), ((twin, _),) = long
            size = constant(extent)
            for axes, alone, beside in ((other, node, twin), (one, twin, node)):
                before = [each for each, _ in axes[: [each for each, _ in axes].index(beside)]]
                if size and before and len(one) + len(other) - len(axes) == 1:
                    self._beside_ones.append((alone, beside, size, before))
                    return
            self._same(node, twin)
            return
        for whole, factors in (long, long[::-1]):
            sizes = [(each, constant(extent) or 0) for each, extent in factors]
            if len(whole) == 1 and sizes and all(size for _, size in sizes):
                self._products.append((whole[0][0], sizes))


def _in_tuple(
    key: Any, path: tuple[int, ...], ty: relax.Type
) -> Iterator[tuple[Tensor, relax.TensorType]]:
    if isinstance(ty, relax.TensorType):
        yield (key, path), ty
    elif isinstance(ty, relax.TupleType):
        for k, field in enumerate(ty.fields):
            yield from _in_tuple(key, (*path, k), field)
