# SPDX-License-Identifier: Apache-2.0
"""The Relax program whose calls are timed: straight-line functions that call a packed function
again and again, so that nothing but the VM stands between two calls.

A function's name ends in how many calls one invocation makes:
  allreduce_{strategy}_{k}(send, recv, raw)  k all-reduces
  rewritten_{strategy}_{k}(send, recv, raw)  the same, each after a store to all of the input
  null_{k}(send, recv, raw)                  k calls of a function that does nothing
  ipc_storage_{bytes}_{k}, pool_storage_{bytes}_{k}
                                             k times alloc_storage and its release
`raw` is `send` seen as float32, for the stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.op.vm.vm import alloc_storage, kill_object
from tvm.script import relax as R  # noqa: N812
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.packed_functions import AllReduceStrategy

UNROLLS = (1, 16, 256)
STORAGE_BYTES = (1024, 1 << 20)
ALLREDUCE = "runtime.disco.cuda_ipc.custom_allreduce"
ALLOC_STORAGE = "runtime.disco.cuda_ipc.alloc_storage"
NULL = "vm.builtin.null_value"


@T.prim_func  # type: ignore[untyped-decorator]
def store(raw_handle: T.handle, value: T.float32) -> None:
    T.func_attr({"global_symbol": "store", "tirx.noalias": True})
    n = T.int64()
    raw = T.match_buffer(raw_handle, (n,), "float32")
    for i in range(n):
        raw[i] = value


def _call(name: str, *args: relax.Expr) -> relax.Call:
    return relax.Call(relax.ExternFunc(name), list(args), ty_args=[relax.AnyType()])


def _emit(
    builder: relax.BlockBuilder, name: str, calls: int, body: Callable[[int, Any], None]
) -> None:
    params = [relax.Var(v, relax.AnyType()) for v in ("send", "recv", "raw")]
    with builder.function(f"{name}_{calls}", params, pure=False):
        for i in range(calls):
            body(i, params)
        builder.emit_func_output(relax.Tuple([]))


def build(path: Path, strategies: Iterable[AllReduceStrategy]) -> None:
    """Compiles the program for this machine's CPU into a shared library at `path`."""
    builder = relax.BlockBuilder()
    for calls in UNROLLS:
        for strategy in strategies:

            def reduce(_: int, p: Any, strategy: int = int(strategy)) -> None:
                builder.emit(_call(ALLREDUCE, p[0], relax.prim_value(strategy), p[1]))

            def rewrite(i: int, p: Any, reduce: Callable[[int, Any], None] = reduce) -> None:
                builder.emit(_call("store", p[2], relax.prim_value(T.float32(i & 1))))
                reduce(i, p)

            _emit(builder, f"allreduce_{strategy.name.lower()}", calls, reduce)
            _emit(builder, f"rewritten_{strategy.name.lower()}", calls, rewrite)

    calls = UNROLLS[-1]
    _emit(builder, "null", calls, lambda _i, _p: builder.emit(_call(NULL)))
    for size in STORAGE_BYTES:
        shape, dtype = relax.ShapeExpr([size]), R.dtype("uint8")

        def ipc(_i: int, _p: Any, shape: Any = shape, dtype: Any = dtype) -> None:
            builder.emit(kill_object(builder.emit(_call(ALLOC_STORAGE, shape, dtype))))

        def pool(_i: int, _p: Any, shape: Any = shape) -> None:
            builder.emit(kill_object(builder.emit(alloc_storage(shape, 0, "uint8", "global"))))

        _emit(builder, f"ipc_storage_{size}", calls, ipc)
        _emit(builder, f"pool_storage_{size}", calls, pool)
    module = builder.get()
    module["store"] = store
    relax.build(module, tvm.target.Target.from_device("cpu")).export_library(str(path))
