# SPDX-License-Identifier: Apache-2.0
"""What expressions give, and what calls do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from tvm_ipc import contract
from tvm_ipc.contract import RESULT
from tvm_ipc.contract.programs import PART, PEER, WAIT
from tvm_ipc.transform.ir.polynomials import Number
from tvm_ipc.transform.safety import calls
from tvm_ipc.transform.safety.allocations import item_bytes, text_of
from tvm_ipc.transform.safety.buffers import (
    NOTHING,
    Buffer,
    Leaf,
    Storage,
    Value,
    objects,
    storage_of,
)
from tvm_ipc.transform.safety.calls import KnownCall
from tvm_ipc.transform.safety.hazards import HazardKind
from tvm_ipc.transform.safety.module import Module
from tvm_ipc.transform.safety.shows import Shows
from tvm_ipc.transform.safety.state import Pending, Summary
from tvm_ipc.transform.safety.statements import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    ITEM,
    LITERAL,
    SAME,
    Argument,
    Statement,
    Statements,
)


class Evaluation(Shows):
    """The values of a function's variables, and how expressions make them."""

    def __init__(self, module: Module, name: str, steps: Statements) -> None:
        super().__init__(name, module.extents, module.hazards, steps)
        self._module = module
        self._values: dict[int, Value] = {}
        self._held = False  #: whether what was just evaluated is held already
        self._cached: dict[str, Value] = {}
        self._alone = module.alone

    def _value(self, argument: Argument) -> Value:
        kind = type(argument)
        if kind is int:
            value = self._values.get(argument)
            if value is None:  # of the function around this one
                variable = self._steps.variables[argument]
                value = self._values[argument] = self._parameter(variable.name, variable.ty)
            return value
        if kind is tuple:
            return tuple([self._value(part) for part in argument])
        return self._evaluate(argument) if kind is Statement else NOTHING

    def _evaluate(self, step: Statement) -> Value:
        kind, args = step.kind, step.args
        if kind == SAME:
            return self._value(args[0])
        if kind == ITEM:
            whole = self._value(args[0])
            return whole[args[1]] if type(whole) is tuple else whole
        if kind == CALL_OPERATOR:
            return self._operator(step, args)
        if kind == CALL_GLOBAL:
            return self._global(step.name, args, step)
        if kind == CALL_PACKED:
            return self._packed(step.name, args, step)
        if kind == LITERAL:
            return self._literal(step)
        return self._unknown(self._arguments(args), step)

    def _literal(self, step: Statement) -> Value:
        raise NotImplementedError

    def _inline(self, name: str, steps: Statements, values: list[Value], step: Statement) -> Value:
        raise NotImplementedError

    def _parameter(self, name: str, ty: Any) -> Value:
        if isinstance(ty, relax.TupleType):
            return tuple(self._parameter(f"{name}[{i}]", t) for i, t in enumerate(ty.fields))
        if isinstance(ty, (relax.ShapeType, tvm.ir.PrimType, relax.FuncType)):
            return NOTHING
        storage = Storage(name, None, external=True)
        # What is no tensor may be a storage, or anything else that reaches memory.
        return frozenset({Buffer(name, storage) if isinstance(ty, relax.TensorType) else storage})

    def _arguments(self, args: Iterable[Argument]) -> list[Value]:
        return [self._value(argument) for argument in args]

    def _operator(self, step: Statement, args: list[Argument]) -> Value:
        handler = _OPERATORS.get(step.name)
        if handler is not None:
            return handler(self, args, step)
        values = self._arguments(args)
        if step.name in calls.UNKNOWN_OPERATORS:
            return self._unknown(values, step)
        if step.name not in calls.SAME_MEMORY:
            self._read(objects(tuple(values)), step)
        return values[0] if step.name in calls.VIEW_OPERATORS else self._fresh(step.value.ty, step)

    def _global(self, name: str, args: Iterable[Argument], step: Statement) -> Value:
        written, values = self._module.written(name), self._arguments(args)
        if written is not None:
            self._compute(objects(tuple(values)), step)
            for index, value in enumerate(values):
                if index not in written and value:
                    self._read(objects(value), step)
            for index in written:
                if index < len(values):
                    self._write(objects(values[index]), step)
            return NOTHING
        if isinstance(self._module.function(name), relax.Function):
            steps = self._module.called_once(name)
            if steps is not None and len(self._module.function(name).params) == len(values):
                return self._inline(name, steps, values, step)
            summary = self._module.summary(name)
            if summary is not None and len(summary.parameters) == len(values):
                return self._apply(summary, values, step)
        return self._unknown(values, step)

    def _packed(self, name: str, args: list[Argument], step: Statement) -> Value:
        handler = _PACKED.get(name)
        if handler is not None:
            return handler(self, args, step)
        values = self._arguments(args)
        function = contract.find(name)
        if function is not None:
            return self._known(KnownCall(function, args), values, step)
        if name in calls.READERS:
            self._read(objects(tuple(values)), step)
            return NOTHING
        if name in calls.VIEWS:
            if name not in calls.SAME_MEMORY:
                self._read(objects(values[0]), step)
            return values[0]
        return self._unknown(values, step)

    def _known(self, call: KnownCall, values: list[Value], step: Statement) -> Value:
        """Do what the contract says of a function."""
        function = call.function
        if not call.fits():
            return self._unknown(values, step)
        if function.posts:
            return self._post(values[1:], step.args[1:], text_of(step.args[0]), step)
        if function is WAIT:
            self._finish(tuple(objects(values[0])), step)
            return NOTHING
        if function.shows or function.hides or function is PEER:
            return self._of_shows(call, values, step)
        if function.reads or function.writes:
            self._access(call, values, step)
        if function.result == "Storage":
            shape, item = call.argument("shape"), item_bytes(call.argument("dtype"))
            return frozenset({self._alloc_storage(shape, item, function.scopes.get(RESULT), step)})
        if not function.result_of:
            return NOTHING
        source = values[call.places(function.result_of)[0]]
        if function is PART:
            return source  # where it begins depends on the rank
        if not call.places("offset"):
            return source
        if not call.places("dtype"):
            return self._view(source, step, call.argument("offset"), call.argument("shape"))
        return self._alloc_tensor(source, step, *map(call.argument, ("offset", "shape", "dtype")))

    def _post(
        self, values: list[Value], args: list[Argument], name: str | None, step: Statement
    ) -> Value:
        """Start a work, which does what a function of the contract does."""
        function = contract.find(name or "")
        call = None if function is None else KnownCall(function, args)
        if function is None or call is None or not call.fits():
            everything = tuple(objects(tuple(values)))
            return self._start(everything, everything, (), step)

        def of(names: tuple[str, ...]) -> tuple[Storage | Buffer, ...]:
            return tuple(objects(tuple(values[place] for place in call.places(*names))))

        left = of(function.peers_read) if call.leaves_pending(False) else ()
        return self._start(of(function.reads), of(function.writes), left, step)

    def _access(self, call: KnownCall, values: list[Value], step: Statement) -> None:
        """Read and write what a function does, and let ranks meet as they do in it."""
        self._state.done += 1
        function = call.function

        def of(names: tuple[str, ...]) -> list[Storage | Buffer]:
            return list(objects(tuple(values[place] for place in call.places(*names))))

        written = of(function.writes)
        self._read(of(function.reads), step)
        self._write(written, step)
        team = call.meets()
        if team is not None:
            self._state.meet(team)
        if call.leaves_pending(self._module.assume_no_exit_barrier):
            for thing in of(function.peers_read):
                self._leave_pending(thing, call.team(), written, step)

    def _unknown(self, values: list[Value], step: Statement) -> Value:
        """A call that may read and write what it is given, and may return it."""
        self._state.done += 1
        given = list(objects(tuple(values)))
        self._give_away(given, step)
        self._read(given, step)
        self._write(given, step, certain=False)
        ty = step.bound.ty
        if isinstance(ty, (relax.ShapeType, tvm.ir.PrimType)) or ty == relax.TupleType([]):
            return NOTHING
        weak: set[Storage | Buffer] = set()
        for thing in given:
            if isinstance(thing, Buffer):
                thing = replace(thing, weak=True, origin=None)
            weak.add(thing)
        return frozenset({*weak, Storage(step.bound.name, None, external=True)})

    def _apply(self, summary: Summary, values: list[Value], step: Statement) -> Value:
        """Do what a function of the module does."""
        self._state.done += 1
        self._give_away(objects(tuple(values)), step)
        bound: dict[Storage, Leaf] = {}
        for parameter, value in zip(summary.parameters, values, strict=True):
            _bind(parameter, value, bound)
        fresh: dict[Storage | Buffer, Storage | Buffer] = {}

        def here(thing: Storage | Buffer) -> Leaf:
            storage = storage_of(thing)
            if storage in bound:
                return frozenset(
                    _part(thing, target) if isinstance(target, Storage) else target
                    for target in bound[storage]
                )
            if storage not in fresh:
                fresh[storage] = Storage(
                    f"{storage.name} of {step}",
                    storage.scope,
                    _static(storage.size),
                    storage.external,
                )
            if isinstance(thing, Buffer) and thing not in fresh:
                target = fresh[storage]
                assert isinstance(target, Storage)
                fresh[thing] = _part(thing, target)
            return frozenset({fresh[thing]})

        for storage in summary.reads:
            self._read(bound.get(storage, NOTHING), step)
        for access in summary.writes:
            if storage_of(access.memory) in bound:
                self._write(here(access.memory), step, access.passed)
        for team in summary.passed:
            self._state.meet(team)
        result = _map(summary.result, here)
        for pending in summary.pending:
            for thing in here(pending.memory):
                self._state.pending += (Pending(thing, pending.team, pending.reader),)
        return result

    def _fresh(self, ty: Any, step: Statement) -> Value:
        if isinstance(ty, relax.TupleType):
            return tuple(self._fresh(field, step) for field in ty.fields)
        if not isinstance(ty, relax.TensorType):
            return NOTHING
        name = step.bound.name
        return frozenset({Buffer(name, Storage(name, "global"))})

    # ---- calls with a meaning of their own ------------------------------------------------

    def _tensor_of_storage(self, args: list[Argument], step: Statement) -> Value:
        return self._alloc_tensor(self._value(args[0]), step, *args[1:4])

    def _call_tir_dyn(self, args: list[Argument], step: Statement) -> Value:
        return self._global(args[0].name_hint, args[1], step)

    def _in_place(self, args: list[Argument], step: Statement) -> Value:
        values = self._arguments(args[1])
        self._read(objects(tuple(values)), step)
        results = []
        for index in step.value.attrs.inplace_indices:
            in_place = int(index) >= 0
            results.append(values[int(index)] if in_place else self._fresh(step.value.ty, step))
            if in_place:
                self._write(objects(results[-1]), step)
        return results[0] if len(results) == 1 else tuple(results)

    def _by_name(self, args: list[Argument], step: Statement) -> Value:
        """Call a packed function that is the first argument."""
        callee, rest = args[0], list(args[1:])
        if isinstance(callee, relax.ExternFunc):
            return self._packed(str(callee.global_symbol), rest, step)
        return self._unknown(self._arguments(args), step)

    def _with_context(self, args: list[Argument], step: Statement) -> Value:
        given = args[1] if type(args[1]) is tuple else (args[1],)
        return self._by_name([args[0], *given], step)

    def _cached_alloc(self, args: list[Argument], step: Statement) -> Value:
        """CUDA graphs: the storages are made once and live as long as the program."""
        name = args[0].name_hint
        if name not in self._cached:
            self._cached[name] = self._global(name, [], step)
            self._state.hold(self._cached[name])
        return self._cached[name]

    def _captured(self, args: list[Argument], step: Statement) -> Value:
        """CUDA graphs: of a function what the device does is repeated, and nothing of the host."""
        name = args[0].name_hint
        for inside in self._module.steps(name).body.steps:
            function = contract.find(inside.name) if inside.kind == CALL_PACKED else None
            if function is not None and (function.shows or function.hides or function.posts):
                key = (self._name, HazardKind.CAPTURED, inside.variable)
                self._add(key, HazardKind.CAPTURED, function.name, inside, name, "")
        given = args[1] if type(args[1]) is tuple else (args[1],)
        return self._global(args[0].name_hint, given, step)


def _bind(parameter: Value, value: Value, bound: dict[Storage, Leaf]) -> None:
    if isinstance(parameter, tuple):
        parts = value if isinstance(value, tuple) else (value,) * len(parameter)
        for inner, part in zip(parameter, parts, strict=False):
            _bind(inner, part, bound)
        return
    for thing in parameter:
        bound[storage_of(thing)] = frozenset(objects(value))


def _map(value: Value, change: Callable[[Storage | Buffer], Leaf]) -> Value:
    if isinstance(value, tuple):
        return tuple(_map(part, change) for part in value)
    return frozenset(new for thing in value for new in change(thing))


def _part(thing: Storage | Buffer, storage: Storage) -> Storage | Buffer:
    if isinstance(thing, Storage):
        return storage
    begin, end = _static(thing.begin), _static(thing.end)
    return Buffer(thing.name, storage, begin, end, thing.weak)


def _static(number: Number | None) -> Number | None:
    """Keep what means the same in another function."""
    return number if isinstance(number, int) else None


_Handler = Callable[[Evaluation, list[Argument], Statement], Value]

_OPERATORS: dict[str, _Handler] = {
    "relax.memory.alloc_storage": lambda run, args, step: frozenset(
        {run._alloc_storage(args[0], 1, text_of(args[2]), step)}
    ),
    "relax.vm.alloc_storage": lambda run, args, step: frozenset(
        {run._alloc_storage(args[0], item_bytes(args[2]), text_of(args[3]), step)}
    ),
    "relax.memory.alloc_tensor": Evaluation._tensor_of_storage,
    "relax.vm.alloc_tensor": Evaluation._tensor_of_storage,
    "relax.builtin.alloc_tensor": lambda run, args, step: run._alloc_alone(
        args[0], args[1], args[3], step
    ),
    "relax.vm.call_tir_dyn": Evaluation._call_tir_dyn,
    "relax.call_tir_inplace": Evaluation._in_place,
    "relax.call_builtin_with_ctx": Evaluation._with_context,
    "relax.call_pure_packed": Evaluation._by_name,
}

_PACKED: dict[str, _Handler] = {
    "vm.builtin.call_tir_dyn": lambda run, args, step: run._global(
        args[0].name_hint, list(args)[1:], step
    ),
    "vm.builtin.cuda_graph.get_cached_alloc": Evaluation._cached_alloc,
    "vm.builtin.cuda_graph.run_or_capture": Evaluation._captured,
}
