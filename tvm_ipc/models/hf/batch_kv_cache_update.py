# SPDX-License-Identifier: Apache-2.0
"""Let one step of a batch append to the KV caches of each request, and attend to them in place.

Before, for each layer, with all requests at the same position:
    def decode_batch(ids: R.Tensor((b, 1)), positions: R.Tensor((b, 1)),
                     past_0: R.Tensor((b, 4, p, 64)), past_1: R.Tensor((b, 4, p, 64)), weights...):
        ...
        keys = R.concat((past_0, new_keys), axis=2)
        values = R.concat((past_1, new_values), axis=2)
        mixed = (the matmuls and the softmax of attention, of queries, keys, values and mask)
        ...
        return (logits, keys, values, ...)

After, with each request at its own position:
    def decode_batch(ids, positions, at: R.Shape([p]), caches: R.Object, weights: R.Tuple):
        mixed = R.call_dps_packed("tvm_ipc.blas.batch_attention", (0, 1, 0.125, 0.0, positions,
                                  caches, queries, new_keys, new_values, mask), out_ty=...)
        ...
        return logits

`caches` has a tuple of caches for each request, as `inplace_kv_cache_update` describes them, and
`p` is the largest of the positions. The pass runs on the program of one rank.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.resolve_variables import values_of
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits, begin_with
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.cpu.find_attention import Attention, Operand, find_attention
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.inplace_kv_cache_update import first_result
from tvm_ipc.packed_functions.program_function_declarations import BATCH_ATTENTION

_CONCAT: Final = tvm.ir.Op.get("relax.concat")
_HEADS: Final = 1
_TOKENS: Final = 2
_PLAIN: Final = (0, 1, 2, 3)
#: Orders of axes by which a tensor with one token for each request is the same in memory.
_ONE_TOKEN: Final = (_PLAIN, (0, 2, 1, 3))


def update_batch_in_place(mod: tvm.IRModule, name: str, caches: int) -> tvm.IRModule:
    """Return a module whose function appends to the caches of each request.

    Parameters
    ----------
    mod : a module with one Relax function, of token ids, positions, tensors of keys and values, and
        weights.
    name : the name of the function.
    caches : the number of tensors of keys and values.

    Raises
    ------
    ModelError
        Attention has a form that `tvm_ipc.blas.batch_attention` does not have.
    """
    module = ModuleAliasFacts(mod)
    function = mod[name]
    ids, positions, *others = function.params
    past, weights = others[:caches], others[caches:]
    object_type = relax.ObjectType()
    cache_var = relax.Var("caches", object_type)
    appended = _appended(function, past)
    edits, updated = Edits(), set[int]()
    for attention in find_attention(module, name):
        indices = _replace(attention, edits, appended, positions, cache_var)
        if updated & set(indices):
            raise _unsupported("the keys and values of a layer are attended to more than once")
        updated.update(indices)
    missing = [k for k in range(caches) if k not in updated]
    if missing:
        raise _unsupported(f"no attention to past_{missing[0]} was found")
    at = relax.Var("at", relax.ShapeType([past[0].ty.shape[_TOKENS]]))
    weight_tuple = relax.Var("weights", relax.TupleType([var.ty for var in weights]))
    unpack = [
        relax.VarBinding(var, relax.TupleGetItem(weight_tuple, k)) for k, var in enumerate(weights)
    ]
    body = begin_with(edits.apply(function), unpack)
    result = first_result(body)
    changed = relax.Function(
        [ids, positions, at, cache_var, weight_tuple],
        result,
        result.ty,
        function.is_pure,
        function.attrs,
    )
    for attribute in ("num_input", "tir_var_lower_bound", "tir_var_upper_bound"):
        changed = changed.without_attr(attribute)
    found = tvm.IRModule({**dict(mod.functions_items()), mod.get_global_var(name): changed})
    found = relax.transform.DeadCodeElimination([name])(found)
    relax.analysis.well_formed(found, check_ty=False)
    return found


def _unsupported(reason: str) -> ModelError:
    return ModelError(
        f"batches of several requests are not supported for this model on this number of workers: "
        f"{reason}; generate for one prompt at a time, or use another number of workers"
    )


def _appended(function: relax.Function, past: list[relax.Var]) -> dict[Any, tuple[int, relax.Expr]]:
    """Return the index of a cache and what is appended to it, by the variables of both."""
    index = {var: k for k, var in enumerate(past)}
    found = {}
    for var, value in values_of(function).items():
        if not isinstance(value, relax.Call) or not value.op.same_as(_CONCAT):
            continue
        fields = value.args[0].fields if isinstance(value.args[0], relax.Tuple) else []
        if len(fields) == 2 and fields[0] in index and int(value.attrs.axis) % 4 == _TOKENS:
            found[var] = (index[fields[0]], fields[1])
    # Heads that are repeated for their query heads are used in groups without being repeated.
    for var, value in values_of(function).items():
        if (
            operator_of(value) == "relax.repeat"
            and value.attrs.axis is not None
            and int(value.attrs.axis) % 4 == _HEADS
            and value.args[0] in found
        ):
            found[var] = found[value.args[0]]
    return found


def _replace(
    attention: Attention,
    edits: Edits,
    appended: dict[Any, tuple[int, relax.Expr]],
    positions: relax.Var,
    caches: relax.Var,
) -> tuple[int, int]:
    """Replace the attention by a call, and return the indices of its caches."""
    if attention.refusal:
        raise _unsupported(f"{attention.subject}: {attention.refusal}")
    queries, keys, values = attention.operands
    if queries.axes not in _ONE_TOKEN or attention.out_axes not in _ONE_TOKEN or attention.causal:
        raise _unsupported(f"{attention.subject} has axes in another order")
    (key_cache, new_keys), (value_cache, new_values) = (
        _cache_of(attention, operand, appended) for operand in (keys, values)
    )
    mask = [] if attention.bias is None else [attention.bias]
    for tensor in mask:
        dims = list(map(constant, as_list(tensor.ty.shape.values)))
        if len(dims) != 4 or dims[1:3] != [1, 1]:
            raise _unsupported(f"the mask of {attention.subject} is not one for all heads")
    numbers = [
        relax.prim_value(key_cache),
        relax.prim_value(value_cache),
        relax.prim_value(tvm.tirx.FloatImm("float64", attention.scale)),
        relax.prim_value(tvm.tirx.FloatImm("float64", attention.softcap)),
    ]
    tensors = [positions, caches, queries.value, new_keys, new_values, *mask]
    *inner, last = attention.steps
    for step in inner:
        edits.replace(step.var, [])
    call = relax.call_dps_packed(
        BATCH_ATTENTION.name, relax.Tuple([*numbers, *tensors]), last.var.ty
    )
    call = relax.BlockBuilder().normalize(call)
    edits.replace(last.var, [relax.VarBinding(last.var, call, last.binding.span)])
    return key_cache, value_cache


def _cache_of(
    attention: Attention, operand: Operand, appended: dict[Any, tuple[int, relax.Expr]]
) -> tuple[int, relax.Expr]:
    """Return the index of the cache that keys or values are, and what is appended to it."""
    found = appended.get(operand.value)
    if found is None or operand.axes != _PLAIN:
        raise _unsupported(
            f"{attention.subject} does not read the keys and values as they are cached"
        )
    return found
