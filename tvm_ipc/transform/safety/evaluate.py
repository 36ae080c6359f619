# SPDX-License-Identifier: Apache-2.0
"""What expressions give, and what calls do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import tvm
from tvm import relax, tirx

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.transform.safety import calls, memory
from tvm_ipc.transform.safety.effects import Effects
from tvm_ipc.transform.safety.extents import Extents, Number
from tvm_ipc.transform.safety.hazards import Hazard, HazardKind
from tvm_ipc.transform.safety.memory import (
    NOTHING,
    Buffer,
    Leaf,
    Pending,
    Place,
    Storage,
    Summary,
    Value,
    objects,
    storage_of,
)


class Module(Protocol):
    """What is known of the module around a function."""

    assume_no_exit_barrier: bool
    extents: Extents
    hazards: dict[tuple[Any, ...], Hazard]

    def function(self, name: str) -> Any:
        """Return a function of the module, or None."""

    def written(self, name: str) -> frozenset[int]:
        """Return which parameters a PrimFunc writes."""

    def summary(self, name: str) -> Summary | None:
        """Return what a Relax function does, None for one that is being looked at: recursion."""


class Evaluation(Effects):
    """The values of a function's variables, and how expressions make them."""

    def __init__(self, module: Module, name: str) -> None:
        super().__init__(name, module.extents, module.hazards)
        self._module = module
        self._values: dict[int, Value] = {}  # by the hash of the variable
        self._cached: dict[str, Value] = {}

    def _value(self, expr: Any, place: Place) -> Value:
        if isinstance(expr, relax.Call):
            return self._call(expr, place)
        if isinstance(expr, relax.Var):
            value = self._values.get(hash(expr))
            if value is None:  # of the function around this one
                value = self._values[hash(expr)] = self._parameter(expr.name, expr.ty)
            return value
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field, place) for field in expr.fields[:])
        if isinstance(expr, relax.TupleGetItem):
            whole = self._value(expr.tuple_value, place)
            return whole[expr.index] if isinstance(whole, tuple) else whole
        if isinstance(expr, relax.Function):
            return self._literal(expr, place)
        return NOTHING

    def _literal(self, function: relax.Function, place: Place) -> Value:
        raise NotImplementedError

    def _parameter(self, name: str, ty: Any) -> Value:
        if isinstance(ty, relax.TupleType):
            return tuple(self._parameter(f"{name}[{i}]", t) for i, t in enumerate(ty.fields))
        if isinstance(ty, (relax.ShapeType, tvm.ir.PrimType, relax.FuncType)):
            return NOTHING
        storage = Storage(name, None, external=True)
        # What is no tensor may be a storage, or anything else that reaches memory.
        return frozenset({Buffer(name, storage) if isinstance(ty, relax.TensorType) else storage})

    def _arguments(self, args: Iterable[Any], place: Place) -> list[Value]:
        return [self._value(argument, place) for argument in args]

    def _call(self, call: relax.Call, place: Place) -> Value:
        op = call.op
        if isinstance(op, tvm.ir.Op):
            handler = _OPERATORS.get(op.name)
            if handler is not None:
                return handler(self, call, place)
            if op.name in calls.UNKNOWN_OPERATORS:
                return self._unknown(self._arguments(call.args[:], place), place)
            values = self._arguments(call.args[:], place)
            self._read(objects(tuple(values)), place)
            return values[0] if op.name in calls.VIEW_OPERATORS else self._fresh(call.ty, place)
        if isinstance(op, relax.ExternFunc):
            return self._packed(str(op.global_symbol), call.args[:], place)
        if isinstance(op, relax.GlobalVar):
            return self._global(op.name_hint, call.args[:], place)
        return self._unknown(self._arguments([op, *call.args], place), place)

    def _global(self, name: str, args: Iterable[Any], place: Place) -> Value:
        callee = self._module.function(name)
        values = self._arguments(args, place)
        if isinstance(callee, tirx.PrimFunc):
            written = self._module.written(name)
            for index, value in enumerate(values):
                if index not in written:
                    self._read(objects(value), place)
            for index in written:
                if index < len(values):
                    self._write(objects(values[index]), place)
            return NOTHING
        if isinstance(callee, relax.Function):
            summary = self._module.summary(name)
            if summary is not None and len(summary.parameters) == len(values):
                return self._apply(summary, values, place)
        return self._unknown(values, place)

    def _packed(self, name: str, args: Any, place: Place) -> Value:
        handler = _PACKED.get(name)
        if handler is not None:
            return handler(self, args, place)
        collective = calls.find_collective(name)
        values = self._arguments(args, place)
        if collective is not None:
            self._collective(collective, args, values, place)
            return NOTHING
        if name in calls.READERS:
            self._read(objects(tuple(values)), place)
            return NOTHING
        if name in calls.VIEWS:
            self._read(objects(values[0]), place)
            return values[0]
        return self._unknown(values, place)

    def _collective(
        self, collective: calls.Collective, args: Any, values: list[Value], place: Place
    ) -> None:
        send = NOTHING if collective.send is None else values[collective.send]
        recv = NOTHING if collective.recv is None else values[collective.recv]
        self._read(objects(send), place)
        self._write(objects(recv), place)
        team = collective.team(args)
        if collective.meets:
            self._state.meet(team)
        if collective.leaves_pending(args, self._module.assume_no_exit_barrier):
            for thing in objects(send):
                if storage_of(thing).scope in (None, IPC_MEMORY):
                    pending = Pending(thing, team, place)
                    for target in objects(recv):
                        same = storage_of(target) is storage_of(thing)
                        if same and self._may_overlap(target, thing):
                            self._endanger(HazardKind.WRITE, storage_of(thing), place, pending)
                    self._state.pending += (pending,)

    def _unknown(self, values: list[Value], place: Place) -> Value:
        """A call that may read and write what it is given, and may return it."""
        given = list(objects(tuple(values)))
        self._read(given, place)
        self._write(given, place, certain=False)
        ty = place.variable.ty
        if isinstance(ty, (relax.ShapeType, tvm.ir.PrimType)) or ty == relax.TupleType([]):
            return NOTHING
        weak: set[Storage | Buffer] = set()
        for thing in given:
            if isinstance(thing, Buffer):
                thing = Buffer(thing.name, thing.storage, thing.begin, thing.end, True)
            weak.add(thing)
        return frozenset({*weak, Storage(place.variable.name, None, external=True)})

    def _apply(self, summary: Summary, values: list[Value], place: Place) -> Value:
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
                    f"{storage.name} of {place}",
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
            self._read(bound.get(storage, NOTHING), place)
        for access in summary.writes:
            if storage_of(access.memory) in bound:
                self._write(here(access.memory), place, access.passed)
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

    def _fresh(self, ty: Any, place: Place) -> Value:
        if isinstance(ty, relax.TupleType):
            return tuple(self._fresh(field, place) for field in ty.fields)
        if not isinstance(ty, relax.TensorType):
            return NOTHING
        name = place.variable.name
        return frozenset({Buffer(name, Storage(name, "global"))})

    # ---- allocations ----------------------------------------------------------------------

    def _alloc_storage(self, size: Any, scope: Any, item: float, place: Place) -> Value:
        shape = self._shape(size)
        bytes_ = None if shape is None else self._extents.size(shape, item)
        name = place.variable.name
        text = str(scope.value) if isinstance(scope, tvm.ir.StringImm) else None
        return frozenset({Storage(name, text, bytes_)})

    def _alloc_tensor(self, args: Any, place: Place) -> Value:
        source, offset, shape_expr, dtype = args[0], args[1], args[2], args[3]
        begin = self._extents.number(offset)
        shape = self._shape(shape_expr)
        size = None if shape is None else self._extents.size(shape, _item_bytes(dtype))
        end = None if begin is None or size is None else self._extents.add(begin, size)
        buffers = []
        for thing in objects(self._value(source, place)):
            buffer = Buffer(place.variable.name, storage_of(thing), begin, end)
            buffers.append(buffer)
            limit = buffer.storage.size
            if limit is None or end is None:
                continue
            if not self._extents.at_most(end, limit):
                bounds = f"ends at byte {self._extents.text(end)} of {self._extents.text(limit)}"
                self._report(HazardKind.BOUNDS, buffer, place, bounds)
        return frozenset(buffers)

    def _unplanned(self, args: Any, place: Place) -> Value:
        shape_expr, dtype, _device, scope = args
        storage = self._alloc_storage(shape_expr, scope, _item_bytes(dtype), place)
        return frozenset(
            Buffer(place.variable.name, thing, 0, thing.size)
            for thing in objects(storage)
            if isinstance(thing, Storage)
        )

    def _shape(self, expr: Any) -> Any:
        if isinstance(expr, relax.ShapeExpr):
            return expr.values
        ty = getattr(expr, "ty", None)
        return ty.values if isinstance(ty, relax.ShapeType) else None

    # ---- calls with a meaning of their own ------------------------------------------------

    def _copy(self, args: Any, place: Place) -> Value:
        self._read(objects(self._value(args[0], place)), place)
        self._write(objects(self._value(args[1], place)), place)
        return NOTHING

    def _into_last(self, args: Any, place: Place) -> Value:
        *read, written = self._arguments(args, place)
        self._read(objects(tuple(read)), place)
        self._write(objects(written), place)
        return NOTHING

    def _call_tir_dyn(self, call: relax.Call, place: Place) -> Value:
        return self._global(call.args[0].name_hint, call.args[1].fields[:], place)

    def _in_place(self, call: relax.Call, place: Place) -> Value:
        values = self._arguments(call.args[1].fields[:], place)
        self._read(objects(tuple(values)), place)
        results = []
        for index in call.attrs.inplace_indices:
            in_place = int(index) >= 0
            results.append(values[int(index)] if in_place else self._fresh(call.ty, place))
            if in_place:
                self._write(objects(results[-1]), place)
        return results[0] if len(results) == 1 else tuple(results)

    def _with_context(self, call: relax.Call, place: Place) -> Value:
        callee, arguments = call.args[0], call.args[1]
        args = arguments.fields if isinstance(arguments, relax.Tuple) else [arguments]
        return self._packed(str(callee.global_symbol), args, place)

    def _pure_packed(self, call: relax.Call, place: Place) -> Value:
        callee, args = call.args[0], call.args[1:]
        if isinstance(callee, relax.ExternFunc):
            return self._packed(str(callee.global_symbol), args, place)
        return self._unknown(self._arguments(args, place), place)

    def _cached_alloc(self, args: Any, place: Place) -> Value:
        """CUDA graphs: the storages are made once and live as long as the program."""
        name = args[0].name_hint
        if name not in self._cached:
            self._cached[name] = self._global(name, [], place)
            self._state.hold(self._cached[name])
        return self._cached[name]

    def _captured(self, args: Any, place: Place) -> Value:
        fields = args[1].fields if isinstance(args[1], relax.Tuple) else [args[1]]
        return self._global(args[0].name_hint, fields, place)


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
    return Buffer(thing.name, storage, _static(thing.begin), _static(thing.end), thing.weak)


def _static(number: Number | None) -> Number | None:
    """Keep what means the same in another function."""
    return number if isinstance(number, int) else None


def _item_bytes(dtype: Any) -> float:
    value = tvm.DataType(str(dtype.value)) if isinstance(dtype, tvm.ir.GenericConst) else None
    return math.nan if value is None else max(1, value.bits * value.lanes / 8)


_OPERATORS: dict[str, Callable[[Evaluation, relax.Call, Place], Value]] = {
    "relax.memory.alloc_storage": lambda run, call, place: run._alloc_storage(
        call.args[0], call.args[2], 1, place
    ),
    "relax.vm.alloc_storage": lambda run, call, place: run._alloc_storage(
        call.args[0], call.args[3], _item_bytes(call.args[2]), place
    ),
    "relax.memory.alloc_tensor": lambda run, call, place: run._alloc_tensor(call.args, place),
    "relax.vm.alloc_tensor": lambda run, call, place: run._alloc_tensor(call.args, place),
    "relax.builtin.alloc_tensor": lambda run, call, place: run._unplanned(call.args, place),
    "relax.vm.call_tir_dyn": Evaluation._call_tir_dyn,
    "relax.call_tir_inplace": Evaluation._in_place,
    "relax.call_builtin_with_ctx": Evaluation._with_context,
    "relax.call_pure_packed": Evaluation._pure_packed,
}

_PACKED: dict[str, Callable[[Evaluation, Any, Place], Value]] = {
    "tvm_ipc.alloc_tensor": Evaluation._alloc_tensor,
    "tvm_ipc.copy": lambda run, args, place: run._copy(args, place),
    "tvm_ipc.blas.matmul": lambda run, args, place: run._into_last(args, place),
    "runtime.disco.cuda_ipc.alloc_storage": lambda run, args, place: run._alloc_storage(
        args[0], tvm.ir.StringImm(IPC_MEMORY), _item_bytes(args[1]), place
    ),
    "vm.builtin.call_tir_dyn": lambda run, args, place: run._global(
        args[0].name_hint, list(args)[1:], place
    ),
    "vm.builtin.cuda_graph.get_cached_alloc": Evaluation._cached_alloc,
    "vm.builtin.cuda_graph.run_or_capture": Evaluation._captured,
}
