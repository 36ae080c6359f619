# SPDX-License-Identifier: Apache-2.0
"""The pass `FuseAttention`, which computes attention on CPUs without its scores in memory."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    belongs_to_others,
    change_functions,
)
from tvm_ipc.cpu.find_attention import Attention, find_attention
from tvm_ipc.packed_functions import pack_digits
from tvm_ipc.packed_functions.program_function_declarations import (
    ATTENTION,
    ATTENTION_OF_SEQUENCES,
)
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, collecting, note


@module_pass
class FuseAttention(ModulePass):
    """Fuse the matmuls and the softmax of attention into one call, for CPUs.

    Before:

        s = R.matmul(q, R.permute_dims(k, (0, 1, 3, 2)))
        p = R.nn.softmax(R.add(R.multiply(s, R.const(0.125)), mask), axis=-1)
        y = R.permute_dims(R.matmul(p, v), (0, 2, 1, 3))

    After:

        y = R.call_dps_packed("tvm_ipc.blas.attention",
                              (0, 0, 0, 0x3120, 0.125, 0.0, 0, 0, 0, q, k, v, mask), out_ty=...)

    The call computes a block of queries and keys at a time in float32, and rounds once, at the end.
    Scores never fill memory of the size queries x keys. Blocks of keys that the mask excludes for
    all queries of a block are skipped. Each query adds its keys in one order, whatever the number
    of threads and of workers. In bfloat16 on processors with AMX, a single query adds them in
    another order than each of several.

    The pass takes `R.nn.attention`, `R.nn.attention_bias` and `R.nn.attention_var_len`, and
    attention that consists of matmuls and a softmax: with heads that share keys and values, an
    additive mask, and a soft cap.
    TVM compiles what the pass leaves; the report gives the reasons.

    Run the pass on the program of one rank, before `OffloadBLAS` and `LegalizeOps`.

    Parameters
    ----------
    reproducible : whether a query must get the same bits for any number of queries, also with AMX,
        which is then not used.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.cpu import FuseAttention
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((1, 16, 4, 8), "float32")):
    ...         return R.nn.attention(x, x, x, causal_mask="TopLeft")
    ... ''')
    >>> "tvm_ipc.blas.attention" in FuseAttention()(mod).script()
    True
    """

    reproducible: bool = option(arguments.flag, default=False, kw_only=True)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with calls in place of attention."""
        module = ModuleAliasFacts(mod)

        def fused(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            return _fuse(module, name, function, reproducible=self.reproducible)

        return change_functions(mod, fused)


def _fuse(
    module: ModuleAliasFacts, name: str, function: relax.Function, *, reproducible: bool
) -> relax.Function:
    found = find_attention(module, name)
    if collecting():
        for attention in found:
            verdict = "left to TVM" if attention.refusal else "fused"
            reason = attention.refusal or "its scores need no memory"
            note(Decision("FuseAttention", name, attention.subject, verdict, reason))
    fused = [attention for attention in found if not attention.refusal]
    if not fused:
        return function
    builder = relax.BlockBuilder()
    edits = Edits()
    for attention in fused:
        *inner, last = attention.steps
        for step in inner:
            edits.replace(step.var, [])
        call = builder.normalize(_call(attention, reproducible=reproducible))
        edits.replace(last.var, [relax.VarBinding(last.var, call, last.binding.span)])
    for var in _unused(fused):
        edits.replace(var, [])
    return edits.apply(function)


def _call(attention: Attention, *, reproducible: bool) -> relax.Expr:
    last = attention.steps[-1]
    axes = [*(operand.digits for operand in attention.operands), pack_digits(attention.out_axes)]
    numbers = [
        *map(relax.prim_value, axes),
        relax.prim_value(tvm.tirx.FloatImm("float64", attention.scale)),
        relax.prim_value(tvm.tirx.FloatImm("float64", attention.softcap)),
        *map(relax.prim_value, (attention.causal, attention.window, int(reproducible))),
    ]
    tensors: list[Any] = [operand.value for operand in attention.operands]
    if attention.bias is not None:
        tensors.append(attention.bias)
    name = (ATTENTION_OF_SEQUENCES if attention.starts else ATTENTION).name
    arguments = relax.Tuple([*numbers, *tensors, *attention.starts])
    return relax.call_dps_packed(name, arguments, last.var.ty)


def _unused(fused: list[Attention]) -> list[Any]:
    """Return the permutations and reshapes that only the attention used."""
    removed = {step.var for attention in fused for step in attention.steps}
    needed = {operand.value for attention in fused for operand in attention.operands}
    candidates = {step.var: users for attention in fused for step, users in attention.skipped}
    found: list[Any] = []
    while True:
        more = [
            var
            for var, users in candidates.items()
            if var not in removed and var not in needed and {user.var for user in users} <= removed
        ]
        if not more:
            return found
        removed.update(more)
        found += more
