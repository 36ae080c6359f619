# SPDX-License-Identifier: Apache-2.0
"""The walk through a function for all ranks, which makes the function that one rank runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax
from tvm.relax.analysis import definable_tir_vars_in_type

from tvm_ipc.comm import Mesh, Partial
from tvm_ipc.comm.operator import extents
from tvm_ipc.comm.place_operator import NAME as PLACE
from tvm_ipc.comm.place_operator import mesh_of
from tvm_ipc.comm.placements import Placements, placements_of, show
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.rewrite import walk
from tvm_ipc.transform.placements.calls import lower_call
from tvm_ipc.transform.placements.placed import (
    Placed,
    divided,
    local_type,
    uneven,
)
from tvm_ipc.transform.placements.redistribute import NAME
from tvm_ipc.transform.placements.values import Found, RankValues, Same, name_of

_PLACE = tvm.ir.Op.get(PLACE)


def is_place(value: Any) -> bool:
    """Whether an expression says where a tensor lies."""
    return isinstance(value, relax.Call) and bool(value.op.same_as(_PLACE))


def mesh_of_function(name: str, function: relax.Function) -> Mesh | None:
    """Return the mesh of a function's places, None where it has none."""
    meshes = {mesh_of(value.attrs): None for _, value in walk(function) if is_place(value)}
    if len(meshes) > 1:
        raise TransformError(
            f"{NAME}: function {name!r} places tensors on {' and on '.join(map(str, meshes))}; one "
            "function is for one mesh: name all axes in one"
        )
    return next(iter(meshes), None)


@dataclass(frozen=True)
class Marked:
    """What a place marks for streams."""

    subject: str  #: in words
    value: relax.Expr  #: as a rank has it
    axis: int


def has_marks(function: relax.Function) -> bool:
    """Whether a place in a function marks an axis for streams."""
    return any(is_place(value) and value.attrs.stream is not None for _, value in walk(function))


def lower_function(
    name: str, function: relax.Function, mesh: Mesh, module: tvm.IRModule
) -> tuple[relax.Function, list[Marked]]:
    """Return what one rank of the mesh runs of a function, and what is marked in it."""
    lowered = _PlacedFunction(name, function, mesh, module)
    return lowered.function, lowered.marked


class _PlacedFunction(RankValues):
    """One function that is being lowered."""

    def __init__(
        self, name: str, function: relax.Function, mesh: Mesh, module: tvm.IRModule
    ) -> None:
        super().__init__(name, mesh, module)
        self.results: dict[relax.Var, relax.Expr] = {}
        self.marked: list[Marked] = []
        self.leaves = _variables(function.body.body)
        params = self._params(function)
        with self.builder.function(name, params, pure=function.is_pure, private=True):
            try:
                for index, block in enumerate(function.body.blocks, start=1):
                    self._block(block, last=index == len(function.body.blocks))
                result = self._result(function.body.body)
            except Exception:
                self.builder._end_block()  # it complains on stderr of a block that is not ended
                raise
            self.builder.emit_func_output(result)
        (made,) = self.builder.get().functions.values()
        self.function = relax.Function(
            made.params, made.body, made.ret_ty, function.is_pure, function.attrs, function.span
        )

    # ---- parameters and results -------------------------------------------------------------

    def _params(self, function: relax.Function) -> list[relax.Var]:
        said: dict[relax.Var, Placements] = {}
        for _, value in walk(function):
            if is_place(value) and isinstance(value.args[0], relax.Var):
                said.setdefault(value.args[0], placements_of(self.mesh, value.attrs.placements))
        params = []
        for param in function.params:
            placements = said.get(param, self.replicas)
            local = param
            if not isinstance(param.ty, relax.TensorType):
                self[param] = Same(param)
            else:
                self._check_known(str(param.name), param.ty, placements)
                if divided(self.mesh, placements):
                    ty = local_type(self.mesh, param.ty, placements)
                    local = relax.Var(str(param.name), ty)
                # Who calls it gives zeros beyond the end.
                zeros = uneven(self.mesh, placements, param.ty)
                self[param] = Placed(local, param.ty, placements, zeros)
            params.append(local)
        self._check_symbols(function.params, params)
        return params

    def _check_known(self, subject: str, ty: relax.TensorType, placements: Placements) -> None:
        if extents(ty) is None and divided(self.mesh, placements):
            raise self.error(
                f"{subject} is placed {show(self.mesh, placements)}, and its shape is not known: "
                f"{ty}; give its extents, which may be symbolic"
            )

    def _check_symbols(self, whole: Iterable[relax.Var], local: Iterable[relax.Var]) -> None:
        known = {one for param in local for one in definable_tir_vars_in_type(param.ty)}
        for param in whole:
            for one in definable_tir_vars_in_type(param.ty):
                if one not in known:
                    raise self.error(
                        f"no rank knows {one.name}, since it has a part of {param.name}, which is "
                        f"{param.ty}: let the extent be a multiple of the ranks, such as "
                        f"{one.name} * 2, or give the function a parameter of the type "
                        f"R.Shape([{str(one.name)!r}])"
                    )

    def _result(self, body: relax.Expr) -> relax.Expr:
        if isinstance(body, relax.Tuple):
            return relax.Tuple([self._result(field) for field in body.fields])
        if isinstance(body, relax.Var) and body in self.results:
            return self.results[body]
        return self.as_argument(self._finished(self.lookup(body), name_of(body)))

    def _is_finished(self, found: Found) -> bool:
        """Whether it is what the caller gets."""
        if isinstance(found, tuple):
            return all(map(self._is_finished, found))
        if not isinstance(found, Placed):
            return True
        return found.replicated or (found.said and not self._dirty(found))

    def _finished(self, found: Found, name: str) -> Found:
        """Return what the caller gets: replicated if nothing is said, zeros beyond the end."""
        if isinstance(found, tuple):
            return tuple(self._finished(one, f"{name}[{k}]") for k, one in enumerate(found))
        if self._is_finished(found):
            return found
        assert isinstance(found, Placed)
        if not found.said:
            why = "it is a result, and replicated since no place says otherwise"
            return self.moves.move(found, self.replicas, name, "inserted", why)
        why = "it is a result, of which parts have zeros beyond the end"
        return self.moves.fill(found, self._dirty(found), 0, name, why)

    def _dirty(self, x: Placed) -> frozenset[int]:
        return uneven(self.mesh, x.placements, x.whole) - x.zeros

    # ---- bindings ---------------------------------------------------------------------------

    def _block(self, block: relax.BindingBlock, last: bool) -> None:
        dataflow = isinstance(block, relax.DataflowBlock)
        with self.builder.dataflow() if dataflow else nullcontext():
            for binding in block.bindings:
                var = binding.var
                found = self._of_binding(binding)
                if dataflow and not isinstance(var, relax.DataflowVar):
                    self[var] = self._output(var, found, last)
                else:
                    self[var] = self.bound(found, str(var.name))
        self.moves.end_block()

    def _output(self, var: relax.Var, found: Found, last: bool) -> Found:
        """Let what a variable is be used after the block; return what it is there."""
        name = str(var.name)
        if var not in self.leaves:
            return self._emitted_output(found, name)
        if self._is_finished(found):
            result = self._emitted_output(found, name)
            self.results[var] = self.as_argument(result)
            return result
        # The program goes on with it as it is, and the caller gets another one.
        kept = self.bound(found, name) if last else self._emitted_output(found, name)
        finished = self._emitted_output(self._finished(kept, name), name)
        self.results[var] = self.as_argument(finished)
        return kept

    def _emitted_output(self, found: Found, name: str) -> Found:
        if isinstance(found, tuple):
            return tuple(self._emitted_output(one, f"{name}_{k}") for k, one in enumerate(found))
        return replace(found, value=self.builder.emit_output(found.value, name))

    def _of_binding(self, binding: relax.Binding) -> Found:
        """Return what the variable of a binding is for a rank."""
        var, value = binding.var, binding.value
        if isinstance(binding, relax.MatchCast):
            whole = self.whole(value, "R.match_cast")
            return self.classified(self.builder.match_cast(whole, binding.ty))
        if is_place(value):
            return self._place(str(var.name), value)
        if isinstance(value, relax.Call):
            return lower_call(self, var, value)
        if isinstance(value, relax.TupleGetItem):
            fields = self.lookup(value.tuple_value)
            if isinstance(fields, tuple):
                field: Found = fields[int(value.index)]
                return field
            return self.classified(relax.TupleGetItem(fields.value, int(value.index)))
        if isinstance(value, (relax.If, relax.Function)):
            what = "an if" if isinstance(value, relax.If) else "a function"
            raise self.error(
                f"{var.name} is {what}, and placements do not reach into it: give that part of the "
                "program a function of its own, without a place"
            )
        return self.lookup(value)

    def _place(self, name: str, value: relax.Call) -> Found:
        attrs = value.attrs
        x = self.tensor(value.args[0])
        target = placements_of(self.mesh, attrs.placements)
        subject = name_of(value.args[0])
        if x.placements != target:
            self._check_known(subject, x.whole, target)
            for source, wanted in zip(x.placements, target, strict=True):
                if isinstance(wanted, Partial) and source != wanted:
                    raise self.error(
                        f"{name}: what is {source} does not become {wanted}, for there is nothing "
                        "left to reduce; place it as comm.Replica() or comm.Shard(axis)"
                    )
        if attrs.stream is not None:
            said = f"stream={attrs.stream} of {name}"
            self.marked.append(Marked(said, x.value, int(attrs.stream)))
        why = f"it is {show(self.mesh, x.placements)}, and {name} {show(self.mesh, target)}"
        return replace(self.moves.move(x, target, subject, "made", why), said=True)


def _variables(body: relax.Expr) -> frozenset[relax.Var]:
    """Return the variables in what a function returns."""
    if isinstance(body, relax.Tuple):
        return frozenset().union(*map(_variables, body.fields))
    return frozenset({body} if isinstance(body, relax.Var) else ())
