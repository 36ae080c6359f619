# SPDX-License-Identifier: Apache-2.0
"""Trace what a function does together with other ranks, and under which conditions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.packed_functions import RESULT
from tvm_ipc.packed_functions.program_function_declarations import (
    COPY,
    PEER_VIEW,
    TEAM,
    TEAM_INDEX,
    WORKER_ID,
    WORKER_RANK,
)
from tvm_ipc.tvm_moved_names import GenericConst
from tvm_ipc.verify.comm_trace_types import Action, ActionKind, Actions, Branch
from tvm_ipc.verify.compare_collective_arguments import Signature, SignatureComparer
from tvm_ipc.verify.known_calls import KnownCall, text_of
from tvm_ipc.verify.known_values_in_tensors import (
    AbstractValue,
    PendingRequest,
    Ranks,
    TensorContents,
    TensorRef,
)
from tvm_ipc.verify.module_functions_and_summary_cache import Module
from tvm_ipc.verify.packed_calls_to_trace_actions import CallActions, requested_team
from tvm_ipc.verify.per_rank_and_uniform_values import (
    KnownValue,
    PerRank,
    RankModel,
    Uniform,
    computed,
    of_expression,
    of_kernel,
    uniform,
)
from tvm_ipc.verify.range_loops import Loop
from tvm_ipc.verify.relax_as_plain_statements import SAME, Argument, Statement
from tvm_ipc.verify.statement_walker import StatementWalker
from tvm_ipc.verify.symbolic_sizes_of_call_arguments import CallSizes

#: The most statements that a trace follows, those of called functions included.
MOST_STEPS = 200_000


class TraceTooLongError(Exception):
    """A function executes more statements than a trace follows."""


class CommTraceBuilder(StatementWalker):
    """Interprets one function that is called from outside, with what each rank knows.

    It keeps the actions and branches of the path so far in `_actions`. `TensorContents` holds what
    is known of tensors, `CallSizes` of shape variables; `CallActions` describes single calls.
    """

    def __init__(self, module: Module, ranks: RankModel) -> None:
        super().__init__(module)
        self._ranks = ranks
        self.comparer = SignatureComparer(module.extents)
        self._contents = TensorContents(ranks)
        self._sizes = CallSizes(
            ranks, module.extents, self.comparer.related, self._number, self._variables
        )
        self._calls = CallActions(ranks, self._contents, self._sizes)
        self._actions: Actions = []
        self._call_stack: list[str] = []  #: functions of the module
        self._steps_left = MOST_STEPS
        self._constant_number = cache(lambda number: PerRank((number,) * ranks.size))

    @property
    def implied_sizes(self) -> set[int]:
        """The numbers of ranks that the program implies by the ranks that it lists in teams."""
        return self._calls.implied_sizes

    def build(self, name: str) -> Actions:
        """Return the actions and branches of a function."""
        function = self._module.function(name)
        values = [self._parameter(parameter.ty) for parameter in function.params]
        self._follow(name, values, None, Statement(relax.Var(name, None), function))
        return self._actions

    def _parameter(self, ty: Any) -> AbstractValue:
        if isinstance(ty, relax.TupleType):
            return tuple(self._parameter(field) for field in ty.fields)
        return self._contents.tensor(None) if isinstance(ty, relax.TensorType) else None

    # ---- values -----------------------------------------------------------------------------

    def _free(self, variable: int) -> AbstractValue:
        return None

    def _constant(self, expr: Any) -> AbstractValue:
        kind = type(expr)
        if kind is tirx.IntImm:  # the most frequent case; `of_expression` is much slower
            return self._constant_number(int(expr.value))
        if kind is GenericConst:
            number = _scalar(expr)
            is_known = number is not None
            return self._contents.tensor(
                self._constant_number(number) if is_known else computed([], self._ranks)
            )
        if kind is not relax.ShapeExpr and tvm.ir.is_prim_expr(expr):
            return of_expression(expr, self._number, self._ranks)
        return None

    def _number(self, variable: Any) -> KnownValue:
        """Return what is known of a number that the program computed."""
        value = self._values.get(hash(variable))
        return value if isinstance(value, (PerRank, Uniform)) else None

    def _bind(self, step: Statement, value: AbstractValue) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TraceTooLongError
        self._sizes.rebind(step.variable)
        if step.kind == SAME:
            extents: Any = getattr(step.bound.ty, "values", None) or ()
            if isinstance(value, Ranks) and value.team is None and len(extents) == 1:
                # The shape of the rank: its extent is the rank.
                self._values[hash(extents[0])] = PerRank(tuple(range(self._ranks.size)))
            self._sizes.bind(step)
        elif type(step.bound.ty) is tvm.ir.PrimType:
            self._sizes.compute(step.bound)

    def _branch(self, step: Statement) -> AbstractValue:
        contents = self._contents
        condition = contents.known(self._value(step.args[0]))
        if isinstance(condition, PerRank) and condition.is_uniform:
            return self._sequence(step.then if condition.values[0] else step.otherwise, step)
        branch = Branch(condition, step, self._call_stack[-1])
        outer_actions, self._actions = self._actions, branch.then
        contents.enter_branch()
        then_value = self._sequence(step.then, step)
        then_changes, self._actions = contents.leave_branch(), branch.otherwise
        contents.enter_branch()
        else_value = self._sequence(step.otherwise, step)
        else_changes, self._actions = contents.leave_branch(), outer_actions
        self._actions.append(branch)
        contents.join(condition, then_changes, else_changes)
        return contents.select(condition, then_value, else_value)

    # ---- calls ------------------------------------------------------------------------------

    def _call_function(self, step: Statement, values: list[AbstractValue]) -> AbstractValue:
        return self._follow(step.name, values, step.args, step)

    def _follow(
        self,
        name: str,
        values: list[AbstractValue],
        arguments: list[Argument] | None,
        step: Statement,
    ) -> AbstractValue:
        """Follow a function of the module; without arguments, it is called from outside."""
        if name in self._call_stack:
            signature = Signature(f"all calls of {name}")
            self._actions.append(Action(ActionKind.PARTIAL, step, self._call_stack[-1], signature))
            return self._unknown(step, values)
        self._call_stack.append(name)
        self._sizes.enter(list(self._module.function(name).params), arguments)
        loop = self._module.loop(name) if arguments is not None else None
        if loop is None:
            result = self._enter(name, values, step)
        else:
            result = self._run_loop(name, loop, values, step)
        self._call_stack.pop()
        return result

    def _run_loop(
        self, name: str, loop: Loop, values: list[AbstractValue], step: Statement
    ) -> AbstractValue:
        """Follow the body of a loop twice: all ranks are in the same iteration at a time."""
        statements = self._module.statements(name)
        self._variables.update(statements.variables)
        self._values.update(zip(map(hash, self._module.function(name).params), values, strict=True))
        passes, may_end = loop.passes(step.args)
        outer_actions = self._actions
        for _ in range(passes):
            if loop.bounds is not None:  # all ranks count alike
                self._values[hash(loop.bounds.begin)] = uniform(self._ranks.world)
                self._sizes.rebind(hash(loop.bounds.begin))
            if may_end:
                # Whether there is another iteration depends on sizes, which ranks may differ in.
                branch = Branch(None, step, self._call_stack[-2])
                self._actions.append(branch)
                self._actions = branch.then
            self._evaluate(loop.once)
        self._actions = outer_actions
        return None

    def _run_kernel(
        self, step: Statement, values: list[AbstractValue], written: frozenset[int]
    ) -> AbstractValue:
        known = {index: self._contents.known(value) for index, value in enumerate(values)}
        results = of_kernel(self._module.function(step.name), known, self._ranks) or {}
        for index, result in results.items():
            if index in written:
                self._contents.write(values[index], result, may_keep=False)
        inputs = [value for index, value in enumerate(values) if index not in written]
        return self._access(step, inputs, [values[k] for k in written if k not in results])

    def _unknown(self, step: Statement, values: list[AbstractValue]) -> AbstractValue:
        self._contents.clobber(values)
        return None

    def _access(
        self, step: Statement, reads: Iterable[AbstractValue], writes: Iterable[AbstractValue]
    ) -> AbstractValue:
        result = computed(map(self._contents.known, reads), self._ranks)
        for value in writes:
            self._contents.write(value, result)
        is_tensor = isinstance(step.bound.ty, relax.TensorType)
        return self._contents.tensor(result) if is_tensor else None

    def _allocate(self, step: Statement) -> AbstractValue:
        return self._contents.allocate()

    def _view(self, step: Statement, values: list[AbstractValue]) -> AbstractValue:
        return _part(values[0], is_part=step.name == "relax.memory.view")

    # ---- packed functions -------------------------------------------------------------------

    def _call(self, step: Statement, call: KnownCall) -> AbstractValue:
        function = call.function
        if function is WORKER_RANK:
            return PerRank(tuple(range(self._ranks.size)))
        if function is WORKER_ID:
            return Ranks(None)
        if function is TEAM:
            return requested_team(call)
        if function is TEAM_INDEX:
            return self._team_index(call)
        if function is PEER_VIEW:
            return self._peer_view(step, call)
        return self._communicate(step, call)

    def _communicate(self, step: Statement, call: KnownCall) -> AbstractValue:
        """Call a function as its signature describes it: most of them are collectives."""
        function = call.function
        action = self._calls.action(call, step, self._call_stack[-1])
        if action is not None:
            self._actions.append(action)
        self._write_results(call, action)
        if function.exposes:
            assert action is not None
            tensor = call.value(function.exposes)
            return PendingRequest((action,), tensor if isinstance(tensor, TensorRef) else None)
        if RESULT in function.scopes or function.result in ("Storage", "Tensor"):
            # Two tensors that are allocated in one storage have contents of their own.
            if not function.result_of or function.result_of == "storage":
                return self._contents.allocate()
            return self._slice(call, call.operands(function.result_of)[0])
        return None

    def _slice(self, call: KnownCall, source: AbstractValue) -> AbstractValue:
        """Return a slice of a tensor, which may be a different one on each rank."""
        view = _part(source)
        numbers = [
            self._contents.known(value)
            for parameter, value in call.bound
            if parameter.type == "int"
        ]
        is_same = (
            call.function.parameter_of_type("Team") is None
            and computed(numbers, self._ranks) is not None
        )
        if is_same or not isinstance(view, TensorRef):
            return view
        return replace(view, differs_by_rank=True)

    def _write_results(self, call: KnownCall, action: Action | None) -> None:
        """Write the results of a call to the tensors that it writes."""
        function = call.function
        excluded = {*function.writes, *(function.peers_read if action is not None else ())}
        read = [
            self._contents.known(value)
            for parameter, value in call.bound
            if parameter.name not in excluded
            and (parameter.type.startswith("Tensor") or isinstance(value, (PerRank, Uniform)))
        ]
        known = read[0] if function is COPY else computed(read, self._ranks)
        for parameter, value in call.bound:
            if parameter.name not in function.writes:
                continue
            result = known
            if action is not None:
                teams = action.teams if parameter.name in function.replicated else None
                result = None if teams is None else computed([known, uniform(teams)], self._ranks)
            self._contents.write(value, result, may_keep=False)

    def _start(
        self, step: Statement, call: KnownCall | None, values: list[AbstractValue]
    ) -> AbstractValue:
        caller = self._call_stack[-1]
        action = Action(ActionKind.START, step, caller)
        if call is None:
            self._contents.clobber(values)
            name = text_of(step.args[0]) or "an unknown function"
            action.started = Action(ActionKind.PARTIAL, step, caller, Signature(name))
        else:
            action.started = self._calls.action(call, step, caller)
            self._write_results(call, action.started)
        self._actions.append(action)
        return PendingRequest((action,))

    def _wait(self, step: Statement, request: AbstractValue) -> AbstractValue:
        self._await(ActionKind.WAIT, request, step)
        return None

    def _await(self, kind: ActionKind, value: AbstractValue, step: Statement) -> Action:
        """Wait for a request, or for the exposed buffers of peers."""
        starts = value.actions if isinstance(value, PendingRequest) else ()
        action = Action(kind, step, self._call_stack[-1], starts=starts)
        self._actions.append(action)
        return action

    def _peer_view(self, step: Statement, call: KnownCall) -> AbstractValue:
        """Wait for the exposed buffer of a peer; return a view of it."""
        exposed = call.value("exposed")
        action = self._await(ActionKind.PEER_VIEW, exposed, step)
        known = self._contents.known(call.value("shift"))
        if isinstance(known, PerRank):
            action.shift = known.values
            if known.is_uniform and known.values[0] == 0 and isinstance(exposed, PendingRequest):
                return exposed.tensor
        return self._contents.tensor(None)

    def _team_index(self, call: KnownCall) -> AbstractValue:
        """Write the index of each rank in its team."""
        teams, _ = self._calls.teams(call)
        known: KnownValue = None
        if teams is not None:
            outside = max(map(len, teams))  # what the runtime writes for a rank without a team
            known = PerRank(
                tuple(
                    team.index(rank) if rank in team else outside for rank, team in enumerate(teams)
                )
            )
        self._contents.write(call.value("recv"), known, may_keep=False)
        return None


def _part(value: AbstractValue, is_part: bool = True) -> AbstractValue:
    """Return a view of a tensor, of a part of it or of all of it."""
    if not isinstance(value, TensorRef):
        return None
    return replace(value, is_whole=value.is_whole and not is_part)


def _scalar(const: GenericConst) -> int | None:
    """Return the value of an integer or Boolean scalar constant, None for any other constant."""
    value = const.value
    if isinstance(value, (bool, int)):
        return int(value)
    if not hasattr(value, "numpy"):
        return None
    array = value.numpy()
    return int(array.reshape(())) if array.size == 1 and array.dtype.kind in "biu" else None
