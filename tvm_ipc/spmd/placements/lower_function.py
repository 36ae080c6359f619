# SPDX-License-Identifier: Apache-2.0
"""Lowering of a function of a global program to the function that one rank runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import definable_tir_vars_in_type

from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.resolve_variables import variables_of
from tvm_ipc.comm import Mesh, Partial
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.place_op import PlaceAttrs, is_place, mesh_of
from tvm_ipc.comm.placements import Placements, format_placements, placements_of
from tvm_ipc.spmd.placements.lower_call import lower_call
from tvm_ipc.spmd.placements.place_calls import place_calls, placed_params
from tvm_ipc.spmd.placements.placed_tensor import PlacedTensor, local_type, sharded_axes, uneven
from tvm_ipc.spmd.placements.relax_vars_to_rank_values import (
    RankValue,
    RankValues,
    UniformValue,
    name_of,
)
from tvm_ipc.spmd.placements.skip_on_other_ranks import skip_on_other_ranks
from tvm_ipc.tvm_private_names import end_block


@dataclass(frozen=True, eq=False)
class StreamMark:
    """An axis that `R.comm.place(..., stream=axis)` marks for pipelining over streams.

    Attributes
    ----------
    subject : the mark, for reports.
    value : the marked tensor on the rank, before the collectives that the mark's placement inserts.
    axis : the marked axis.
    moved : the marked tensor after these collectives.
    force : whether it is split into chunks even if that is predicted to be slower.
    """

    subject: str
    value: relax.Expr
    axis: int
    moved: relax.Expr
    force: bool


def has_marks(function: relax.Function) -> bool:
    """Return whether a placement in a function marks an axis for streams."""
    return any(PlaceAttrs.of(call).stream is not None for call in place_calls(function))


@dataclass(frozen=True, eq=False)
class LoweredFunction:
    """The function of one rank.

    Attributes
    ----------
    function : the function.
    marks : the marks for streams in it.
    primfuncs : PrimFuncs for the extents of shards, which the function calls.
    """

    function: relax.Function
    marks: list[StreamMark]
    primfuncs: dict[tvm.ir.GlobalVar, tirx.PrimFunc]


def lower_function(
    name: str, function: relax.Function, meshes: Sequence[Mesh], module: tvm.IRModule
) -> LoweredFunction:
    """Return the function that one rank of the meshes runs."""
    lowering = _FunctionLowering(RankValues(name, meshes, module), function)
    lowered = lowering.function
    if not lowering.marks and len({frozenset(mesh.ranks) for mesh in meshes}) > 1:
        lowered = skip_on_other_ranks(lowered, lowering.ranks, lowering.result_ranks)
    return LoweredFunction(lowered, lowering.marks, lowering.primfuncs)


class _FunctionLowering:
    """The lowering of one function, whose result is the attribute `function`."""

    def __init__(self, values: RankValues, function: relax.Function) -> None:
        self.values = values
        self.builder = values.builder
        #: All ranks of the meshes.
        self.ranks = sorted({rank for mesh in values.meshes for rank in mesh.ranks})
        #: Variables that the function returns, and the values that the caller gets for them.
        self.results: dict[relax.Var, relax.Expr] = {}
        self.marks: list[StreamMark] = []
        #: The ranks that have some of the results.
        self.result_ranks: frozenset[int] = frozenset()
        self.returned = frozenset(variables_of(function.body.body))
        params = self._params(function)
        with self.builder.function(values.name, params, pure=function.is_pure, private=True):
            try:
                program = linearize(values.name, function)
                blocks = program.body.blocks
                for index, steps in groupby(program.steps[program.body], attrgetter("block")):
                    self._block(blocks[index], steps, last=index == len(blocks) - 1)
                result = self._result(function.body.body)
            except Exception:
                # BlockBuilder prints a warning on stderr if a block is never ended.
                end_block(self.builder)
                raise
            self.builder.emit_func_output(result)
        functions = self.builder.get().functions_items()
        (built,) = (each for _, each in functions if isinstance(each, relax.Function))
        #: The PrimFuncs that only this function calls.
        self.primfuncs = {
            variable: each for variable, each in functions if not isinstance(each, relax.Function)
        }
        self.function = relax.Function(
            built.params, built.body, built.ret_ty, function.is_pure, function.attrs, function.span
        )

    # ---- parameters and results -------------------------------------------------------------

    def _params(self, function: relax.Function) -> list[relax.Var]:
        explicit = placed_params(function)
        params = []
        for param in function.params:
            mesh, placements = explicit.get(param, (None, self.values.replicas))
            self.values.select(mesh)
            local = param
            if not isinstance(param.ty, relax.TensorType):
                self.values[param] = UniformValue(param)
            else:
                self._check_known(str(param.name), param.ty, placements)
                if sharded_axes(self.values.mesh, placements):
                    ty = local_type(self.values.mesh, param.ty, placements)
                    local = relax.Var(str(param.name), ty)
                # Callers pass shards with zeros in the padding.
                zeros = uneven(self.values.mesh, placements, param.ty)
                self.values[param] = PlacedTensor(local, param.ty, placements, zeros, mesh=mesh)
            params.append(local)
        self._check_symbols(function.params, params)
        return params

    def _check_known(self, subject: str, ty: relax.TensorType, placements: Placements) -> None:
        mesh = self.values.mesh
        if extents(ty) is None and sharded_axes(mesh, placements):
            raise self.values.error(
                f"{subject} is placed {format_placements(mesh, placements)}, and its shape is "
                f"not known: {ty}; declare its extents, which may be symbolic"
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
        self.result_ranks |= self._ranks_of(self.values.held(body))
        if isinstance(body, relax.Var) and body in self.results:
            return self.results[body]
        finished = self._finished(self.values.held(body), name_of(body))
        return self.values.as_argument(finished)

    def _is_finished(self, value: RankValue) -> bool:
        """Return whether a value can be returned to the caller as it is."""
        if isinstance(value, tuple):
            return all(map(self._is_finished, value))
        if not isinstance(value, PlacedTensor):
            return True
        if value.is_explicit:
            return value.replicated or not self._nonzero_padding(value)
        return value.replicated and self._is_on_every_rank(value)

    def _ranks_of(self, value: RankValue) -> frozenset[int]:
        """Return the ranks on which the caller gets a result."""
        if isinstance(value, PlacedTensor) and value.is_explicit and value.mesh is not None:
            return frozenset(value.mesh.ranks)
        return frozenset(self.ranks)

    def _is_on_every_rank(self, value: PlacedTensor) -> bool:
        return value.mesh is None or set(value.mesh.ranks) == set(self.ranks)

    def _finished(self, value: RankValue, name: str) -> RankValue:
        """Return the value for the caller: replicated unless placed, with zeros in the padding."""
        if isinstance(value, tuple):
            return tuple(self._finished(field, f"{name}[{k}]") for k, field in enumerate(value))
        if self._is_finished(value):
            return value
        assert isinstance(value, PlacedTensor)
        self.values.select(value.mesh)
        if not value.is_explicit:
            why = "it is a result, and results without R.comm.place are replicated"
            moved = self.values.moves.move(value, self.values.replicas, name, "inserted", why)
            if self._is_on_every_rank(value):
                return moved
            everywhere = Mesh({"ranks": len(self.ranks)}, self.ranks)
            return self.values.moves.send(moved, everywhere, name, why)
        why = "it is a result, and the shards of results have zeros beyond the end"
        return self.values.moves.fill(value, self._nonzero_padding(value), 0, name, why)

    def _nonzero_padding(self, x: PlacedTensor) -> frozenset[int]:
        """Return the axes of a tensor whose padding may not be zero."""
        return uneven(x.mesh or self.values.mesh, x.placements, x.whole) - x.zeros

    # ---- bindings ---------------------------------------------------------------------------

    def _block(self, block: relax.BindingBlock, steps: Iterable[Step], last: bool) -> None:
        dataflow = isinstance(block, relax.DataflowBlock)
        with self.builder.dataflow() if dataflow else nullcontext():
            for step in steps:
                var = step.var
                value = self._of_binding(step.binding)
                if dataflow and not isinstance(var, relax.DataflowVar):
                    self.values[var] = self._output(var, value, last)
                else:
                    self.values[var] = self.values.bound(value, str(var.name))
        self.values.end_block()

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
            self.values.select_for([value])
            whole = self.values.whole(value, "R.match_cast")
            return self.values.uniform(self.builder.match_cast(whole, binding.ty))
        if is_place(value):
            return self._place(str(var.name), value)
        if isinstance(value, relax.Call):
            return lower_call(self.values, var, value)
        if isinstance(value, (relax.If, relax.Function)):
            kind = "an if" if isinstance(value, relax.If) else "a function"
            raise self.values.error(
                f"{var.name} is {kind}, and placements do not reach into it; move that part of the "
                "program to a function of its own, without R.comm.place"
            )
        return self.values.held(value)

    def _on_mesh(self, tensor: relax.Expr, mesh: Mesh, subject: str, name: str) -> PlacedTensor:
        """Return a tensor on the mesh of the `R.comm.place` that has it as its operand."""
        x = self.values.held(tensor)
        assert isinstance(x, PlacedTensor), f"{subject} has the type of a tensor"
        if x.mesh is not None and x.mesh != mesh:
            self.values.select(x.mesh)
            why = f"it is on {x.mesh}, and {name} is on {mesh}"
            whole = self.values.moves.move(x, self.values.replicas, subject, "made", why)
            sent = self.values.moves.send(whole, mesh, subject, why)
            self.values.select(mesh)
            return replace(sent, value=self.values.moves.bound(sent.value))
        self.values.select(mesh)
        return self.values.tensor(tensor)

    def _place(self, name: str, value: relax.Call) -> RankValue:
        attrs, mesh = PlaceAttrs.of(value), mesh_of(value)
        subject = name_of(value.args[0])
        x = self._on_mesh(value.args[0], mesh, subject, name)
        target = placements_of(mesh, attrs.placements)
        if x.placements != target:
            self._check_known(subject, x.whole, target)
            for source, destination in zip(x.placements, target, strict=True):
                if isinstance(destination, Partial) and source != destination:
                    raise self.values.error(
                        f"{name}: a tensor that is {source} cannot become {destination}, since "
                        "there is nothing left to reduce; place it as comm.Replica() or "
                        "comm.Shard(axis)"
                    )
        before, after = (format_placements(mesh, p) for p in (x.placements, target))
        why = f"it is {before}, and {name} {after}"
        inserted = bool(attrs.inserted)
        moved = self.values.moves.move(x, target, subject, "inserted" if inserted else "made", why)
        if attrs.stream is not None:
            bound = self.values.bound(moved, name)
            assert isinstance(bound, PlacedTensor), "a placement is applied to a tensor"
            moved, subject = bound, f"stream={attrs.stream} of {name}"
            force = bool(attrs.force)
            mark = StreamMark(subject, x.value, int(attrs.stream), moved.value, force)
            self.marks.append(mark)
        return replace(moved, is_explicit=not inserted, mesh=mesh)
