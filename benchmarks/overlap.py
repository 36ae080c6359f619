# SPDX-License-Identifier: Apache-2.0
"""How much of a gather hides behind the matmul that needs it, on a link that is emulated?

    python benchmarks/overlap.py                   # some minutes
    python benchmarks/overlap.py --rounds 3

Each of two workers has half of the rows of `a`; every one of them needs `a @ w`. One program
gathers and then multiplies. The others do so in chunks, pipelined by hand: while a chunk is
multiplied, the next ones are on their way. The link is set so that to gather takes a given share of
the matmul's time.

Effective communication is the time of a program less that of the matmul alone; the efficiency is 1
less its ratio to the one of the program that gathers first. Medians over rounds in which all
programs take turns; the slowest worker counts.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import tvm
from tvm import relax, te

import tvm_ipc

RANKS = 2
SHARES = (0.25, 0.5, 1.0)


def linear(a: te.Tensor, w: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, w.shape[0]))
    return te.compute((a.shape[0], w.shape[1]), lambda i, j: te.sum(a[i, k] * w[k, j], axis=k))


class Builder:
    """A module with one function for each way."""

    def __init__(self, rows: int, inner: int, columns: int) -> None:
        self.rows, self.inner, self.columns = rows, inner, columns  #: of one worker
        self.builder = relax.BlockBuilder()

    def packed(self, name: str, *operands: Any, ty: Any = None) -> Any:
        arguments = [relax.prim_value(o) if isinstance(o, int) else o for o in operands]
        types = [relax.TupleType([]) if ty is None else ty]
        return self.builder.emit(relax.Call(relax.ExternFunc(name), arguments, ty_args=types))

    def slice(self, tensor: Any, index: int, *shape: int) -> Any:
        ty = relax.TensorType(shape, "float32")
        offset = 4 * index * int(np.prod(shape))
        return self.packed("tvm_ipc.view", tensor, offset, relax.ShapeExpr(shape), ty=ty)

    def empty(self, *shape: int) -> Any:
        extents = relax.ShapeExpr(shape)
        return self.builder.emit(relax.op.builtin.alloc_tensor(extents, "float32", 0, "global"))

    def kernel(self, rows: int) -> Any:
        shapes = ((rows, self.inner), (self.inner, self.columns))
        a, w = (te.placeholder(shape, "float32") for shape in shapes)
        name = f"linear_{rows}"
        function = te.create_prim_func([a, w, linear(a, w)]).with_attr("global_symbol", name)
        return self.builder.add_func(function, name)

    def add(self, name: str, chunks: int, streams: int, gathers: bool = True) -> None:
        """Add a function; with one chunk and no stream it gathers first."""
        mine, all_rows = self.rows // chunks, RANKS * self.rows // chunks
        kernel = self.kernel(all_rows)
        own = (chunks, mine, self.inner) if gathers else (chunks, all_rows, self.inner)
        x = relax.Var("x", relax.TensorType(own, "float32"))
        w = relax.Var("w", relax.TensorType((self.inner, self.columns), "float32"))
        buffers = max(1, streams)
        with self.builder.function(name, [x, w], pure=False):
            out = self.empty(chunks, all_rows, self.columns)
            gathered = self.empty(buffers, all_rows, self.inner) if gathers else x
            works: dict[int, Any] = {}

            def post(chunk: int) -> None:
                send = self.slice(x, chunk, mine, self.inner)
                recv = self.slice(gathered, chunk % buffers, all_rows, self.inner)
                given = (send, 0, 0, recv)
                if streams == 0:
                    self.packed("tvm_ipc.allgather", *given)
                    return
                text = tvm.ir.StringImm("tvm_ipc.allgather")
                works[chunk] = self.packed("tvm_ipc.post", text, *given, ty=relax.AnyType())

            for chunk in range(streams - 1):
                post(chunk)
            for chunk in range(chunks):
                ahead = chunk + max(streams - 1, 0)
                if gathers and ahead < chunks:
                    post(ahead)
                if chunk in works:
                    self.packed("tvm_ipc.wait", works[chunk])
                place = chunk % buffers if gathers else chunk
                whole = self.slice(gathered, place, all_rows, self.inner)
                part = self.slice(out, chunk, all_rows, self.columns)
                call = relax.Call(kernel, [whole, w, part], ty_args=[relax.TupleType([])])
                self.builder.emit(call)
            self.builder.emit_func_output(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="of one worker")
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    build = Builder(options.rows, options.inner, options.columns)
    build.add("matmul", 1, 0, gathers=False)
    build.add("first", 1, 0)
    ways = {f"{chunks} chunks": f"chunks_{chunks}" for chunks in (2, 4, 8)}
    for chunks, name in zip((2, 4, 8), ways.values(), strict=True):
        build.add(name, chunks, 3)
    pipeline = tvm_ipc.get_pipeline("llvm", RANKS, blas=False)
    program = tvm.compile(build.builder.get(), "llvm", relax_pipeline=pipeline)
    with tvm_ipc.Session(RANKS) as session:
        vm = session.load_vm_module(program)
        rows, inner, columns = options.rows, options.inner, options.columns
        w = session.put(np.ones((inner, columns), "float32"))
        whole = np.ones((1, RANKS * rows, inner), "float32")
        inputs: dict[str, Any] = {"matmul": session.put(whole)}
        chunks_of = {"first": 1, **{name: int(name[7:]) for name in ways.values()}}
        for name, chunks in chunks_of.items():
            inputs[name] = session.put(np.ones((chunks, rows // chunks, inner), "float32"))

        def seconds(name: str) -> float:
            session.sync()
            start = perf_counter()
            vm[name](inputs[name], w)
            session.sync()
            return perf_counter() - start

        for name, given in inputs.items():
            assert (session.get(vm[name](given, w), rank=1) == inner).all(), name
        alone = median(seconds("matmul") for _ in range(options.rounds))
        print(f"{RANKS} workers, {rows} x {inner} rows each, {columns} columns, float32")
        print(f"matmul alone {alone * 1e3:.2f} ms\n")
        print("link: gather / matmul | gathers first | pipelined, effective communication hidden")
        for share in SHARES:
            session.emulate_link(bandwidth=4 * rows * inner / (share * alone))
            times: dict[str, list[float]] = {name: [] for name in inputs}
            for _ in range(options.rounds):
                for name in inputs:
                    times[name].append(seconds(name))
            exposed = {
                name: median(t - m for t, m in zip(times[name], times["matmul"], strict=True))
                for name in inputs
            }
            hidden = ", ".join(
                f"{label}: {1 - exposed[name] / exposed['first']:.0%}"
                for label, name in ways.items()
            )
            first = median(times["first"])
            print(f"{share:21.0%} | {first * 1e3:10.2f} ms | {hidden}")


if __name__ == "__main__":
    main()
