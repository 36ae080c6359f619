# SPDX-License-Identifier: Apache-2.0
"""Trace what a function does together with other ranks, and under which conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import RESULT, Team
from tvm_ipc.packed_functions.program_function_declarations import (
    COPY,
    PEER_VIEW,
    TEAM,
    TEAM_INDEX,
    WAIT,
    WORKER_ID,
    WORKER_RANK,
)
from tvm_ipc.verify import known_calls
from tvm_ipc.verify.allocations_and_views_with_bounds import text_of
from tvm_ipc.verify.comm_trace_types import Action, ActionKind, Actions, Branch
from tvm_ipc.verify.compare_collective_arguments import Signature, SignatureComparer
from tvm_ipc.verify.known_calls import KnownCall
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
from tvm_ipc.verify.relax_as_plain_statements import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    IF,
    ITEM,
    KILL,
    SAME,
    Argument,
    Sequence,
    Statement,
)
from tvm_ipc.verify.symbolic_sizes_of_call_arguments import CallSizes

#: The most statements that a trace follows, those of called functions included.
MOST_STEPS = 200_000


class TraceTooLongError(Exception):
    """A function executes more statements than a trace follows."""


class CommTraceBuilder:
    """Interprets one function that is called from outside, with what each rank knows.

    It keeps the actions and branches of the path so far in `_actions`. `TensorContents` holds what
    is known of tensors, `CallSizes` of shape variables; `CallActions` describes single calls.
    """

    def __init__(self, module: Module, ranks: RankModel) -> None:
        self._module = module
        self._ranks = ranks
        world = ranks.teams(Team.WORLD)
        assert world is not None
        self._world = world
        self._values: dict[int, AbstractValue] = {}  #: of variables, by their hash
        self._variables: dict[int, Any] = {}
        self.comparer = SignatureComparer(module.extents)
        self._contents = TensorContents(ranks)
        self._sizes = CallSizes(
            ranks, module.extents, self.comparer.related, self._number, self._variables
        )
        self._calls = CallActions(ranks, self._contents, self._sizes, self._value)
        self._actions: Actions = []
        self._call_stack: list[str] = []  #: functions of the module
        self._steps_left = MOST_STEPS

    @property
    def implied_sizes(self) -> set[int]:
        """The numbers of ranks that the program implies by splitting all ranks into teams."""
        return self._calls.implied_sizes

    def build(self, name: str) -> Actions:
        """Return the actions and branches of a function."""
        parameters = self._module.function(name).params
        step = Statement(relax.Var(name, None), self._module.function(name))
        self._call(name, [self._parameter(parameter.ty) for parameter in parameters], None, step)
        return self._actions

    def _parameter(self, ty: Any) -> AbstractValue:
        if isinstance(ty, relax.TupleType):
            return tuple(self._parameter(field) for field in ty.fields)
        if not isinstance(ty, relax.TensorType):
            return None
        return self._contents.tensor(None)

    def _call(
        self,
        name: str,
        values: list[AbstractValue],
        arguments: list[Argument] | None,
        step: Statement,
    ) -> AbstractValue:
        """Run a function of the module; without arguments, it is called from outside."""
        function, statements = self._module.function(name), self._module.statements(name)
        if name in self._call_stack or len(function.params) != len(values):
            signature = Signature(f"all calls of {name}")
            self._actions.append(Action(ActionKind.PARTIAL, step, self._call_stack[-1], signature))
            return self._clobber(values)
        self._call_stack.append(name)
        self._sizes.enter(list(function.params), arguments)
        self._values.update(zip(map(hash, function.params), values, strict=True))
        self._variables.update(statements.variables)
        result = self._sequence(statements.body)
        self._call_stack.pop()
        return result

    def _sequence(self, sequence: Sequence) -> AbstractValue:
        for step in sequence.steps:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise TraceTooLongError
            if step.kind == KILL:
                continue
            self._values[step.variable] = self._evaluate(step)
            self._sizes.rebind(step.variable)
            if step.kind == SAME:
                self._sizes.bind(step)
            elif type(step.bound.ty) is tvm.ir.PrimType:
                self._sizes.compute(step.bound)
        return self._value(sequence.result)

    # ---- expressions ------------------------------------------------------------------------

    def _evaluate(self, step: Statement) -> AbstractValue:
        if step.kind == IF:
            return self._if(step)
        if step.kind == CALL_GLOBAL:
            return self._global(step.name, step.args, step)
        if step.kind == CALL_PACKED:
            return self._packed(step.name, step.args, step)
        if step.kind == CALL_OPERATOR:
            return self._operator(step)
        if step.kind == ITEM:
            whole = self._value(step.args[0])
            return whole[step.args[1]] if isinstance(whole, tuple) else self._clobber([whole])
        if step.kind == SAME:
            return self._bind(step, self._value(step.args[0]))
        return self._clobber([self._value(argument) for argument in step.args])

    def _value(self, argument: Argument) -> AbstractValue:
        kind = type(argument)
        if kind is int:
            return self._values.get(argument)
        if kind is tuple:
            return tuple(self._value(field) for field in argument)
        if kind is Statement:
            return self._evaluate(argument)
        if kind is tirx.IntImm:  # the most frequent case; `of_expression` is much slower
            return PerRank((int(argument.value),) * self._ranks.size)
        if kind is relax.ShapeExpr:
            return None
        if kind is tvm.ir.GenericConst:
            number = _scalar(argument)
            same = uniform(self._world)
            contents = same if number is None else PerRank((number,) * self._ranks.size)
            return self._contents.tensor(contents)
        if tvm.ir.is_prim_expr(argument):
            return of_expression(argument, self._number, self._ranks)
        return None

    def _number(self, variable: Any) -> KnownValue:
        """Return what is known of a number that the program computed."""
        value = self._values.get(hash(variable))
        return value if isinstance(value, (PerRank, Uniform)) else None

    def _bind(self, step: Statement, value: AbstractValue) -> AbstractValue:
        """Define the variable that stands for the rank in a shape of it; return the value."""
        extents: Any = getattr(step.bound.ty, "values", None) or ()
        if isinstance(value, Ranks) and value.team is None and len(extents) == 1:
            self._values[hash(extents[0])] = PerRank(tuple(range(self._ranks.size)))
        return value

    def _clobber(self, values: list[AbstractValue]) -> AbstractValue:
        """Let unknown code write some values; return its result, of which nothing is known."""
        self._contents.clobber(values)
        return None

    def _view(self, value: AbstractValue, is_part: bool = True) -> AbstractValue:
        if not isinstance(value, TensorRef):
            return None
        return replace(value, is_whole=value.is_whole and not is_part)

    def _if(self, step: Statement) -> AbstractValue:
        contents = self._contents
        condition = contents.known(self._value(step.args[0]))
        if isinstance(condition, PerRank) and condition.is_uniform:
            return self._sequence(step.then if condition.values[0] else step.otherwise)
        branch = Branch(condition, step, self._call_stack[-1])
        outer_actions, self._actions = self._actions, branch.then
        contents.enter_branch()
        then_value = self._sequence(step.then)
        then_changes, self._actions = contents.leave_branch(), branch.otherwise
        contents.enter_branch()
        else_value = self._sequence(step.otherwise)
        else_changes, self._actions = contents.leave_branch(), outer_actions
        self._actions.append(branch)
        contents.join(condition, then_changes, else_changes)
        return contents.select(condition, then_value, else_value)

    # ---- calls ------------------------------------------------------------------------------

    def _global(self, name: str, args: list[Argument], step: Statement) -> AbstractValue:
        """Call a function of the module."""
        values = [self._value(argument) for argument in args]
        written = self._module.written(name)
        if written is None:
            if not isinstance(self._module.function(name), relax.Function):
                return self._clobber(values)
            return self._call(name, values, args, step)
        known = {index: self._contents.known(value) for index, value in enumerate(values)}
        results = of_kernel(self._module.function(name), known, self._ranks)
        inputs = [value for index, value in known.items() if index not in written]
        result = computed(inputs, self._ranks)
        for index in written:
            if index < len(values):
                if results is not None and index in results:
                    self._contents.write(values[index], results[index], may_keep=False)
                else:
                    self._contents.write(values[index], result)
        return None

    def _operator(self, step: Statement) -> AbstractValue:
        name, args = step.name, step.args
        if name in ("relax.call_pure_packed", "relax.call_builtin_with_ctx"):
            operands = args[1:]
            if name == "relax.call_builtin_with_ctx" and operands and type(operands[0]) is tuple:
                operands = [*operands[0]]
            if isinstance(args[0], relax.ExternFunc):
                return self._packed(str(args[0].global_symbol), operands, step)
        if name == "relax.vm.call_tir_dyn":
            operands = [*args[1]] if type(args[1]) is tuple else [args[1]]
            return self._global(args[0].name_hint, operands, step)
        values = [self._value(argument) for argument in args]
        if name.rpartition(".")[2] in ("alloc_tensor", "alloc_storage"):
            return self._contents.allocate()
        if name in known_calls.VIEW_OPERATORS:
            return self._view(values[0], is_part=name == "relax.memory.view")
        if name in known_calls.UNKNOWN_OPERATORS or name == "relax.call_tir_inplace":
            return self._clobber(values)
        if isinstance(step.bound.ty, relax.TensorType):
            result = computed(map(self._contents.known, values), self._ranks)
            return self._contents.tensor(result)
        return None

    def _packed(self, name: str, args: list[Argument], step: Statement) -> AbstractValue:
        if args and isinstance(args[0], tvm.ir.GlobalVar):  # call_tir_dyn, or a CUDA graph
            operands = args[1:]
            if len(operands) == 1 and type(operands[0]) is tuple:
                operands = [*operands[0]]
            return self._global(args[0].name_hint, operands, step)
        values = [self._value(argument) for argument in args]
        function = packed_functions.find(name)
        if function is None:
            if name in known_calls.VIEWS:
                return self._view(values[0], is_part=False)
            return None if name in known_calls.READERS else self._clobber(values)
        call = KnownCall(function, args)
        if not call.fits():
            return self._clobber(values)
        if function is WORKER_RANK:
            return PerRank(tuple(range(self._ranks.size)))
        if function is WORKER_ID:
            return Ranks(None)
        if function is TEAM:
            return requested_team(call)
        if function is TEAM_INDEX:
            return self._team_index(call, values)
        if function.starts:
            return self._start(args, step)
        if function is WAIT:
            self._wait(ActionKind.WAIT, values[0], step)
            return None
        if function is PEER_VIEW:
            return self._peer_view(call, values[0], step)
        return self._communicate(call, values, step)

    # ---- packed functions -------------------------------------------------------------------

    def _communicate(
        self, call: KnownCall, values: list[AbstractValue], step: Statement
    ) -> AbstractValue:
        """Call a function as its signature describes it: most of them are collectives."""
        function = call.function
        action = self._calls.action(call, step, self._call_stack[-1])
        if action is not None:
            self._actions.append(action)
        self._write_results(call, values, action)
        if function.exposes:
            assert action is not None
            tensor = values[call.positions(function.exposes)[0]]
            return PendingRequest((action,), tensor if isinstance(tensor, TensorRef) else None)
        if RESULT in function.scopes or function.result in ("Storage", "Tensor"):
            # Two tensors that are allocated in one storage have contents of their own.
            if not function.result_of or function.result_of == "storage":
                return self._contents.allocate()
            return self._slice(call, values[call.positions(function.result_of)[0]])
        return None

    def _slice(self, call: KnownCall, source: AbstractValue) -> AbstractValue:
        """Return a slice of a tensor, which may be a different one on each rank."""
        view = self._view(source)
        named = [
            parameter.name for parameter in call.function.parameters if parameter.type == "int"
        ]
        numbers = [self._contents.known(self._value(call.argument(name))) for name in named]
        is_same = (
            call.function.parameter_of_type("Team") is None
            and computed(numbers, self._ranks) is not None
        )
        if is_same or not isinstance(view, TensorRef):
            return view
        return replace(view, differs_by_rank=True)

    def _write_results(
        self, call: KnownCall, values: list[AbstractValue], action: Action | None
    ) -> None:
        """Write the results of a call to the tensors that it writes."""
        function = call.function
        parameters = function.bind(len(values)) or ()
        excluded = {*function.writes, *(function.peers_read if action is not None else ())}
        read = [
            self._contents.known(value)
            for parameter, value in zip(parameters, values, strict=True)
            if parameter.name not in excluded
            and (parameter.type.startswith("Tensor") or isinstance(value, (PerRank, Uniform)))
        ]
        known = read[0] if function is COPY else computed(read, self._ranks)
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.name not in function.writes:
                continue
            result = known
            if action is not None:
                teams = action.teams if parameter.name in function.replicated else None
                result = None if teams is None else computed([known, uniform(teams)], self._ranks)
            self._contents.write(value, result, may_keep=False)

    def _start(self, args: list[Argument], step: Statement) -> AbstractValue:
        """Start a request, whose function is the first argument."""
        values = [self._value(argument) for argument in args[1:]]
        function = packed_functions.find(text_of(args[0]) or "")
        call = None if function is None else KnownCall(function, args[1:])
        caller = self._call_stack[-1]
        action = Action(ActionKind.START, step, caller)
        if call is None or not call.fits():
            self._clobber(values)
            name = text_of(args[0]) or "an unknown function"
            action.started = Action(ActionKind.PARTIAL, step, caller, Signature(name))
        else:
            action.started = self._calls.action(call, step, caller)
            self._write_results(call, values, action.started)
        self._actions.append(action)
        return PendingRequest((action,))

    def _wait(self, kind: ActionKind, value: AbstractValue, step: Statement) -> Action:
        """Wait for a request, or for the exposed buffers of peers."""
        starts = value.actions if isinstance(value, PendingRequest) else ()
        action = Action(kind, step, self._call_stack[-1], starts=starts)
        self._actions.append(action)
        return action

    def _peer_view(self, call: KnownCall, exposed: AbstractValue, step: Statement) -> AbstractValue:
        """Wait for the exposed buffer of a peer; return a view of it."""
        action = self._wait(ActionKind.PEER_VIEW, exposed, step)
        known = self._contents.known(self._value(call.argument("shift")))
        if isinstance(known, PerRank):
            action.shift = known.values
            if known.is_uniform and known.values[0] == 0 and isinstance(exposed, PendingRequest):
                return exposed.tensor
        return self._contents.tensor(None)

    def _team_index(self, call: KnownCall, values: list[AbstractValue]) -> AbstractValue:
        """Write the index of each rank in its team."""
        teams, _ = self._calls.teams(call)
        (position,) = call.positions("recv")
        known: KnownValue = None
        if teams is not None and all(rank in team for rank, team in enumerate(teams)):
            known = PerRank(tuple(team.index(rank) for rank, team in enumerate(teams)))
        self._contents.write(values[position], known, may_keep=False)
        return None


def _scalar(const: tvm.ir.GenericConst) -> int | None:
    """Return the value of an integer or Boolean scalar constant, None for any other constant."""
    value = const.value
    if isinstance(value, (bool, int)):
        return int(value)
    if not hasattr(value, "numpy"):
        return None
    array = value.numpy()
    return int(array.reshape(())) if array.size == 1 and array.dtype.kind in "biu" else None
