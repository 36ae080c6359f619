# SPDX-License-Identifier: Apache-2.0
"""Conversion of TVM's distributed dialect, `R.dist` and `R.DTensor`, to `R.comm.place`.

    y = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[0], R")
    z: R.DTensor((4, 8), "float32", "mesh[0]", "R, S[1]") = R.exp(y)

become placements on `Mesh({"axis0": 2, "axis1": 2})` if the device mesh is 2 x 2:

    y = R.comm.place(x, mesh, ["S[0]", "R"])
    z_unplaced: R.Tensor((4, 8), "float32") = R.exp(y)
    z = R.comm.place(z_unplaced, mesh, ["R", "S[1]"])

A parameter or a variable of the type `R.DTensor` becomes a tensor with the placement of its type.
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax
from tvm.relax.distributed import DeviceMesh, DTensorType
from tvm.relax.distributed.type import PlacementSpecKind

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, rewrite, typed, walk, with_value
from tvm_ipc.comm import Mesh, Placement, Replica, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.placements.redistribute import NAME
from tvm_ipc.tvm_moved_names import GenericConst

_PLACING: Final = ("relax.dist.annotate_sharding", "relax.dist.redistribute")
#: Operators of the dialect that have no counterpart, with the reason and the remedy.
_REFUSED: Final = {
    "relax.dist.call_tir_local_view": "calls a function of one rank, but R.DTensor is a tensor of "
    "all ranks; use R.call_tir on whole tensors, and declare its rule with tvm_ipc.spmd."
    "declare_rule",
    "relax.dist.redistribute_replica_to_shard": "takes the shard of one rank, but R.DTensor is a "
    "tensor of all ranks; use R.dist.redistribute or R.comm.place",
}


def convert_dist_annotations(
    name: str, function: relax.Function, named_mesh: Mesh | None = None
) -> relax.Function:
    """Return the function with `R.comm.place` in place of TVM's annotations.

    A function without annotations is returned as it is.

    Parameters
    ----------
    name : the name of the function, for errors.
    function : the function to convert.
    named_mesh : the mesh that replaces device meshes with the same extents and ranks.
    """
    if _has_distributed_types(function):
        return _Conversion(name, named_mesh).function(function)

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if not is_annotation(value):
            return None
        return [with_value(binding, _place(value.args[0], value.attrs, value.ty, named_mesh))]

    return rewrite(function, change)


def is_annotation(value: relax.Expr) -> bool:
    """Return whether an expression is one of TVM's annotations."""
    return _operator(value) in _PLACING


def uses_dist(function: relax.Function) -> bool:
    """Return whether a function has annotations of TVM, or distributed tensors."""
    return any(map(is_annotation, calls(function))) or _has_distributed_types(function)


def _operator(value: relax.Expr) -> str:
    is_operator = type(value) is relax.Call and isinstance(value.op, tvm.ir.Op)
    return str(value.op.name) if is_operator else ""


def _has_distributed_types(function: relax.Function) -> bool:
    variables = [*function.params]
    variables += [binding.var for binding, _ in walk(function) if binding is not None]
    return any(_is_distributed(var.ty) for var in variables)


def _is_distributed(ty: relax.Type) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(map(_is_distributed, ty.fields))
    return isinstance(ty, DTensorType)


def is_distributed_tuple(ty: relax.Type) -> bool:
    """Return whether a type is a tuple with distributed tensors."""
    return isinstance(ty, relax.TupleType) and _is_distributed(ty)


def _whole(ty: relax.Type) -> relax.Type:
    """Return the type of the whole tensors of a type."""
    if isinstance(ty, relax.TupleType):
        return relax.TupleType(list(map(_whole, ty.fields)))
    return ty.tensor_ty if isinstance(ty, DTensorType) else ty


def _place(
    x: relax.Expr,
    to: relax.Expr,
    ty: relax.Type,
    named_mesh: Mesh | None,
) -> relax.Call:
    """Return the placement of a tensor to which attributes or a type refer."""
    mesh = _mesh(to.device_mesh, named_mesh)
    placements = [_placement(spec) for spec in to.placement.dim_specs]
    call: relax.Call = typed(place(x, mesh, placements), ty)
    return call


def _mesh(device_mesh: DeviceMesh, named_mesh: Mesh | None) -> Mesh:
    if not len(device_mesh.shape):
        raise TransformError(
            f"{NAME}: a distributed tensor has a device mesh without axes; expected a mesh of "
            'I.module_global_infos, such as R.DTensor(shape, dtype, "mesh[0]", "S[0]")'
        )
    mesh = Mesh(
        {f"axis{k}": int(extent) for k, extent in enumerate(device_mesh.shape)},
        [int(rank) for rank in device_mesh.device_ids],
    )
    if named_mesh is not None and list(named_mesh.axes.values()) == list(mesh.axes.values()):
        return named_mesh if named_mesh.ranks == mesh.ranks else mesh
    return mesh


def _placement(spec: relax.distributed.PlacementSpec) -> Placement:
    if int(spec.kind) == int(PlacementSpecKind.kSharding):
        return Shard(int(spec.axis))
    return Replica()


class _Conversion:
    """The conversion of a function with distributed tensors."""

    def __init__(self, name: str, named_mesh: Mesh | None) -> None:
        self.name, self.named_mesh = name, named_mesh
        self.builder = relax.BlockBuilder()
        self.variables: dict[relax.Var, relax.Expr] = {}

    def function(self, function: relax.Function) -> relax.Function:
        params = [self._variable(param) for param in function.params]
        first = [
            binding
            for old, new in zip(function.params, params, strict=True)
            for binding in self._placed(old, new)
        ]
        blocks = [relax.BindingBlock(first)] if first else []
        for block in function.body.blocks:
            bindings = [new for binding in block.bindings for new in self._binding(binding)]
            blocks.append(type(block)(bindings, block.span))
        ret_ty = _whole(function.ret_ty)
        result = self._expr(function.body.body)
        body = typed(relax.SeqExpr(blocks, result, function.body.span), ret_ty)
        return relax.Function(params, body, ret_ty, function.is_pure, function.attrs, function.span)

    def _variable(self, var: relax.Var, suffix: str = "") -> relax.Var:
        new = type(var)(f"{var.name}{suffix}", _whole(var.ty))
        self.variables[var] = new
        return new

    def _placed(self, old: relax.Var, new: relax.Expr) -> list[relax.Binding]:
        """Return the bindings that place a parameter as its type specifies."""
        if isinstance(old.ty, DTensorType):
            variable = relax.Var(f"{old.name}_placed", new.ty)
            return [relax.VarBinding(variable, _place(new, old.ty, new.ty, self.named_mesh))]
        if not isinstance(old.ty, relax.TupleType) or not _is_distributed(old.ty):
            return []
        bindings = []
        for k, ty in enumerate(old.ty.fields):
            field = relax.Var(f"{old.name}_{k}", _whole(ty))
            value = self.builder.normalize(relax.TupleGetItem(new, k))
            bindings += [relax.VarBinding(field, value), *self._placed_field(ty, field)]
        return bindings

    def _placed_field(self, ty: relax.Type, field: relax.Var) -> list[relax.Binding]:
        old = relax.Var(str(field.name), ty)
        return self._placed(old, field)

    def _binding(self, binding: relax.Binding) -> list[relax.Binding]:
        var, value = binding.var, binding.value
        if isinstance(binding, relax.MatchCast):
            raise self._error(f"{var.name} is R.match_cast of a distributed program; remove it")
        if is_annotation(value):
            x = self._expr(value.args[0])
            new = self._variable(var)
            return [relax.VarBinding(new, _place(x, value.attrs, new.ty, self.named_mesh))]
        converted = self._expr(value, str(var.name))
        is_field = isinstance(value, (relax.Var, relax.TupleGetItem))
        if not isinstance(var.ty, DTensorType) or is_field:
            return [relax.VarBinding(self._variable(var), converted, binding.span)]
        unplaced = type(var)(f"{var.name}_unplaced", converted.ty)
        new = self._variable(var)
        placed = _place(unplaced, var.ty, new.ty, self.named_mesh)
        return [relax.VarBinding(unplaced, converted), relax.VarBinding(new, placed)]

    def _expr(self, expr: relax.Expr, name: str = "the result") -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self.variables.get(expr, expr)
        if isinstance(expr, GenericConst):
            return relax.const(expr.value) if isinstance(expr.ty, DTensorType) else expr
        if isinstance(expr, relax.Tuple):
            fields = [self._expr(field, name) for field in expr.fields]
            return self.builder.normalize(relax.Tuple(fields))
        if isinstance(expr, relax.TupleGetItem):
            whole = self._expr(expr.tuple_value, name)
            return self.builder.normalize(relax.TupleGetItem(whole, int(expr.index)))
        if isinstance(expr, (relax.If, relax.Function)):
            kind = "an if" if isinstance(expr, relax.If) else "a function"
            raise self._error(
                f"{name} is {kind} in a program with distributed tensors; move that part of the "
                "program to a function of its own, without R.DTensor"
            )
        if not isinstance(expr, relax.Call):
            return expr
        operator = _operator(expr)
        if operator in _REFUSED:
            short = operator.replace("relax.", "R.")
            raise self._error(f"{name} is {short}, which {_REFUSED[operator]}")
        arguments = [self._expr(x, name) for x in expr.args]
        call = relax.Call(
            expr.op, arguments, expr.attrs, list(map(_whole, expr.ty_args)), expr.span
        )
        return self.builder.normalize(call)

    def _error(self, text: str) -> TransformError:
        return TransformError(f"{NAME}: function {self.name!r}: {text}")
