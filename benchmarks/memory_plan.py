# SPDX-License-Identifier: Apache-2.0
"""How many bytes our memory plan takes, and TVM's, and how many no plan can do without.

    python benchmarks/memory_plan.py [--json results.json] [--only NAME] [--no-latency]

Every model of `zoo.py` is lowered by our pipeline up to the memory plan; from there on by our
`StaticPlanBlockMemory`, without and with the default barrier budget, and by TVM's pass of that
name. TVM's IPC memory counts as TVM's own lowering has its runtime allocate it. The lower bound is
`tvm_ipc.tools.inspection.peak_live_bytes`, which shares no code with the planner. The last table
is what the barrier budget buys: the time of a chain of all-reduces in a session of two workers.

The exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import zoo
from report import layout, machine
from tvm import relax

import tvm_ipc
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.tools.format import bytes_text
from tvm_ipc.tools.inspection import peak_live_bytes
from tvm_ipc.transform import StaticPlanBlockMemory

#: Most bytes of IPC memory against TVM's, by type; of a mixed model that of its smaller type.
IPC_SHARE = {"float32": 1 / 4, "float16": 1 / 2, "mixed": 1 / 2}
#: Most bytes against what is live at once.
NEAR = 1.05
CHAIN = 40


@dataclass(frozen=True)
class Row:
    """One function of a model: bytes by scope."""

    model: str
    dtype: str
    function: str
    ours: dict[str, int]
    with_budget: dict[str, int]
    upstream: dict[str, int]
    least: dict[str, int]
    barriers: tuple[int, int] | None = None  #: kept, left out

    def total(self, kind: str) -> int:
        return sum(getattr(self, kind).values())

    def goals(self) -> dict[str, bool]:
        """What the plan without a budget must hold."""
        ipc, theirs = self.ours.get(IPC_MEMORY, 0), self.upstream.get(IPC_MEMORY, 0)
        return {
            "IPC share": ipc <= theirs * IPC_SHARE[self.dtype],
            "total": self.total("ours") <= self.total("upstream"),
            "near the least": self.total("ours") <= NEAR * self.total("least"),
        }


def rows(model: zoo.Model) -> Iterator[Row]:
    """Plan one model in every way."""
    before = before_plan(model.build())
    sizes = model.sizes
    least = peak_live_bytes.allocations(before, sizes)
    theirs = relax.transform.StaticPlanBlockMemory()(before)
    upstream = peak_live_bytes.allocations(theirs, sizes, typed_ipc=True)
    plans = [
        StaticPlanBlockMemory(packed=True, barrier_budget=budget)(before) for budget in (0, None)
    ]
    ours, with_budget = (peak_live_bytes.allocations(plan, sizes) for plan in plans)
    for name, bound in least.items():
        if bound.total():
            yield Row(
                model.name,
                model.dtype,
                name,
                ours[name].total(),
                with_budget[name].total(),
                upstream[name].total(),
                bound.total(),
            )


def before_plan(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module as the memory plan of our pipeline gets it."""
    found: list[tvm.IRModule] = []

    @tvm.ir.instrument.pass_instrument
    class Watch:
        def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
            if str(info.name) == "StaticPlanBlockMemory":
                found.append(mod)

    with tvm.transform.PassContext(instruments=[Watch()]):
        tvm_ipc.get_pipeline("llvm", zoo.WORLD)(mod)
    return found[0]


def chain(rows: int, width: int) -> tvm.IRModule:
    """A kernel and an all-reduce in turn, as layers do it with less between them."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, width), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y: Any = x
            for _ in range(CHAIN):
                y = builder.emit(relax.op.multiply(y, relax.const(0.5, "float32")))
                y = builder.emit(relax.op.ccl.allreduce(y, "sum", in_group=False))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    return builder.get()


def latency(rounds: int) -> list[dict[str, Any]]:
    """Seconds of an all-reduce in a chain, with every barrier and with those the budget leaves."""
    found = []
    with tvm_ipc.Session(zoo.WORLD) as session:
        for kilobytes in (1, 16, 64, 256):
            shape = (kilobytes, 256)
            x = session.put(np.ones(shape, "float32"))
            programs = {}
            for name, budget in (("without a budget", 0), ("default budget", None)):
                pipeline = tvm_ipc.get_pipeline("llvm", zoo.WORLD, barrier_budget=budget)
                built = relax.build(chain(*shape), "llvm", relax_pipeline=pipeline)
                programs[name] = session.load_vm_module(built)["main"]
            seconds: dict[str, list[float]] = {name: [] for name in programs}
            for _ in range(rounds):
                for name, main in programs.items():
                    main(x)
                    session.sync()
                    start = time.perf_counter()
                    for _ in range(10):
                        main(x)
                    session.sync()
                    seconds[name].append((time.perf_counter() - start) / 10 / CHAIN)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found.append({"kilobytes": kilobytes, "seconds": medians})
    return found


def _cell(row: Row, kind: str) -> str:
    scopes = getattr(row, kind)
    ipc = scopes.get(IPC_MEMORY, 0)
    other = sum(scopes.values()) - ipc
    return f"{bytes_text(other)} + {bytes_text(ipc)}"


def table(found: list[Row]) -> str:
    """One line a function: other memory + IPC memory."""
    lines = [["model", "type", "function", "TVM", "ours", "default budget", "least"]]
    lines[0] += ["of TVM's", "IPC of TVM's", "of least", "goals"]
    for row in found:
        ipc, theirs = row.ours.get(IPC_MEMORY, 0), row.upstream.get(IPC_MEMORY, 0)
        missed = [name for name, holds in row.goals().items() if not holds]
        lines.append(
            [
                row.model,
                row.dtype,
                row.function,
                *(_cell(row, kind) for kind in ("upstream", "ours", "with_budget", "least")),
                f"{row.total('ours') / row.total('upstream'):.1%}",
                f"{ipc / theirs:.1%}" if theirs else "-",
                f"{row.total('ours') / row.total('least'):.1%}",
                "MISSED: " + ", ".join(missed) if missed else "met",
            ]
        )
    return layout(lines)


def latency_table(found: list[dict[str, Any]]) -> str:
    lines = [["all-reduce", "without a budget", "default budget", "x"]]
    for entry in found:
        plain, spent = entry["seconds"].values()
        lines.append(
            [
                f"{entry['kilobytes']} KB",
                f"{plain * 1e6:.2f} us",
                f"{spent * 1e6:.2f} us",
                f"{plain / spent:.2f}",
            ]
        )
    return layout(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--no-latency", action="store_true", help="start no session")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    chosen = [model for model in zoo.models() if options.only in model.name]
    if not chosen:
        parser.error(f"no model's name contains {options.only!r}")
    found = [row for model in chosen for row in rows(model)]
    print("\nplanned bytes of a worker: other memory + memory that peers map\n")
    print(table(found))
    times = [] if options.no_latency else latency(options.rounds)
    if times:
        print(f"\na step of {CHAIN} kernels and all-reduces, {zoo.WORLD} workers, float32\n")
        print(latency_table(times))
    missed = sum(not all(row.goals().values()) for row in found)
    print(f"\ngoals: {len(found) - missed} of {len(found)} functions meet all")
    if options.json is not None:
        document = {
            "machine": machine(),
            "rows": [{**asdict(row), "goals": row.goals()} for row in found],
            "latency": times,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
