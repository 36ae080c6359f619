# SPDX-License-Identifier: Apache-2.0
"""What expressions give, and what calls do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.transform.safety import calls, memory
from tvm_ipc.transform.safety.effects import Effects
from tvm_ipc.transform.safety.extents import Extents, Given
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.memory import (
    NOTHING,
    Buffer,
    Leaf,
    Pending,
    Storage,
    Summary,
    Value,
    objects,
    storage_of,
)
from tvm_ipc.transform.safety.polynomials import Number
from tvm_ipc.transform.safety.steps import (
    CALL_GLOBAL,
    CALL_OPERATOR,
    CALL_PACKED,
    ITEM,
    LITERAL,
    SAME,
    Argument,
    Step,
    Steps,
)

#: Where a tensor begins and ends, None where that is not known, and what is given by its extents.
_Span = tuple[Number | None, Number | None, Given]


class Module(Protocol):
    """What is known of the module around a function."""

    assume_no_exit_barrier: bool
    extents: Extents
    hazards: dict[tuple[Any, ...], Hazard]

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""

    def written(self, name: str) -> frozenset[int] | None:
        """Return which parameters a PrimFunc writes, None for what is none."""

    def called_once(self, name: str) -> Steps | None:
        """Return what a function does that only the call at hand calls, None for any other."""

    def summary(self, name: str) -> Summary | None:
        """Return what a Relax function does, None for one that is being looked at: recursion."""


class Evaluation(Effects):
    """The values of a function's variables, and how expressions make them."""

    def __init__(self, module: Module, name: str, steps: Steps) -> None:
        super().__init__(name, module.extents, module.hazards)
        self._module = module
        self._steps = steps
        self._values: dict[int, Value] = {}
        self._spans: dict[Any, _Span] = {}
        self._kept: list[Any] = []
        self._held = False  #: whether what was just evaluated is held already
        self._cached: dict[str, Value] = {}

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
        return self._evaluate(argument) if kind is Step else NOTHING

    def _evaluate(self, step: Step) -> Value:
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

    def _literal(self, step: Step) -> Value:
        raise NotImplementedError

    def _inline(self, name: str, steps: Steps, values: list[Value], step: Step) -> Value:
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

    def _operator(self, step: Step, args: list[Argument]) -> Value:
        handler = _OPERATORS.get(step.name)
        if handler is not None:
            return handler(self, args, step)
        values = self._arguments(args)
        if step.name in calls.UNKNOWN_OPERATORS:
            return self._unknown(values, step)
        self._read(objects(tuple(values)), step)
        return values[0] if step.name in calls.VIEW_OPERATORS else self._fresh(step.value.ty, step)

    def _global(self, name: str, args: Iterable[Argument], step: Step) -> Value:
        written = self._module.written(name)
        values = self._arguments(args)
        if written is not None:
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

    def _packed(self, name: str, args: list[Argument], step: Step) -> Value:
        handler = _PACKED.get(name)
        if handler is not None:
            return handler(self, args, step)
        collective = calls.find_collective(name)
        values = self._arguments(args)
        if collective is not None:
            self._collective(collective, args, values, step)
            return NOTHING
        if name in calls.READERS:
            self._read(objects(tuple(values)), step)
            return NOTHING
        if name in calls.VIEWS:
            self._read(objects(values[0]), step)
            return values[0]
        return self._unknown(values, step)

    def _collective(
        self, collective: calls.Collective, args: list[Argument], values: list[Value], step: Step
    ) -> None:
        send = NOTHING if collective.send is None else values[collective.send]
        recv = NOTHING if collective.recv is None else values[collective.recv]
        self._read(objects(send), step)
        self._write(objects(recv), step)
        team = collective.team(args)
        if collective.meets:
            self._state.meet(team)
        if collective.leaves_pending(args, self._module.assume_no_exit_barrier):
            for thing in objects(send):
                if storage_of(thing).scope in (None, IPC_MEMORY):
                    pending = Pending(thing, team, step)
                    for target in objects(recv):
                        same = storage_of(target) is storage_of(thing)
                        if same and self._may_overlap(target, thing):
                            example = self._overlap(target, thing)
                            storage = storage_of(thing)
                            self._endanger(HazardKind.WRITE, storage, step, pending, example)
                    self._state.pending += (pending,)

    def _unknown(self, values: list[Value], step: Step) -> Value:
        """A call that may read and write what it is given, and may return it."""
        given = list(objects(tuple(values)))
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

    def _apply(self, summary: Summary, values: list[Value], step: Step) -> Value:
        """Do what a function of the module does."""
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
        if memory.WORLD in summary.passed:
            self._state.meet(False)
        elif memory.GROUP in summary.passed:
            self._state.meet(True)
        self._state.passed |= summary.passed
        result = _map(summary.result, here)
        for pending in summary.pending:
            for thing in here(pending.memory):
                self._state.pending += (Pending(thing, pending.in_group, pending.reader),)
        return result

    def _fresh(self, ty: Any, step: Step) -> Value:
        if isinstance(ty, relax.TupleType):
            return tuple(self._fresh(field, step) for field in ty.fields)
        if not isinstance(ty, relax.TensorType):
            return NOTHING
        name = step.bound.name
        return frozenset({Buffer(name, Storage(name, "global"))})

    # ---- allocations ----------------------------------------------------------------------

    def _alloc_storage(self, shape: Argument, scope: Any, item: float, step: Step) -> Value:
        text = str(scope.value) if isinstance(scope, tvm.ir.StringImm) else None
        return frozenset({Storage(str(step.bound.name), text, self._size(shape, item))})

    def _alloc_tensor(self, args: list[Argument], step: Step) -> Value:
        source, offset, shape, dtype = args[:4]
        begin, end, given = self._span(offset, shape, _item_bytes(dtype))
        name = str(step.bound.name)
        extents, buffers = self._extents, []
        for thing in objects(self._value(source)):
            buffer = Buffer(name, storage_of(thing), begin, end, given=given)
            buffers.append(buffer)
            limit = buffer.storage.size
            if begin is not None and not extents.at_most(0, begin, given):
                where = f"begins at byte {extents.text(begin)}"
                self._out_of_bounds(0, begin, buffer, where, step)
            if end is None or limit is None:
                continue
            if not extents.at_most(end, limit, given):
                where = f"ends at byte {extents.text(end)} of {extents.text(limit)}"
                self._out_of_bounds(end, limit, buffer, where, step)
        return frozenset(buffers)

    def _out_of_bounds(
        self, low: Number, high: Number, buffer: Buffer, where: str, step: Step
    ) -> None:
        """Report that low may be more than high."""
        beyond = self._extents.subtract(low, self._extents.add(high, 1))
        example = self._extents.example(*buffer.given, beyond)
        self._report(HazardKind.BOUNDS, buffer, step, where, example)

    def _unplanned(self, args: list[Argument], step: Step) -> Value:
        shape, dtype, _device, scope = args
        storage = self._alloc_storage(shape, scope, _item_bytes(dtype), step)
        return frozenset(
            Buffer(step.bound.name, thing, 0, thing.size)
            for thing in objects(storage)
            if isinstance(thing, Storage)
        )

    def _span(self, offset: Argument, shape: Argument, item: float) -> _Span:
        """Return where a tensor begins and ends, None where that is not known."""
        dims = self._dims(shape)
        at = int(offset.value) if type(offset) is tirx.IntImm else offset
        key = (
            at if type(at) is int else hash(at),
            type(offset) is int,
            item,
            *map(_key, dims or ()),
        )
        span = self._spans.get(key) if dims is not None else None
        if span is None:
            # The hash of an expression that is gone may be another's.
            self._kept += [offset, *(dims or ())]
            where = self._steps.variables[offset] if type(offset) is int else offset
            begin = self._extents.number(where)
            size = None if dims is None else self._extents.size(dims, item)
            end = None if begin is None or size is None else self._extents.add(begin, size)
            given = self._extents.given([size, *map(self._extents.number, dims or ())])
            span = begin, end, given
            if dims is not None:
                self._spans[key] = span
        return span

    def _size(self, shape: Argument, item: float) -> Number | None:
        """Return the bytes of a tensor, None where the shape is not known."""
        dims = self._dims(shape)
        return None if dims is None else self._extents.size(dims, item)

    def _dims(self, shape: Argument) -> Any:
        if type(shape) is relax.ShapeExpr:
            return shape.values[:]
        if type(shape) is int:
            ty = self._steps.variables[shape].ty
            if isinstance(ty, relax.ShapeType) and ty.values is not None:
                return ty.values[:]
        return None

    # ---- calls with a meaning of their own ------------------------------------------------

    def _into_last(self, args: list[Argument], step: Step) -> Value:
        *read, written = self._arguments(args)
        self._read(objects(tuple(read)), step)
        self._write(objects(written), step)
        return NOTHING

    def _call_tir_dyn(self, args: list[Argument], step: Step) -> Value:
        return self._global(args[0].name_hint, args[1], step)

    def _in_place(self, args: list[Argument], step: Step) -> Value:
        values = self._arguments(args[1])
        self._read(objects(tuple(values)), step)
        results = []
        for index in step.value.attrs.inplace_indices:
            in_place = int(index) >= 0
            results.append(values[int(index)] if in_place else self._fresh(step.value.ty, step))
            if in_place:
                self._write(objects(results[-1]), step)
        return results[0] if len(results) == 1 else tuple(results)

    def _by_name(self, args: list[Argument], step: Step) -> Value:
        """Call a packed function that is the first argument."""
        callee, rest = args[0], list(args[1:])
        if isinstance(callee, relax.ExternFunc):
            return self._packed(str(callee.global_symbol), rest, step)
        return self._unknown(self._arguments(args), step)

    def _with_context(self, args: list[Argument], step: Step) -> Value:
        given = args[1] if type(args[1]) is tuple else (args[1],)
        return self._by_name([args[0], *given], step)

    def _cached_alloc(self, args: list[Argument], step: Step) -> Value:
        """CUDA graphs: the storages are made once and live as long as the program."""
        name = args[0].name_hint
        if name not in self._cached:
            self._cached[name] = self._global(name, [], step)
            self._state.hold(self._cached[name])
        return self._cached[name]

    def _captured(self, args: list[Argument], step: Step) -> Value:
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


def _key(dim: Any) -> Any:
    return int(dim.value) if type(dim) is tirx.IntImm else (hash(dim),)


def _item_bytes(dtype: Any) -> float:
    if not isinstance(dtype, tvm.ir.GenericConst):
        return math.nan
    name = str(dtype.value)
    if name not in _ITEM_BYTES:
        value = tvm.DataType(name)
        _ITEM_BYTES[name] = max(1, value.bits * value.lanes / 8)
    return _ITEM_BYTES[name]


_ITEM_BYTES: dict[str, float] = {}

_Handler = Callable[[Evaluation, list[Argument], Step], Value]

_OPERATORS: dict[str, _Handler] = {
    "relax.memory.alloc_storage": lambda run, args, step: run._alloc_storage(
        args[0], args[2], 1, step
    ),
    "relax.vm.alloc_storage": lambda run, args, step: run._alloc_storage(
        args[0], args[3], _item_bytes(args[2]), step
    ),
    "relax.memory.alloc_tensor": Evaluation._alloc_tensor,
    "relax.vm.alloc_tensor": Evaluation._alloc_tensor,
    "relax.builtin.alloc_tensor": Evaluation._unplanned,
    "relax.vm.call_tir_dyn": Evaluation._call_tir_dyn,
    "relax.call_tir_inplace": Evaluation._in_place,
    "relax.call_builtin_with_ctx": Evaluation._with_context,
    "relax.call_pure_packed": Evaluation._by_name,
}

_IPC = tvm.ir.StringImm(IPC_MEMORY)

_PACKED: dict[str, _Handler] = {
    "tvm_ipc.alloc_tensor": Evaluation._alloc_tensor,
    "tvm_ipc.copy": Evaluation._into_last,
    "tvm_ipc.blas.matmul": Evaluation._into_last,
    "runtime.disco.cuda_ipc.alloc_storage": lambda run, args, step: run._alloc_storage(
        args[0], _IPC, _item_bytes(args[1]), step
    ),
    "vm.builtin.call_tir_dyn": lambda run, args, step: run._global(
        args[0].name_hint, list(args)[1:], step
    ),
    "vm.builtin.cuda_graph.get_cached_alloc": Evaluation._cached_alloc,
    "vm.builtin.cuda_graph.run_or_capture": Evaluation._captured,
}
