# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of PrimFuncs, which follow from the indices of their buffers.

    for i, j in T.grid(4, 10):              i is axis 0 of B, j is axis 1 of A and of B
        with T.sblock("top"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi + 4, vj]       the ranks need all of axis 0, and may share axis 1

Two axes belong together if one loop counts both. Ranks may share an axis that loops only count, and
one over which a result is summed. An index that is computed, another reduction or a condition needs
all of the axis. A PrimFunc that is compiled for constant extents is compiled again for the extents
of shards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm import tirx

from tvm_ipc.analysis.retype_primfunc_scopes import retyped_buffer
from tvm_ipc.comm.extent_arithmetic import constant, divides
from tvm_ipc.spmd.rules.axis_label_rule import ALL_OF_IT, Labels, Rule
from tvm_ipc.spmd.rules.operation import same
from tvm_ipc.tvm_moved_names import SBlock, SBlockRealize, TensorLoad, TensorRegion

#: A loop variable, or an axis of a buffer: the hash of the variable, and the axis or None.
_Node: TypeAlias = tuple[int, int | None]
#: The types of block variables whose iterations are independent, and that are reduced over.
_PARALLEL, _REDUCED = 0, 2


class PrimFuncAxes:
    """The axes of the buffers of a PrimFunc, and the loops that count them.

    Parameters
    ----------
    function : the PrimFunc.

    Attributes
    ----------
    buffers : its parameters that are buffers: the operands, then the results.
    is_known : whether all uses of its buffers are loads and stores.
    """

    def __init__(self, function: tirx.PrimFunc) -> None:
        self.function = function
        self._parent: dict[_Node, _Node] = {}
        self._extents: dict[_Node, list[Any]] = defaultdict(list)
        self._whole: set[_Node] = set()
        #: How often variables occur, and how often as a plain index or in a definition.
        self._uses: Counter[int] = Counter()
        self._plain: Counter[int] = Counter()
        self._buffers: set[int] = set()
        #: How often buffers are loaded and stored.
        self._loads: Counter[int] = Counter()
        self._stores: Counter[int] = Counter()
        #: Variables that blocks reduce over.
        self._sums: list[tuple[_Node, SBlock]] = []
        self._indices: list[tuple[_Node, int]] = []
        #: Loop variables with the stores in their loops: the buffers and the plain indices.
        self._stores_in: list[tuple[int, list[tuple[int, list[int]]]]] = []
        #: Variables that values and conditions read.
        self._read: set[int] = set()
        self.buffers = [p for p in function.params if isinstance(p.ty, tirx.BufferType)]
        for param in function.params:
            if isinstance(param.ty, tirx.BufferType):
                self._declare(param)
            else:  # callers pass the extent of the whole tensor
                self._read.add(hash(param))
        tvm_ffi.structural_walk(
            function.body,
            [
                (tirx.Var, self._var),
                (TensorLoad, self._load),
                (tirx.BufferStore, self._store),
                (tirx.IfThenElse, lambda branch: self._reads(branch.condition)),
                (tirx.Evaluate, lambda evaluate: self._reads(evaluate.value)),
                (tirx.Bind, lambda bind: self._reads(bind.value)),
                (TensorRegion, self._region),
                (SBlockRealize, self._block),
                (tirx.For, self._loop),
            ],
        )
        self.is_known = all(
            self._uses[var] == self._plain[var] for var in self._buffers if self._uses[var]
        )
        for node in list(self._extents):
            if node[1] is None and self._uses[node[0]] != self._plain[node[0]]:
                self._whole.add(node)
        for node, index in self._indices:
            if (index, None) not in self._extents:  # a variable that no loop counts
                self._whole.add(node)
        for node, extents in self._extents.items():
            symbols = {hash(x) for extent in extents for x in _symbols(extent)}
            if self._read & symbols:
                self._whole.add(node)
        #: The results that are summed over each group of axes.
        self._summed: dict[_Node, set[int]] = defaultdict(set)
        params = {hash(param) for param in function.params}
        for node, block in self._sums:
            if self._is_sum(block, params):
                self._summed[self._find(node)].add(hash(block.body.buffer))
            else:
                self._whole.add(node)
        for loop, stores in self._stores_in:
            root = self._find((loop, None))
            for buffer, indices in stores:
                is_counted = any(self._find((index, None)) == root for index in indices)
                if not is_counted and buffer not in self._summed[root]:
                    self._whole.add((loop, None))  # iterations overwrite each other

    def rule(self, operands: int) -> Rule:
        """Return the rule of a call with this number of operands.

        Parameters
        ----------
        operands : how many of the buffers are operands; the others are results.
        """
        numbers: dict[_Node, int] = {}
        labels = [
            self._labels(param, lambda node: numbers.setdefault(self._find(node), len(numbers)))
            for param in self.buffers
        ]
        groups = self._groups()
        results = {hash(result) for result in self.buffers[operands:]}
        whole: dict[int, str] = {}
        reduced: dict[int, str] = {}
        divisibility: dict[int, Callable[[int], str]] = {}
        for root, label in numbers.items():
            nodes = groups[root]
            extents = [extent for node in nodes for extent in self._extents[node]]
            has_loop = any(axis is None for _, axis in nodes)
            is_kept = any(label in axes for axes in labels[operands:])
            sums = self._summed[root]
            if not has_loop or self._whole.intersection(nodes):
                whole[label] = ALL_OF_IT
            elif not all(same(extents[0], extent) for extent in extents):
                whole[label] = "its loops have other extents"
            elif bool(sums) == is_kept or (sums and sums != results):
                whole[label] = ALL_OF_IT
            else:
                if sums:
                    reduced[label] = "sum"
                # A sum over padding may be no sum of zeros.
                if label in reduced or constant(extents[0]) is not None:
                    divisibility[label] = _divided(extents[0])
        return Rule(
            tuple(labels[:operands]),
            tuple(labels[operands:]),
            reduced=reduced,
            whole=whole,
            divisibility=divisibility,
        )

    def for_extents(self, shapes: Sequence[Sequence[Any]]) -> tirx.PrimFunc:
        """Return the PrimFunc for buffers with other extents, which a rule allows.

        Parameters
        ----------
        shapes : the extents of each buffer.
        """
        extents: dict[_Node, int] = {}
        for param, shape in zip(self.buffers, shapes, strict=True):
            for axis, extent in enumerate(shape):
                number, whole = constant(extent), constant(param.ty.shape[axis])
                if number is not None and whole is not None and number != whole:
                    extents[self._find((hash(param), axis))] = number
        variables: dict[int, tirx.Var] = {}

        def new_extent(node: _Node, whole: Any) -> Any:
            number = extents.get(self._find(node))
            return whole if number is None else tirx.IntImm(str(whole.ty), number)

        def of_variable(var: tirx.Var) -> tirx.Var:
            if not isinstance(var.ty, tirx.BufferType):
                return var
            if hash(var) not in variables:
                shape = [
                    new_extent((hash(var), axis), extent)
                    for axis, extent in enumerate(var.ty.shape)
                ]
                variables[hash(var)] = tirx.Var(
                    var.name, retyped_buffer(var.ty, shape=shape), var.span
                )
            return variables[hash(var)]

        def of_loop(loop: tirx.For) -> tirx.For:
            extent = new_extent((hash(loop.loop_var), None), loop.extent)
            if extent is loop.extent:
                return loop
            return tirx.For(
                loop.loop_var,
                loop.min,
                extent,
                loop.kind,
                loop.body,
                loop.thread_binding,
                loop.annotations,
                loop.step,
                loop.span,
            )

        def of_iteration(iteration: tirx.IterVar) -> tirx.IterVar:
            whole = iteration.dom.extent
            extent = new_extent((hash(iteration.var), None), whole)
            if extent is whole:
                return iteration
            domain = tvm.ir.Range.from_min_extent(iteration.dom.min, extent)
            return tirx.IterVar(domain, iteration.var, iteration.iter_type, iteration.thread_tag)

        params = [of_variable(param) for param in self.function.params]
        body = tvm_ffi.structural_map(
            self.function.body,
            [(tirx.Var, of_variable), (tirx.For, of_loop), (tirx.IterVar, of_iteration)],
        )
        function = self.function
        return tirx.PrimFunc(params, body, function.ret_type, function.attrs, function.span)

    # ---- the walk ---------------------------------------------------------------------------

    def _declare(self, buffer: tirx.Var) -> None:
        if isinstance(buffer.ty, tirx.BufferType) and hash(buffer) not in self._buffers:
            self._buffers.add(hash(buffer))
            for axis, extent in enumerate(buffer.ty.shape):
                self._extents[hash(buffer), axis].append(extent)

    def _var(self, var: tirx.Var) -> None:
        self._uses[hash(var)] += 1
        self._declare(var)

    def _access(self, buffer: tirx.Var, indices: Sequence[Any]) -> None:
        self._declare(buffer)
        self._plain[hash(buffer)] += 1
        for axis, index in enumerate(indices):
            self._index((hash(buffer), axis), index)

    def _load(self, load: TensorLoad) -> None:
        self._access(load.source, load.indices)
        self._loads[hash(load.source)] += 1

    def _store(self, store: tirx.BufferStore) -> None:
        self._stores[hash(store.buffer)] += 1
        self._access(store.buffer, store.indices)
        self._reads(store.value)

    def _reads(self, value: Any) -> None:
        def read(var: tirx.Var) -> Any:
            if isinstance(var.ty, tirx.BufferType):  # its extents are not read
                return tvm_ffi.WalkResult.SKIP
            self._read.add(hash(var))
            return None

        tvm_ffi.structural_walk(value, [(tirx.Var, read)], order="pre")

    def _index(self, node: _Node, index: Any) -> None:
        if isinstance(index, tirx.Var):
            self._plain[hash(index)] += 1
            self._indices.append((node, hash(index)))
            self._unite(node, (hash(index), None))
        elif constant(index) != 0 or constant(self._extents[node][0]) != 1:
            self._whole.add(node)

    def _region(self, region: TensorRegion) -> None:
        self._plain[hash(region.source)] += 1
        for extent in region.region:
            if isinstance(extent.min, tirx.Var) and constant(extent.extent) == 1:
                self._plain[hash(extent.min)] += 1

    def _block(self, realize: SBlockRealize) -> None:
        block = realize.block
        for buffer in block.alloc_buffers:
            self._declare(buffer)
            self._plain[hash(buffer)] += 1
        for iteration, value in zip(block.iter_vars, realize.iter_values, strict=True):
            node = hash(iteration.var), None
            self._plain[hash(iteration.var)] += 1
            self._extents[node].append(iteration.dom.extent)
            if isinstance(value, tirx.Var):
                self._plain[hash(value)] += 1
                self._unite(node, (hash(value), None))
            else:
                self._whole.add(node)
            kind = int(iteration.iter_type)
            if kind == _REDUCED and constant(iteration.dom.min) == 0:
                self._sums.append((node, block))
            elif kind != _PARALLEL or constant(iteration.dom.min) != 0:
                self._whole.add(node)

    def _loop(self, loop: tirx.For) -> None:
        node = hash(loop.loop_var), None
        self._plain[hash(loop.loop_var)] += 1
        self._extents[node].append(loop.extent)
        if constant(loop.min) != 0 or loop.thread_binding is not None:
            self._whole.add(node)
        stores: list[tuple[int, list[int]]] = []

        def store(each: tirx.BufferStore) -> None:
            indices = [hash(index) for index in each.indices if isinstance(index, tirx.Var)]
            stores.append((hash(each.buffer), indices))

        tvm_ffi.structural_walk(loop.body, [(tirx.BufferStore, store)])
        self._stores_in.append((hash(loop.loop_var), stores))

    def _is_sum(self, block: SBlock, params: Set[int]) -> bool:
        """Return whether a block only adds to elements of a result, which nothing else uses."""
        first, store = block.init, block.body
        if not isinstance(first, tirx.BufferStore) or not isinstance(store, tirx.BufferStore):
            return False
        buffer, value = hash(store.buffer), store.value
        if not isinstance(value, tirx.Add) or buffer not in params:
            return False
        is_alone = (self._stores[buffer], self._loads[buffer]) == (2, 1)
        same_element = tvm_ffi.structural_equal(list(first.indices), list(store.indices))
        sums = [
            each
            for each in (value.a, value.b)
            if isinstance(each, TensorLoad) and hash(each.source) == buffer
        ]
        zero = first.value
        starts_at_zero = isinstance(zero, (tirx.IntImm, tirx.FloatImm)) and zero.value == 0
        return (
            is_alone
            and same_element
            and len(sums) == 1
            and tvm_ffi.structural_equal(list(sums[0].indices), list(store.indices))
            and hash(first.buffer) == buffer
            and starts_at_zero
        )

    # ---- groups -----------------------------------------------------------------------------

    def _find(self, node: _Node) -> _Node:
        while (parent := self._parent.get(node, node)) != node:
            node = parent
        return node

    def _unite(self, node: _Node, equal_node: _Node) -> None:
        root, equal_root = self._find(node), self._find(equal_node)
        if root != equal_root:
            self._parent[equal_root] = root

    def _groups(self) -> Mapping[_Node, list[_Node]]:
        groups: dict[_Node, list[_Node]] = defaultdict(list)
        for node in self._extents:
            groups[self._find(node)].append(node)
        return groups

    def _labels(self, param: tirx.Var, number: Callable[[_Node], int]) -> Labels:
        nodes = [(hash(param), axis) for axis in range(len(param.ty.shape))]
        return tuple(
            None if constant(self._extents[node][0]) == 1 else number(node) for node in nodes
        )


def primfunc_rule(function: tirx.PrimFunc, operands: int, results: int) -> Rule | None:
    """Return the rule of a PrimFunc, or None if its buffers do not tell it.

    Parameters
    ----------
    function : the PrimFunc.
    operands, results : the numbers of its operands and results.
    """
    axes = PrimFuncAxes(function)
    fits = axes.is_known and len(axes.buffers) == operands + results
    return axes.rule(operands) if fits else None


def _divided(extent: Any) -> Callable[[int], str]:
    def why_not(workers: int) -> str:
        if divides(workers, extent):
            return ""
        if constant(extent) is None:
            return (
                f"it sums over {extent} elements, which may be no multiple of the {workers} ranks"
            )
        return (
            f"it is compiled for an extent of {constant(extent)}, which is no multiple of the "
            f"{workers} ranks: make that extent symbolic"
        )

    return why_not


def _symbols(extent: Any) -> list[tirx.Var]:
    is_symbolic = constant(extent) is None and not isinstance(extent, int)
    return list(tirx.analysis.undefined_vars(extent)) if is_symbolic else []
