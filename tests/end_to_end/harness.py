# SPDX-License-Identifier: Apache-2.0
"""Builds random programs, checks their plans, runs them in real workers, compares with NumPy."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

import tvm_ipc
from tests.end_to_end.programs import Arrays, Function, Value
from tests.end_to_end.random_programs import BOUND, Generator
from tests.runtime.tensors_of_ranks import arrays_on, put_each
from tvm_ipc.transform import StaticPlanBlockMemory, verify_cross_rank_safety
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

#: Values of the shape variable; a program runs with each of some of them.
ROWS = (5, 17, 40, 1, 0)
#: What is not exact may be off by so much, relative and absolute.
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-7}


class WrongProgramError(AssertionError):
    """A program that fails."""

    def __init__(self, program: Program, what: str) -> None:
        super().__init__(f"program {program.seed}: {what}")
        self.program = program


class Program:
    """One random program."""

    def __init__(self, seed: int, size: int, world: int, groups: int) -> None:
        self.seed, self.size, self.world, self.groups = seed, size, world, groups
        self.generator = Generator(seed, size, world, groups)
        self.functions = self.generator.program()
        self.main: Function = self.functions[-1]

    def sizes(self, rows: tuple[int, ...]) -> list[dict[str, int]]:
        """Return what its shape variables are where it is run."""
        rows = rows if self.main.symbols else rows[:1]
        return [{"n": n, "m": (n * 7 + 3) % 31} for n in rows]

    def arguments(self, sizes: dict[str, int]) -> list[Arrays]:
        """Return the arrays to call it with."""
        return self.generator.arguments(self.main, sizes, self.seed + sizes["n"])

    def source(self) -> str:
        """Return its functions as TVMScript."""
        return "\n".join("    " + line for f in self.functions for line in f.lines()) + "\n"


@tvm.instrument.pass_instrument
class BeforePlan:
    """Keeps the module that the pipeline's memory plan is given, and the one it gives."""

    def __init__(self) -> None:
        self.before: tvm.IRModule | None = None
        self.after: tvm.IRModule | None = None

    def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name == "StaticPlanBlockMemory":
            self.before = mod

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name == "StaticPlanBlockMemory":
            self.after = mod


def parsed(programs: list[Program]) -> tvm.IRModule:
    """Return the module that holds the programs."""
    text = "@I.ir_module\nclass Module:\n" + "".join(p.source() for p in programs)
    return tvm.script.from_source(text)


def build(programs: list[Program], path: Path, **options: Any) -> BeforePlan:
    """Compile programs into one library with our pipeline."""
    kept = BeforePlan()
    first = programs[0]
    # Where LLVM optimizes, which it does to some of them, it may believe that no buffers overlap.
    optimized = {"kind": "llvm", "opt-level": 3}
    target = tvm.target.Target(optimized if first.seed % 3 == 2 else "llvm")
    pipeline = tvm_ipc.get_pipeline(target, first.world, num_groups=first.groups, **options)
    with tvm.transform.PassContext(opt_level=3, instruments=[kept]):
        executable = tvm.compile(parsed(programs), target, relax_pipeline=pipeline)
    executable.export_library(str(path))
    return kept


def check_plan(programs: list[Program], kept: BeforePlan) -> None:
    """Compare the plan with upstream's, and look for hazards in both plans that we make."""
    assert kept.before is not None and kept.after is not None
    upstreams = relax.transform.StaticPlanBlockMemory()(kept.before)
    world, groups = programs[0].world, programs[0].groups
    ours = StaticPlanBlockMemory(packed=True, barrier_budget=0)(kept.before)
    for planned in (ours, kept.after):
        # That ranks have the same conditions, their arguments say.
        hazards = verify_cross_rank_safety(planned, world_size=world, num_groups=groups)
        hazards = [one for one in hazards if one.kind is not HazardKind.BRANCHES]
        if hazards:
            name = hazards[0].function.split("_")[0]
            (program,) = [p for p in programs if p.main.name == name]
            raise WrongProgramError(program, f"hazards: {[str(hazard) for hazard in hazards]}")
    # Storages that have an upper bound are as large as that, whatever n is.
    for rows in (*ROWS, BOUND):
        mine, theirs = planned_bytes(ours, rows), planned_bytes(upstreams, rows)
        for program in programs:
            for function in program.functions:
                if function.name not in theirs:
                    continue  # nothing calls it
                if function.upper_bound and rows != function.upper_bound:
                    continue
                a, b = mine[function.name], theirs[function.name]
                if sum(a.values()) > sum(b.values()):
                    raise WrongProgramError(
                        program,
                        f"{function.name} with n = {rows}: planned bytes {dict(a)}, upstream's "
                        f"plan has {dict(b)}",
                    )


def planned_bytes(mod: tvm.IRModule, rows: int) -> dict[str, dict[str, int]]:
    """Return the bytes that each function allocates, by scope, in lines of 64 bytes."""
    result = {}
    for global_var, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        total: dict[str, int] = defaultdict(int)

        def size(expr: Any) -> int:
            analyzer = tvm.sym.Analyzer()

            def bind(variable: Any) -> None:
                analyzer.bind(variable, tvm.tirx.IntImm(str(variable.ty), rows))

            tvm_ffi.structural_walk(expr, [(tvm.ir.Var, bind)])
            return int(analyzer.simplify(expr))

        def visit(node: Any, total: dict[str, int] = total) -> None:
            if not isinstance(node, relax.Call) or not isinstance(node.op, tvm.ir.Op):
                return
            name = node.op.name
            if name == "relax.memory.alloc_storage":
                total[str(node.args[2].value)] += lines(size(node.args[0].values[0]))
            elif name == "relax.builtin.alloc_tensor":
                bits = tvm.DataType(str(node.args[1].value)).bits
                elements = 1
                for dim in node.args[0].values:
                    elements *= size(dim)
                total[str(node.args[3].value)] += lines(elements * max(bits, 8) // 8)

        relax.analysis.post_order_visit(function, visit)
        result[global_var.name_hint] = total
    return result


def lines(size: int) -> int:
    """Round up to what any allocator hands out at least."""
    return (size + 63) // 64 * 64


@mutator
class _WithDelays(PyExprMutator):  # type: ignore[misc]
    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        op = getattr(binding.value, "op", None)
        if isinstance(op, (relax.GlobalVar, relax.ExternFunc)):
            wait = relax.ExternFunc("tests.race_wait")
            self.builder_.emit(relax.Call(wait, [], ty_args=[relax.AnyType()]))
        super().visit_var_binding_(binding)


@tvm.transform.module_pass(opt_level=0, name="AddDelays")
class AddDelays:
    """Any rank may be late before any kernel and any collective (see `race_worker`)."""

    def transform_module(
        self, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        """Return the module with calls that wait."""
        delays = _WithDelays(mod)
        for global_var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                delays.builder_.update_func(global_var, delays.visit_expr(function))
        return delays.builder_.get()


def run(session: Any, programs: list[Program], path: Path, rows: tuple[int, ...]) -> None:
    """Call each program with each size, and compare what every rank gets with NumPy.

    The calls are made one after the other: no rank waits for others between two programs.
    """
    module = session.load_vm_module(str(path))
    calls = []
    for program in programs:
        for sizes in program.sizes(rows):
            arguments = program.arguments(sizes)
            expected = program.main.execute(program.world, sizes, arguments)
            calls.append((program, sizes, _put(session, arguments), expected))
    try:
        results = [module[program.main.name](*given) for program, _, given, _ in calls]
        for (program, sizes, _, expected), result in zip(calls, results, strict=True):
            for rank in range(session.num_workers):
                compare(program, sizes, rank, arrays_on(result, rank), expected)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        names = [program.seed for program, *_ in calls]
        raise RuntimeError(f"programs {names}: {type(error).__name__}: {error}") from error


def _put(session: Any, arguments: list[Arrays]) -> list[Any]:
    return [put_each(session, arrays) for arrays in arguments]


def compare(
    program: Program, sizes: dict[str, int], rank: int, found: list[Any], expected: list[Arrays]
) -> None:
    """Raise an error where a result differs."""
    for value, got, wanted in zip(program.main.results, found, expected, strict=True):
        right = wanted[rank]
        where = f"{sizes}, rank {rank}, result {value.name}"
        if got.shape != right.shape or got.dtype != right.dtype:
            raise WrongProgramError(
                program, f"{where}: {got.dtype}{got.shape} instead of {right.dtype}{right.shape}"
            )
        if not _equal(value, got, right):
            differ = np.argwhere(~np.isclose(got, right))
            raise WrongProgramError(
                program,
                f"{where}: {len(differ)} of {got.size} elements differ, the first at "
                f"{tuple(differ[0])}: {got[tuple(differ[0])]} instead of {right[tuple(differ[0])]}",
            )


def _equal(value: Value, got: Any, right: Any) -> bool:
    if value.exact:
        return np.array_equal(got, right)
    tolerance = TOLERANCE[value.dtype]
    return np.allclose(got, right, rtol=tolerance, atol=tolerance)
