# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of a model, with the keys and values of its own heads.

`import_decoder` gives functions that return their keys and values. A rank keeps those of its heads
where the plan divides them so, and all of them where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.hf.importing import DECODE, PREFILL, Decoder
from tvm_ipc.parallel import Parallelized, parallelize
from tvm_ipc.transform.ir.rewrite import typed, with_body

#: The axis of heads of keys and values.
_HEADS: Final = 1
#: Tokens and positions, before the keys and values.
_INPUTS: Final = 2


def divide(decoder: Decoder, workers: int, plan: Mapping[str, Any] | None = None) -> Parallelized:
    """Return what each of some ranks runs.

    Parameters
    ----------
    decoder : the model.
    workers : how many ranks.
    plan : which weights are divided, and how; the model's own plan if None.
    """
    mesh = comm.Mesh({"tp": workers})
    plan = dict(decoder.plan if plan is None else plan)
    divided = all(one.heads % workers == 0 for one in decoder.caches)
    where = comm.Shard(_HEADS) if divided else comm.Replica()
    functions = {}
    for name in (PREFILL, DECODE):
        function = decoder.module[name]
        functions[name] = _with_results(function, mesh, {"tp": where})
        for param in function.params[_INPUTS : _INPUTS + len(decoder.caches)]:
            plan[str(param.name)] = where
    return parallelize(tvm.IRModule(functions), plan, mesh, names=decoder.names)


def _with_results(function: relax.Function, mesh: comm.Mesh, where: Any) -> relax.Function:
    """Return the function with its keys and values where they are to be."""
    *blocks, last = function.body.blocks
    *bindings, output = last.bindings
    assert isinstance(output.value, relax.Tuple), output
    logits, *kept = output.value.fields
    placed = []
    for k, one in enumerate(kept):
        call = typed(comm.place(one, mesh, where), one.ty)
        var = relax.DataflowVar(f"cache_{k}", one.ty)
        bindings.append(relax.VarBinding(var, call))
        placed.append(var)
    fields = relax.Tuple([logits, *placed])
    result = relax.Var(str(output.var.name), output.var.ty)
    bindings.append(relax.VarBinding(result, fields))
    blocks = [*blocks, relax.DataflowBlock(bindings)]
    body = typed(relax.SeqExpr(blocks, result), output.var.ty)
    return with_body(function, body)
