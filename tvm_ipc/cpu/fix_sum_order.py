# SPDX-License-Identifier: Apache-2.0
"""The pass `FixSumOrder`, which gives sums an order that depends only on the number of terms."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.collective_calls import name_of
from tvm_ipc.analysis.find_aliases import ModuleAliasFacts
from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.views_and_writes_of_calls import name_of_callee, operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits, belongs_to_others, change_functions
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.collective_relax_op import dtype_of, is_collective, make
from tvm_ipc.cpu.blas.find_matmuls_with_epilogues import Matmul, find_matmuls
from tvm_ipc.cpu.blas.matmuls_to_blas_calls import call_of, unused_permutations
from tvm_ipc.cpu.operators_with_fixed_order import FLOATS, RESHAPES, obstacle, wrong_type
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import KINDS, MAX_WORKERS
from tvm_ipc.transform.convert_from_and_to_ccl import from_ccl
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.tvm_moved_names import GenericConst

_NAME: Final = "FixSumOrder"
#: The parts of which the inner dimension of a matmul consists, if it is a multiple of that.
#: Each of several workers has whole parts, so this is also the most workers.
PARTS: Final = 16
_WIDE: Final = "float32"
#: Operators that may stand between a matmul and the all-reduce of its result.
_BETWEEN: Final = frozenset(f"relax.{name}" for name in RESHAPES)
_SHOWN: Final = 8


@module_pass
class FixSumOrder(ModulePass):
    """Add up every sum in an order that depends on the number of its terms only.

    Before:

        y = R.matmul(x, w)                                   # of one of two workers
        z = R.comm.allreduce(y, "sum")

    After:

        y = R.call_dps_packed("tvm_ipc.blas.matmul", (0, 0, 0, 8, x, w), ...)    # float32
        z = R.comm.allreduce(y, "tree_sum")

    The inner dimension of a matmul consists of 16 parts, or of fewer if it is not divisible by 16.
    The sums of the parts are added as a balanced binary tree: ((p0 + p1) + (p2 + p3)) + ... Each
    of N workers adds up a subtree of 16 / N parts, and the all-reduce adds up the rest of the tree,
    in float32. So the bits of the result do not depend on N, on the number of rows, or on threads.

    An operator that has no such order is refused: the error names each of them, with the reason.
    Other kernels are computed in a fixed order if they are scheduled by
    `ScheduleForCPU(reproducible=True)`.

    Run the pass on the program of one rank, after `FuseAttention` and before `LegalizeOps`.

    Parameters
    ----------
    world_size : the number of workers of the session.
    num_groups : the number of groups of the session.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.cpu import FixSumOrder
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4, 32), "float32"), w: R.Tensor((32, 64), "float32")):
    ...         y = R.matmul(x, w)
    ...         z = R.comm.allreduce(y, "sum")
    ...         return z
    ... ''')
    >>> "tree_sum" in FixSumOrder(world_size=2)(mod).script()
    True
    """

    world_size: int = option(
        arguments.integer, f"a number of workers, 1 to {MAX_WORKERS}", 1, MAX_WORKERS
    )
    num_groups: int = option(arguments.integer, "a number of groups, 1 or more", 1, default=1)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with sums in a fixed order; raise an error if it has others."""
        module = ModuleAliasFacts(mod)
        obstacles: list[Decision] = []

        def fixed(name: str, function: relax.Function) -> relax.Function:
            change = _Function(mod, module, name, self.world_size, self.num_groups)
            result = change.fixed()
            obstacles.extend(change.obstacles)
            return result

        mod = change_functions(mod, fixed)
        if obstacles:
            raise TransformError(_message(obstacles))
        return mod


def _message(obstacles: list[Decision]) -> str:
    lines = [f"  {one.function}: {one.subject}: {one.reason}" for one in obstacles[:_SHOWN]]
    if len(obstacles) > _SHOWN:
        lines.append(f"  and {len(obstacles) - _SHOWN} more, which the report of the passes lists")
    return "\n".join(
        [
            f"{_NAME}: {arguments.counted(len(obstacles), 'operator')} of the program cannot be "
            "computed reproducibly; change the program, or compile it without reproducible=True:",
            *lines,
        ]
    )


class _RefusedError(Exception):
    """Raised for a sum whose order cannot be fixed; the message is the reason."""


@dataclass(eq=False)
class _WorkerSum:
    """A sum over workers of a matmul's result, which moves may have rearranged."""

    step: Step
    collective: relax.Call
    workers: int
    moves: list[Step]


@dataclass(eq=False)
class _Function:
    """The changes of one function."""

    mod: tvm.IRModule
    module: ModuleAliasFacts
    name: str
    world_size: int
    num_groups: int
    obstacles: list[Decision] = field(default_factory=list)
    uses: Uses = field(init=False)

    def fixed(self) -> relax.Function:
        """Return the function with matmuls and sums in a fixed order."""
        function = self.module.functions[self.name]
        if belongs_to_others(function):
            self._refuse("the function", "another compiler compiles it, in an unknown order")
            return function
        self.uses = Uses(linearize(self.name, function))
        matmuls = {
            matmul.bindings[0].var: matmul
            for matmul in find_matmuls(self.module, self.name, with_epilogues=False)
        }
        sums: dict[Any, _WorkerSum] = {}
        for step in self.uses.bound.values():
            if step.binding is None or step.var in matmuls or type(step.value) is not relax.Call:
                continue
            try:
                found = self._check(step)
            except _RefusedError as reason:
                self._refuse(_subject(step), str(reason))
            else:
                if found is not None:
                    sums[found[0]] = found[1]
        edits, builder = Edits(), relax.BlockBuilder(self.mod)
        for var, matmul in matmuls.items():
            try:
                self._replace(matmul, sums.get(var), edits, builder)
            except _RefusedError as reason:
                self._refuse(_subject(self.uses.bound[var]), str(reason))
        for variable in unused_permutations(list(matmuls.values())):
            edits.replace(variable, [])
        return function if self.obstacles else edits.apply(function)

    def _refuse(self, subject: str, reason: str) -> None:
        decision = Decision(_NAME, self.name, subject, "refused", reason)
        note(decision)
        self.obstacles.append(decision)

    # ---- checks -------------------------------------------------------------------------------

    def _check(self, step: Step) -> tuple[Any, _WorkerSum] | None:
        """Check a call; return the matmul that it sums over workers, with the sum, if any."""
        call = from_ccl(step.value) or step.value
        if not is_collective(call):
            reason = obstacle(step.value, self.mod)
            if reason:
                raise _RefusedError(reason)
            return None
        attrs = CollectiveAttrs.of(call)
        dtype = dtype_of(call.args[0].ty)
        is_exact = attrs.reduction in ("min", "max") or "float" not in dtype
        if not KINDS[attrs.kind].reduces or is_exact:
            return None
        if attrs.reduction not in ("sum", "tree_sum") or attrs.scale is not None:
            what = "scaled sum" if attrs.scale is not None else attrs.reduction
            raise _RefusedError(f"a {what} of {dtype} over workers has no fixed order; use a sum")
        source = self._source(call.args[0])
        if source is None:
            return None
        matmul, moves = source
        return matmul, _WorkerSum(step, call, self._workers(attrs), moves)

    def _workers(self, attrs: CollectiveAttrs) -> int:
        if not isinstance(attrs.team, str):
            return attrs.workers
        return self.world_size // (self.num_groups if attrs.team == "group" else 1)

    def _source(self, value: relax.Expr) -> tuple[Any, list[Step]] | None:
        """Return the matmul whose result is summed, and the moves in between.

        None stands for a sum that is exact, because all workers but one add zeros.
        """
        moves: list[Step] = []
        while True:
            step = self.uses.binding_of(value)
            if step is None:
                raise _RefusedError(
                    f"it is a sum over workers of {name_of(value)}, which is not computed in this "
                    "function; only results of matmuls are summed in a fixed order"
                )
            callee = operator_of(step.value)
            if callee == "relax.where" and self._is_masked_lookup(step.value):
                return None
            if len(self.uses.users[value]) > 1:
                raise _RefusedError(
                    f"it is a sum over workers of {name_of(value)}, which has other uses; its "
                    "float32 sum is added before it is rounded"
                )
            if callee == "relax.matmul":
                return value, moves[::-1]
            if callee not in _BETWEEN:
                raise _RefusedError(
                    f"it is a sum over workers of the result of {callee.removeprefix('relax.')}; "
                    "only results of matmuls are summed in a fixed order"
                )
            moves.append(step)
            value = step.value.args[0]

    def _is_masked_lookup(self, where: relax.Call) -> bool:
        """Return whether a value is a row of a table if a worker has that row, else zero."""
        mask, row, zero = where.args
        lookup = self.uses.binding_of(row)
        if lookup is None or operator_of(lookup.value) != "relax.take" or not _is_zero(zero):
            return False
        step = self.uses.binding_of(mask)
        while step is not None and operator_of(step.value) in _BETWEEN:
            step = self.uses.binding_of(step.value.args[0])
        if step is None or operator_of(step.value) != "relax.logical_and":
            return False
        bounds = [self.uses.binding_of(bound) for bound in step.value.args]
        compares = [operator_of(bound.value) for bound in bounds if bound is not None]
        return compares == ["relax.greater_equal", "relax.less"]

    # ---- changes ------------------------------------------------------------------------------

    def _replace(
        self, matmul: Matmul, total: _WorkerSum | None, edits: Edits, builder: relax.BlockBuilder
    ) -> None:
        """Replace a matmul, and the sum over workers of its result."""
        if matmul.refusal:
            raise _RefusedError(matmul.refusal)
        if matmul.dtype not in FLOATS:
            raise _RefusedError(wrong_type(matmul.dtype))
        parts = _parts(matmul, 1 if total is None else total.workers)
        binding = matmul.bindings[0]
        reason = f"its inner dimension is summed in {arguments.counted(parts, 'part')}"
        if total is not None:
            reason += f", and over {total.workers} workers in the order of a tree"
        note(Decision(_NAME, self.name, matmul.subject, "fixed", reason))
        if total is None:
            call = call_of(matmul, builder, parts=parts)
            edits.replace(binding.var, [relax.VarBinding(binding.var, call, binding.span)])
            return
        ty = relax.TensorType(binding.var.ty.shape, _WIDE, binding.var.ty.vdevice)
        call = call_of(matmul, builder, parts=parts, ty=ty)
        value = self._bind(self.uses.bound[binding.var], call, edits)
        for move in total.moves:
            old = move.value
            call = builder.normalize(relax.Call(old.op, [value, *old.args[1:]], old.attrs))
            value = self._bind(move, call, edits)
        attrs = replace(CollectiveAttrs.of(total.collective), reduction="tree_sum")
        wide = builder.normalize(make(value, list(total.collective.args[1:]), attrs))
        var = total.step.var
        if dtype_of(var.ty) == _WIDE:
            edits.replace(var, [relax.VarBinding(var, wide)])
            return
        wide_var = _wide_variable(total.step, wide.ty)
        rounded = builder.normalize(relax.op.astype(wide_var, dtype_of(var.ty)))
        bindings = [relax.VarBinding(wide_var, wide), relax.VarBinding(var, rounded)]
        edits.replace(var, bindings)

    def _bind(self, step: Step, value: relax.Expr, edits: Edits) -> Any:
        var = _wide_variable(step, value.ty)
        edits.replace(step.var, [relax.VarBinding(var, value)])
        return var


def _subject(step: Step) -> str:
    """Return the name of a call in a message."""
    value = step.value
    callee = name_of_callee(value.op)
    if callee.startswith("relax.call_"):
        callee = name_of_callee(value.args[0]) or name_of(value.args[0])
    return f"{callee.removeprefix('relax.')} {name_of(step.var)}: {step.var.ty}"


def _parts(matmul: Matmul, workers: int) -> int:
    """Return the parts of the inner dimension that one of several workers adds up."""
    k = matmul.inner
    if k is None:
        if workers == 1:
            raise _RefusedError(
                "its inner dimension is symbolic, so that the order of its sums depends on the "
                "length of the input; attention that FuseAttention recognizes has a fixed order"
            )
        raise _RefusedError("its inner dimension is symbolic, and is split over workers")
    if workers & (workers - 1) or workers > PARTS:
        raise _RefusedError(
            f"its result is summed over {workers} workers; expected a power of two up to {PARTS}"
        )
    # The largest power of two that divides the whole inner dimension.
    parts = min(PARTS, (k * workers) & -(k * workers)) if k else workers
    return parts // workers


def _wide_variable(step: Step, ty: Any) -> Any:
    kind = relax.DataflowVar if step.in_dataflow else relax.Var
    return kind(f"{step.var.name}_wide", ty)


def _is_zero(value: Any) -> bool:
    """Return whether a value is a constant of zeros."""
    if not isinstance(value, GenericConst) or not isinstance(value.value, tvm.runtime.Tensor):
        return False
    return not value.value.numpy().any()
