# SPDX-License-Identifier: Apache-2.0
"""Update KV caches in place, instead of returning new tensors with one more token each time.

Before, for the keys and for the values of each layer:
    def decode(ids, positions, past_0: R.Tensor((1, 4, p, 64)), ..., weights...):
        ...
        keys = R.concat((past_0, new), axis=2)
        ...
        return (logits, keys, ...)

After, with caches for `room` tokens that the caller allocates:
    def decode(ids, positions, at: R.Shape([p]),
               caches: R.Tuple(R.Tensor((room, 4, 64)), ...), weights: R.Tuple):
        kept = R.call_tir_inplace(append, (caches[0], new), [p])
        seen = R.call_pure_packed("tvm_ipc.view", kept, 0, R.shape([1, p + 1, 4, 64]))
        keys = R.permute_dims(seen, [0, 2, 1, 3])
        ...
        return logits

Tokens are the first axis of a cache, so the tokens so far are contiguous, and matmuls read them
without a copy. The pass runs on the program of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import tvm
from tvm import relax, tirx
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.analysis.resolve_variables import fields_of, values_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    begin_with,
    rewrite,
    typed,
    with_value,
)
from tvm_ipc.errors import ModelError
from tvm_ipc.packed_functions.program_function_declarations import VIEW

_CONCAT: Final = tvm.ir.Op.get("relax.concat")
_TOKENS: Final = 2
#: The op_pattern that prevents fusion, which would change the in-place operand of the PrimFunc.
_OPAQUE: Final = 8


def update_in_place(mod: tvm.IRModule, caches: int) -> tvm.IRModule:
    """Return a module whose functions write into caches that the caller passes.

    Parameters
    ----------
    mod : functions of token ids, positions, tensors of keys and values, and weights.
    caches : the number of tensors of keys and values.
    """
    builder = relax.BlockBuilder(mod)
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            changed = _InPlaceUpdate(builder, str(global_var.name_hint), function, caches).function
            builder.update_func(global_var, changed)
    result = builder.get()
    names = [str(gv.name_hint) for gv, f in mod.functions_items() if type(f) is relax.Function]
    result = relax.transform.DeadCodeElimination(names)(result)
    relax.analysis.well_formed(result, check_ty=False)
    return result


def first_result(function: relax.Function) -> relax.SeqExpr:
    """Return the body of a function that returns a tuple, with the first field as its result."""
    result = fields_of(function.body.body, values_of(function))[0]
    if isinstance(result, relax.DataflowVar):  # only the tuple is an output of its block
        edits, computed = Edits(), result
        result = relax.Var(computed.name, computed.ty)
        edits.insert_after(computed, [relax.VarBinding(result, computed)])
        function = edits.apply(function)
    return typed(relax.SeqExpr(function.body.blocks, result), result.ty)


class _InPlaceUpdate:
    """The rewrite of one function; `function` is the result."""

    def __init__(
        self, builder: relax.BlockBuilder, name: str, function: relax.Function, caches: int
    ) -> None:
        self.builder, self.name = builder, name
        ids, positions, *others = function.params
        past, weights = others[:caches], others[caches:]
        self.count = past[0].ty.shape[_TOKENS]
        self.room = tirx.Var("room", "int64")
        at = relax.Var("at", relax.ShapeType([self.count]))
        cache_types = [self._cache_type(var.ty) for var in past]
        self.caches = relax.Var("caches", relax.TupleType(cache_types))
        weight_tuple = relax.Var("weights", relax.TupleType([var.ty for var in weights]))
        self.cache_index = {var: k for k, var in enumerate(past)}
        self.updated: set[int] = set()
        #: The bindings of the keys or values of all tokens, by their variables. They are emitted
        #: together, before the first use of one of them, so that no cache is written between a
        #: view and the attention that reads it: passes must assume that caches are the same.
        self.views: dict[relax.Var, list[relax.Binding]] = {}
        body = rewrite(function, self._rewrite_binding)
        if len(self.updated) != caches:
            missing = next(k for k in range(caches) if k not in self.updated)
            raise ModelError(
                f"{name}: past_{missing} is not concatenated with the keys or values of the new "
                "tokens; such a cache is not supported"
            )
        unpack = [
            relax.VarBinding(var, relax.TupleGetItem(weight_tuple, k))
            for k, var in enumerate(weights)
        ]
        body = begin_with(body, unpack) if unpack else body
        result = first_result(body)
        updated = relax.Function(
            [ids, positions, at, self.caches, weight_tuple],
            result,
            result.ty,
            function.is_pure,
            function.attrs,
        )
        for name in ("num_input", "tir_var_lower_bound", "tir_var_upper_bound"):
            updated = updated.without_attr(name)
        self.function = updated

    def _cache_type(self, ty: relax.TensorType) -> relax.TensorType:
        batch, heads, _, dim = ty.shape
        assert int(batch) == 1, ty
        return relax.TensorType([self.room, heads, dim], ty.dtype)

    def _rewrite_binding(
        self, binding: relax.Binding, value: relax.Expr
    ) -> Sequence[relax.Binding] | None:
        """Replace a concatenation, or emit the views that a binding needs before it."""
        update = self._rewrite_concat(binding, value)
        if update is not None or self.views.keys().isdisjoint(relax.analysis.free_vars(value)):
            return update
        views = [view for of_cache in self.views.values() for view in of_cache]
        self.views.clear()
        return [*views, binding]

    def _rewrite_concat(
        self, binding: relax.Binding, value: relax.Expr
    ) -> Sequence[relax.Binding] | None:
        """Replace the concatenation of past and new tokens with an in-place update."""
        if not isinstance(value, relax.Call) or not value.op.same_as(_CONCAT):
            return None
        fields = value.args[0].fields if isinstance(value.args[0], relax.Tuple) else []
        if not fields or not isinstance(fields[0], relax.Var):
            return None
        index = self.cache_index.get(fields[0])
        if index is None:
            return None
        if len(fields) != 2 or int(value.attrs.axis) % 4 != _TOKENS or index in self.updated:
            raise ModelError(
                f"{self.name}: past_{index} is concatenated in a way that is not supported; "
                f"concatenate it once, with one tensor, along axis {_TOKENS}"
            )
        self.updated.add(index)
        new, total = fields[1], binding.var.ty
        cache = relax.DataflowVar(f"cache_{index}", self.caches.ty.fields[index])
        kept = relax.DataflowVar(f"kept_{index}", cache.ty)
        _, heads, count, dim = total.shape
        seen_type = relax.TensorType([1, count, heads, dim], total.dtype)
        seen = relax.DataflowVar(f"seen_{index}", seen_type)
        function = self.builder.add_func(
            _append(int(heads), int(dim), str(total.dtype.dtype)), "append"
        )
        appended = relax.op.call_tir_inplace(function, [cache, new, self.count], [0], [cache.ty])
        view = relax.op.call_pure_packed(
            VIEW.name,
            kept,
            relax.prim_value(0),
            relax.ShapeExpr([1, count, heads, dim]),
            ty_args=[seen_type],
        )
        permuted = typed(relax.op.permute_dims(seen, [0, 2, 1, 3]), total)
        self.views[binding.var] = [relax.VarBinding(seen, view), with_value(binding, permuted)]
        return [
            relax.VarBinding(cache, relax.TupleGetItem(self.caches, index)),
            relax.VarBinding(kept, appended),
        ]


@functools.cache  # parsing it takes 30 ms, and the caches of most models are all alike
def _append(heads: int, dim: int, dtype: str) -> tirx.PrimFunc:
    @T.prim_func(private=True, s_tir=True)  # type: ignore[untyped-decorator]
    def append(cache_handle: T.handle, new_handle: T.handle, at: T.int64) -> None:
        T.func_attr({"tirx.noalias": True, "op_pattern": _OPAQUE})
        room, count = T.int64(), T.int64()
        cache = T.match_buffer(cache_handle, (room, heads, dim), dtype)
        new = T.match_buffer(new_handle, (1, heads, count, dim), dtype)
        for i, j, k in T.grid(count, heads, dim):
            with T.sblock("append"):
                ti, tj, tk = T.axis.remap("SSS", [i, j, k])
                cache[at + ti, tj, tk] = new[0, tj, ti, tk]

    return append
