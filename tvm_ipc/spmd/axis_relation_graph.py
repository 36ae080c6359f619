# SPDX-License-Identifier: Apache-2.0
"""Relations between the axes of a program: equal axes, products, repetitions and slices.

    q = R.matmul(x, R.permute_dims(wq))         (n, 24)         axis 0 of wq is axis 1 of q
    heads = R.reshape(q, (n, 6, 4))             24 is 6 times 4
    keys = R.repeat(k, 3, axis=1)               (n, 2, 4) -> (n, 6, 4): 6 is 2, each 3 times
    scores = R.einsum("nhw,mhw->hnm", ...)      6 is 6: heads are in the order of those of keys
    q = R.strided_slice(qkv, [1], [0], [24])    the first 24 of 40

Sharding rules define which axes are equal. Each set of equal axes has one representative node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

from tvm import relax

from tvm_ipc.analysis.resolve_variables import body_bindings
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.data_movement import slices_of
from tvm_ipc.spmd.rules.operation import Operation, operation_of, same
from tvm_ipc.spmd.rules.operator_rule_table import rule_for
from tvm_ipc.spmd.rules.reshape import RULES as RESHAPES
from tvm_ipc.spmd.rules.reshape import groups_of

#: An axis of a tensor: a variable or the name of a weight, the path in a tuple, the axis.
Node: TypeAlias = tuple[Any, tuple[int, ...], int]
#: A tensor: a variable or the name of a weight, and the path in a tuple.
Tensor: TypeAlias = tuple[Any, tuple[int, ...]]


@dataclass(frozen=True)
class DerivedFrom:
    """The derivation of an axis from a base axis.

    Attributes
    ----------
    base : the base axis.
    outer, inner : the extents that are merged with the base axis, outside and inside of it.
    times : the number of repetitions of each element.
    """

    base: Node
    outer: int = 1
    inner: int = 1
    times: int = 1


class Axes:
    """The axes of several functions, and their relations.

    Parameters
    ----------
    functions : functions for one device.
    weights : the names of weights; variables with one name are one tensor.

    Attributes
    ----------
    contiguous : axes whose shards have to be consecutive blocks.
    derived : the derivations of each axis.
    slices : the slices of each axis, by their begin and end, with the axes of the results.
    """

    def __init__(self, functions: Iterable[relax.Function], weights: dict[relax.Var, str]) -> None:
        self._parent: dict[Node, Node] = {}
        self._weights = weights
        self._derived: list[tuple[Node, DerivedFrom]] = []
        #: Axes that are products of other axes, each with its extent.
        self._products: list[tuple[Node, list[tuple[Node, int]]]] = []
        self._slices: list[tuple[Node, int, int, Node]] = []
        #: Equal axes, their extent, and the axes of extent 1 outside of the second one.
        self._inside_unit_axes: list[tuple[Node, Node, int, list[Node]]] = []
        self._needed: list[Node] = []
        self._contiguous: list[Node] = []
        for function in functions:
            for binding in body_bindings(function):
                if isinstance(binding, relax.VarBinding):
                    self._bind(binding.var, binding.value)
        # An axis of extent 1 matters only if it is repeated, as a single head of keys is.
        for node, equal_node, extent, unit_axes in self._inside_unit_axes:
            repeated = {self.of(each.base) for _, each in self._derived if each.times > 1}
            base = next((axis for axis in unit_axes if self.of(axis) in repeated), None)
            if base is None:
                self._unite(node, equal_node)
            else:
                self._derived.append((node, DerivedFrom(base, inner=extent)))
        self.contiguous = {self.of(node) for node in self._contiguous}
        needed = {self.of(node) for node in self._needed}
        for node, factors in self._products:
            first = 1 if len(factors) > 2 and self.of(factors[0][0]) in needed else 0
            sizes = [extent for _, extent in factors]
            outer, inner = prod(sizes[:first]), prod(sizes[first + 1 :])
            self._derived.append((node, DerivedFrom(factors[first][0], outer, inner)))
        while self._unite_derived():
            pass
        self.derived: dict[Node, list[DerivedFrom]] = defaultdict(list)
        for node, derivation in self._derived:
            node, base = self.of(node), self.of(derivation.base)
            derivation = replace(derivation, base=base)
            if node != base and derivation not in self.derived[node]:
                self.derived[node].append(derivation)
        self.slices: dict[Node, dict[tuple[int, int], Node]] = defaultdict(dict)
        for node, begin, end, piece in self._slices:
            if self.of(node) != self.of(piece):
                self.slices[self.of(node)].setdefault((begin, end), self.of(piece))

    def of(self, node: Node) -> Node:
        """Return the representative of all nodes that are the same axis."""
        while (parent := self._parent.get(node)) is not None:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def _unite_derived(self) -> bool:
        """Unite the bases, and the slices, that one axis has in the same way; return if any were.

        An example is the slice of the keys in a fused weight, in two functions with this weight.
        """
        united = False
        bases: dict[tuple[Node, int, int, int], Node] = {}
        for node, derivation in self._derived:
            key = (self.of(node), derivation.outer, derivation.inner, derivation.times)
            base = bases.setdefault(key, derivation.base)
            if self.of(base) != self.of(derivation.base):
                self._unite(base, derivation.base)
                united = True
        pieces: dict[tuple[Node, int, int], Node] = {}
        for node, begin, end, piece in self._slices:
            if self.of(node) != self.of(piece):
                first = pieces.setdefault((self.of(node), begin, end), piece)
                if self.of(first) != self.of(piece):
                    self._unite(first, piece)
                    united = True
        return united

    def _unite(self, node: Node, equal_node: Node) -> None:
        """Record that two nodes are the same axis."""
        root, equal_root = self.of(node), self.of(equal_node)
        if root != equal_root:
            self._parent[equal_root] = root

    # ---- bindings ---------------------------------------------------------------------------

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        results = list(self._tensors(var))
        if isinstance(value, relax.Call):
            operation = operation_of(value, var.ty)
            if operation is None:
                return
            operands = [tensor for x in value.args for tensor, _ in self._tensors(x)]
            self._call(operation, operands, [tensor for tensor, _ in results])
        elif isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem)):
            for (result, ty), (tensor, _) in zip(results, self._tensors(value), strict=True):
                for axis in range(int(ty.ndim)):
                    self._unite((*result, axis), (*tensor, axis))

    def _tensors(self, x: relax.Expr) -> Iterator[tuple[Tensor, relax.TensorType]]:
        """Yield the tensors in an expression with their types."""
        for (key, path), ty in tensors_of(x):
            key = self._weights.get(key, key) if isinstance(key, relax.Var) else key
            yield (key, path), ty

    def _call(self, op: Operation, operands: list[Tensor], results: list[Tensor]) -> None:
        if op.operator in RESHAPES:
            self._reshape(op, operands[0], results[0])
            return
        if op.operator == "comm.place":
            for axis in range(op.ndim()):
                self._unite((*operands[0], axis), (*results[0], axis))
            return
        rule = rule_for(op)
        if rule is None:
            return
        by_label: dict[int, tuple[Node, Any]] = {}
        for tensors, labels, dims in (
            (operands, rule.operands, op.dims),
            (results, rule.results, op.result_dims),
        ):
            for k, (tensor, axes) in enumerate(zip(tensors, labels, strict=True)):
                tensor_extents = dims(k)
                for axis, label in enumerate(axes):
                    if label is None or label in rule.related:
                        continue
                    if label in rule.whole or (op.operator == "take" and label in rule.reduced):
                        self._needed.append((*tensor, axis))
                    if label in rule.contiguous:
                        self._contiguous.append((*tensor, axis))
                    node, extent = (*tensor, axis), tensor_extents[axis]
                    if label not in by_label:
                        by_label[label] = node, extent
                        continue
                    first_node, first_extent = by_label[label]
                    if same(first_extent, extent):
                        self._unite(first_node, node)
        self._derive(op, operands, results)

    def _derive(self, op: Operation, operands: list[Tensor], results: list[Tensor]) -> None:
        """Record the repetitions and slices of axes in a call."""
        if op.operator == "repeat" and op.attrs.axis is not None:
            derivation = DerivedFrom((*operands[0], op.axis), times=int(op.attrs.repeats))
            self._derived.append(((*results[0], op.axis), derivation))
        elif op.operator == "split":
            self._pieces(operands[0], results, op.axis, op.results)
        elif op.operator == "concat":
            self._pieces(results[0], operands, op.axis, op.operands)
        elif op.operator in ("nn.attention", "nn.attention_bias"):
            queries, keys = (constant(op.dims(k)[2]) for k in range(2))
            self._unite((*operands[1], 2), (*operands[2], 2))
            self._unite((*operands[0], 2), (*results[0], 2))
            if queries and keys and queries != keys and queries % keys == 0:
                derivation = DerivedFrom((*operands[1], 2), times=queries // keys)
                self._derived.append(((*operands[0], 2), derivation))
        elif op.operator == "strided_slice":
            for axis, begin, end in slices_of(op):
                node = (*operands[0], axis)
                self._slices.append((node, begin, end, (*results[0], axis)))

    def _pieces(
        self,
        whole: Tensor,
        pieces: Sequence[Tensor],
        axis: int,
        types: Sequence[relax.TensorType],
    ) -> None:
        """Record that pieces are consecutive slices of a whole along an axis."""
        known = [constant((extents(ty) or [])[axis]) for ty in types]
        ends = list(accumulate(extent or 0 for extent in known))
        for piece, extent, end in zip(pieces, known, ends, strict=True):
            if None not in known and 0 < (extent or 0) < ends[-1]:
                self._slices.append(((*whole, axis), end - (extent or 0), end, (*piece, axis)))

    def _reshape(self, op: Operation, operand: Tensor, result: Tensor) -> None:
        before, after = op.dims(), op.result_dims()
        for old, new in groups_of(before, after):
            old_axes = [((*operand, axis), before[axis]) for axis in old]
            new_axes = [((*result, axis), after[axis]) for axis in new]
            self._reshape_group(old_axes, new_axes)

    def _reshape_group(
        self, old_axes: list[tuple[Node, Any]], new_axes: list[tuple[Node, Any]]
    ) -> None:
        """Record the relation of axes before and after a reshape that have equal products."""
        long_old, long_new = (
            [(node, extent) for node, extent in axes if constant(extent) != 1]
            for axes in (old_axes, new_axes)
        )
        if len(long_old) == len(long_new) == 1:
            ((old_node, extent),), ((new_node, _),) = long_old, long_new
            size = constant(extent)
            for axes, single, in_group in (
                (new_axes, old_node, new_node),
                (old_axes, new_node, old_node),
            ):
                nodes = [node for node, _ in axes]
                outside = nodes[: nodes.index(in_group)]
                if size and outside and len(old_axes) + len(new_axes) - len(axes) == 1:
                    self._inside_unit_axes.append((single, in_group, size, outside))
                    return
            self._unite(old_node, new_node)
            return
        for product, factors in ((long_old, long_new), (long_new, long_old)):
            sizes = [(node, constant(extent) or 0) for node, extent in factors]
            if len(product) == 1 and sizes and all(size for _, size in sizes):
                self._products.append((product[0][0], sizes))


def tensors_of(x: relax.Expr) -> Iterator[tuple[Tensor, relax.TensorType]]:
    """Yield the tensors in an expression with their types."""
    if isinstance(x, relax.Tuple):
        for field in x.fields:
            yield from tensors_of(field)
        return
    path: tuple[int, ...] = ()
    ty = x.ty
    while isinstance(x, relax.TupleGetItem):
        path, x = (int(x.index), *path), x.tuple_value
    yield from _in_tuple(x, path, ty)


def _in_tuple(
    key: Any, path: tuple[int, ...], ty: relax.Type
) -> Iterator[tuple[Tensor, relax.TensorType]]:
    if isinstance(ty, relax.TensorType):
        yield (key, path), ty
    elif isinstance(ty, relax.TupleType):
        for k, field in enumerate(ty.fields):
            yield from _in_tuple(key, (*path, k), field)
