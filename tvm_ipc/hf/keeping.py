# SPDX-License-Identifier: Apache-2.0
"""Keys and values that stay where they are, instead of new ones with one more token each time.

Before, of each layer's keys, and of its values:
    def decode(ids, positions, past_0: R.Tensor((1, 4, p, 64)), ..., weights...):
        ...
        keys = R.concat((past_0, new), axis=2)
        ...
        return (logits, keys, ...)

After, with room for so many tokens that the caller gives:
    def decode(ids, positions, at: R.Shape([p]),
               caches: R.Tuple(R.Tensor((room, 4, 64)), ...), weights: R.Tuple):
        kept = R.call_tir_inplace(append, (caches[0], new), [p])
        seen = R.call_pure_packed("tvm_ipc.view", kept, 0, R.shape([1, p + 1, 4, 64]))
        keys = R.permute_dims(seen, [0, 2, 1, 3])
        ...
        return logits

Tokens are the first axis of a cache, so that those seen so far lie in one piece, which products
read where it is. Runs on what one rank runs of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax, tirx
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.contract.programs import VIEW
from tvm_ipc.errors import ModelError
from tvm_ipc.transform.ir.rewrite import begin_with, rewrite, typed, with_value

_CONCAT: Final = tvm.ir.Op.get("relax.concat")
_TOKENS: Final = 2
#: Of a PrimFunc that is not fused with others: it would be given another in-place operand.
_OPAQUE: Final = 8


def keep_in_place(mod: tvm.IRModule, caches: int) -> tvm.IRModule:
    """Return the module whose functions write into caches that they are given.

    Parameters
    ----------
    mod : functions of tokens, so many tensors of keys and values, and weights.
    caches : how many tensors of keys and values.
    """
    builder = relax.BlockBuilder(mod)
    for global_var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            changed = _Keeping(builder, str(global_var.name_hint), function, caches).function
            builder.update_func(global_var, changed)
    result = builder.get()
    names = [str(one.name_hint) for one, f in mod.functions_items() if type(f) is relax.Function]
    result = relax.transform.DeadCodeElimination(names)(result)
    relax.analysis.well_formed(result, check_ty=False)
    return result


class _Keeping:
    def __init__(
        self, builder: relax.BlockBuilder, name: str, function: relax.Function, caches: int
    ) -> None:
        self.builder, self.name = builder, name
        ids, positions, *others = function.params
        past, weights = others[:caches], others[caches:]
        self.count = past[0].ty.shape[_TOKENS]
        self.room = tirx.Var("room", "int64")
        kept = [self._kept_type(one.ty) for one in past]
        at = relax.Var("at", relax.ShapeType([self.count]))
        self.caches = relax.Var("caches", relax.TupleType(kept))
        given = relax.Var("weights", relax.TupleType([one.ty for one in weights]))
        self.places = {one: k for k, one in enumerate(past)}
        self.found: set[int] = set()
        body = rewrite(function, self._change)
        if len(self.found) != caches:
            missing = next(k for k in range(caches) if k not in self.found)
            raise ModelError(
                f"{name}: past_{missing} is not joined with the keys or values of new tokens; such "
                "a cache is not known"
            )
        first = [
            relax.VarBinding(one, relax.TupleGetItem(given, k)) for k, one in enumerate(weights)
        ]
        body = begin_with(body, first) if first else body
        blocks, logits = body.body.blocks, _first_result(body.body)
        ended = typed(relax.SeqExpr(blocks, logits), logits.ty)
        changed = relax.Function(
            [ids, positions, at, self.caches, given],
            ended,
            logits.ty,
            function.is_pure,
            function.attrs,
        )
        for name in ("num_input", "tir_var_lower_bound", "tir_var_upper_bound"):
            changed = changed.without_attr(name)
        self.function = changed

    def _kept_type(self, ty: relax.TensorType) -> relax.TensorType:
        batch, heads, _, dim = ty.shape
        assert int(batch) == 1, ty
        return relax.TensorType([self.room, heads, dim], ty.dtype)

    def _change(self, binding: relax.Binding, value: relax.Expr) -> Sequence[relax.Binding] | None:
        if not isinstance(value, relax.Call) or not value.op.same_as(_CONCAT):
            return None
        fields = value.args[0].fields if isinstance(value.args[0], relax.Tuple) else []
        place = self.places.get(fields[0]) if fields and isinstance(fields[0], relax.Var) else None
        if place is None:
            return None
        if len(fields) != 2 or int(value.attrs.axis) % 4 != _TOKENS or place in self.found:
            raise ModelError(f"{self.name}: past_{place} is joined in a way that is not known")
        self.found.add(place)
        new, total = fields[1], binding.var.ty
        cache = relax.DataflowVar(f"cache_{place}", self.caches.ty.fields[place])
        kept = relax.DataflowVar(f"kept_{place}", cache.ty)
        _, heads, count, dim = total.shape
        seen_type = relax.TensorType([1, count, heads, dim], total.dtype)
        seen = relax.DataflowVar(f"seen_{place}", seen_type)
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
        return [
            relax.VarBinding(cache, relax.TupleGetItem(self.caches, place)),
            relax.VarBinding(kept, appended),
            relax.VarBinding(seen, view),
            with_value(binding, typed(relax.op.permute_dims(seen, [0, 2, 1, 3]), total)),
        ]


def _first_result(body: relax.SeqExpr) -> Any:
    """Return the first of what a function returns as a tuple."""
    result = body.body
    if isinstance(result, relax.Var):
        bound = {one.var: one.value for block in body.blocks for one in block.bindings}
        result = bound.get(result, result)
    assert isinstance(result, relax.Tuple), result
    return result.fields[0]


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
