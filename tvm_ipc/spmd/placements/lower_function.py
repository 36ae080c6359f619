# SPDX-License-Identifier: Apache-2.0
"""Lowering of a function of a global program to the function that one rank runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm.relax.analysis import definable_tir_vars_in_type

from tvm_ipc.analysis.walk_and_rewrite_bindings import walk
from tvm_ipc.comm import Mesh, Partial
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.place_op import is_place, mesh_of
from tvm_ipc.comm.placements import Placements, format_placements, placements_of
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.lower_call import lower_call
from tvm_ipc.spmd.placements.placed_tensor import PlacedTensor, local_type, sharded_axes, uneven
from tvm_ipc.spmd.placements.redistribute import NAME
from tvm_ipc.spmd.placements.relax_vars_to_rank_values import (
    RankValue,
    RankValues,
    UniformValue,
    name_of,
)


def mesh_of_function(name: str, function: relax.Function) -> Mesh | None:
    """Return the mesh of the placements in a function, or None if it has no placements."""
    meshes = {mesh_of(value.attrs): None for _, value in walk(function) if is_place(value)}
    if len(meshes) > 1:
        raise TransformError(
            f"{NAME}: function {name!r} places tensors on {' and on '.join(map(str, meshes))}; a "
            "function uses one mesh, so give one mesh all axes"
        )
    return next(iter(meshes), None)


@dataclass(frozen=True, eq=False)
class StreamMark:
    """An axis that `R.comm.place(..., stream=axis)` marks for pipelining over streams.

    Attributes
    ----------
    subject : the mark, for reports.
    value : the marked tensor on the rank.
    axis : the marked axis.
    """

    subject: str
    value: relax.Expr
    axis: int


def has_marks(function: relax.Function) -> bool:
    """Return whether a placement in a function marks an axis for streams."""
    return any(is_place(value) and value.attrs.stream is not None for _, value in walk(function))


def lower_function(
    name: str, function: relax.Function, mesh: Mesh, module: tvm.IRModule
) -> tuple[relax.Function, list[StreamMark]]:
    """Return the function that one rank of the mesh runs, and the marks for streams in it."""
    lowering = _FunctionLowering(RankValues(name, mesh, module), function)
    return lowering.function, lowering.marks


class _FunctionLowering:
    """The lowering of one function, whose result is the attribute `function`."""

    def __init__(self, values: RankValues, function: relax.Function) -> None:
        self.values = values
        self.mesh, self.builder, self.moves = values.mesh, values.builder, values.moves
        #: Variables that the function returns, and the values that the caller gets for them.
        self.results: dict[relax.Var, relax.Expr] = {}
        self.marks: list[StreamMark] = []
        self.returned = _variables(function.body.body)
        params = self._params(function)
        with self.builder.function(values.name, params, pure=function.is_pure, private=True):
            try:
                for index, block in enumerate(function.body.blocks, start=1):
                    self._block(block, last=index == len(function.body.blocks))
                result = self._result(function.body.body)
            except Exception:
                # BlockBuilder prints a warning on stderr if a block is never ended.
                self.builder._end_block()
                raise
            self.builder.emit_func_output(result)
        (built,) = self.builder.get().functions.values()
        self.function = relax.Function(
            built.params, built.body, built.ret_ty, function.is_pure, function.attrs, function.span
        )

    # ---- parameters and results -------------------------------------------------------------

    def _params(self, function: relax.Function) -> list[relax.Var]:
        explicit: dict[relax.Var, Placements] = {}
        for _, value in walk(function):
            is_explicit = is_place(value) and not value.attrs.inserted
            if is_explicit and isinstance(value.args[0], relax.Var):
                placements = placements_of(self.mesh, value.attrs.placements)
                explicit.setdefault(value.args[0], placements)
        params = []
        for param in function.params:
            placements = explicit.get(param, self.values.replicas)
            local = param
            if not isinstance(param.ty, relax.TensorType):
                self.values[param] = UniformValue(param)
            else:
                self._check_known(str(param.name), param.ty, placements)
                if sharded_axes(self.mesh, placements):
                    ty = local_type(self.mesh, param.ty, placements)
                    local = relax.Var(str(param.name), ty)
                # Callers pass shards with zeros in the padding.
                zeros = uneven(self.mesh, placements, param.ty)
                self.values[param] = PlacedTensor(local, param.ty, placements, zeros)
            params.append(local)
        self._check_symbols(function.params, params)
        return params

    def _check_known(self, subject: str, ty: relax.TensorType, placements: Placements) -> None:
        if extents(ty) is None and sharded_axes(self.mesh, placements):
            raise self.values.error(
                f"{subject} is placed {format_placements(self.mesh, placements)}, and its shape "
                f"is not known: {ty}; declare its extents, which may be symbolic"
            )

    def _check_symbols(self, whole: Iterable[relax.Var], local: Iterable[relax.Var]) -> None:
        """Raise an error if a symbol of the global program is unknown on the ranks."""
        known = {symbol for param in local for symbol in definable_tir_vars_in_type(param.ty)}
        for param in whole:
            for symbol in definable_tir_vars_in_type(param.ty):
                if symbol not in known:
                    raise self.values.error(
                        f"no rank knows {symbol.name}, since each has only a shard of "
                        f"{param.name}, which is {param.ty}; make the extent a multiple of the "
                        f"number of ranks, such as {symbol.name} * 2, or add a parameter of the "
                        f"type R.Shape([{str(symbol.name)!r}])"
                    )

    def _result(self, body: relax.Expr) -> relax.Expr:
        if isinstance(body, relax.Tuple):
            return relax.Tuple([self._result(field) for field in body.fields])
        if isinstance(body, relax.Var) and body in self.results:
            return self.results[body]
        finished = self._finished(self.values.lookup(body), name_of(body))
        return self.values.as_argument(finished)

    def _is_finished(self, value: RankValue) -> bool:
        """Return whether a value can be returned to the caller as it is."""
        if isinstance(value, tuple):
            return all(map(self._is_finished, value))
        if not isinstance(value, PlacedTensor):
            return True
        return value.replicated or (value.is_explicit and not self._nonzero_padding(value))

    def _finished(self, value: RankValue, name: str) -> RankValue:
        """Return the value for the caller: replicated unless placed, with zeros in the padding."""
        if isinstance(value, tuple):
            return tuple(self._finished(field, f"{name}[{k}]") for k, field in enumerate(value))
        if self._is_finished(value):
            return value
        assert isinstance(value, PlacedTensor)
        if not value.is_explicit:
            why = "it is a result, and results without R.comm.place are replicated"
            return self.moves.move(value, self.values.replicas, name, "inserted", why)
        why = "it is a result, and the shards of results have zeros beyond the end"
        return self.moves.fill(value, self._nonzero_padding(value), 0, name, why)

    def _nonzero_padding(self, x: PlacedTensor) -> frozenset[int]:
        """Return the axes of a tensor whose padding may not be zero."""
        return uneven(self.mesh, x.placements, x.whole) - x.zeros

    # ---- bindings ---------------------------------------------------------------------------

    def _block(self, block: relax.BindingBlock, last: bool) -> None:
        dataflow = isinstance(block, relax.DataflowBlock)
        with self.builder.dataflow() if dataflow else nullcontext():
            for binding in block.bindings:
                var = binding.var
                value = self._of_binding(binding)
                if dataflow and not isinstance(var, relax.DataflowVar):
                    self.values[var] = self._output(var, value, last)
                else:
                    self.values[var] = self.values.bound(value, str(var.name))
        self.moves.end_block()

    def _output(self, var: relax.Var, value: RankValue, last: bool) -> RankValue:
        """Emit a value as an output of its block, and return the value that the program uses."""
        name = str(var.name)
        if var not in self.returned:
            return self._emitted_output(value, name)
        if self._is_finished(value):
            result = self._emitted_output(value, name)
            self.results[var] = self.values.as_argument(result)
            return result
        # The program continues with the value as it is, and the caller gets a finished copy.
        kept = self.values.bound(value, name) if last else self._emitted_output(value, name)
        finished = self._emitted_output(self._finished(kept, name), name)
        self.results[var] = self.values.as_argument(finished)
        return kept

    def _emitted_output(self, value: RankValue, name: str) -> RankValue:
        if isinstance(value, tuple):
            fields = enumerate(value)
            return tuple(self._emitted_output(field, f"{name}_{k}") for k, field in fields)
        return replace(value, value=self.builder.emit_output(value.value, name))

    def _of_binding(self, binding: relax.Binding) -> RankValue:
        """Return the value of a binding on one rank."""
        var, value = binding.var, binding.value
        if isinstance(binding, relax.MatchCast):
            whole = self.values.whole(value, "R.match_cast")
            return self.values.uniform(self.builder.match_cast(whole, binding.ty))
        if is_place(value):
            return self._place(str(var.name), value)
        if isinstance(value, relax.Call):
            return lower_call(self.values, var, value)
        if isinstance(value, relax.TupleGetItem):
            fields = self.values.lookup(value.tuple_value)
            if isinstance(fields, tuple):
                field: RankValue = fields[int(value.index)]
                return field
            return self.values.uniform(relax.TupleGetItem(fields.value, int(value.index)))
        if isinstance(value, (relax.If, relax.Function)):
            kind = "an if" if isinstance(value, relax.If) else "a function"
            raise self.values.error(
                f"{var.name} is {kind}, and placements do not reach into it; move that part of the "
                "program to a function of its own, without R.comm.place"
            )
        return self.values.lookup(value)

    def _place(self, name: str, value: relax.Call) -> RankValue:
        attrs = value.attrs
        x = self.values.tensor(value.args[0])
        target = placements_of(self.mesh, attrs.placements)
        subject = name_of(value.args[0])
        if x.placements != target:
            self._check_known(subject, x.whole, target)
            for source, destination in zip(x.placements, target, strict=True):
                if isinstance(destination, Partial) and source != destination:
                    raise self.values.error(
                        f"{name}: a tensor that is {source} cannot become {destination}, since "
                        "there is nothing left to reduce; place it as comm.Replica() or "
                        "comm.Shard(axis)"
                    )
        if attrs.stream is not None:
            mark = f"stream={attrs.stream} of {name}"
            self.marks.append(StreamMark(mark, x.value, int(attrs.stream)))
        before, after = (format_placements(self.mesh, p) for p in (x.placements, target))
        why = f"it is {before}, and {name} {after}"
        inserted = bool(attrs.inserted)
        moved = self.moves.move(x, target, subject, "inserted" if inserted else "made", why)
        return replace(moved, is_explicit=not inserted)


def _variables(body: relax.Expr) -> frozenset[relax.Var]:
    """Return the variables in the result of a function."""
    if isinstance(body, relax.Tuple):
        return frozenset().union(*map(_variables, body.fields))
    return frozenset({body} if isinstance(body, relax.Var) else ())
