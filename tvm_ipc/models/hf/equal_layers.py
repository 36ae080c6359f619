# SPDX-License-Identifier: Apache-2.0
"""Find the layers of a model that compute the same with other weights, before it is exported.

The model is called once with tensors that have no data, and each operator of PyTorch is recorded.
Two layers are equal if all of this is equal:

- the classes of their modules, and the attributes of these, except the index of the layer;
- their operators in order, with all arguments: tensors that a layer computes by their position in
  it, weights by their names in the layer, keys and values relative to the index of the layer, and
  all else, such as the mask, by identity;
- the tensors that they return and that they leave in the KV cache.

A layer equals no other one if its results are used in a way that `repeated_layers` cannot follow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Attributes of modules that differ between layers, and that only select the keys and values.
_INDICES: Final = frozenset(("layer_idx", "layer_id", "layer_number"))
#: Attributes that PyTorch adds to each module.
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_SIMPLE: Final = (bool, int, float, str, type(None), torch.dtype)
#: The name of the argument that is the input of a layer, if it is passed by name.
HIDDEN: Final = "hidden_states"
#: The names and modules of layers.
Layers = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class EqualLayers:
    """The layers of a model, and for each the first layer that equals it.

    Attributes
    ----------
    first : for each layer the index of the first layer that equals it.
    lengths : for each layer the length of the tuple that it returns, whose first item is a tensor
        and whose other items are None; None if it returns a tensor. It is not valid for layers that
        equal no other one.
    """

    first: tuple[int, ...]
    lengths: tuple[int | None, ...]

    @property
    def exported(self) -> int:
        """The number of layers that are exported."""
        return len(set(self.first))


def find_layers(model: nn.Module, count: int) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model's layers; [] if they are not one list of modules."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_inside:
            lists[name] = module
    if len(lists) != 1:
        return []
    ((name, layers),) = lists.items()
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


@contextlib.contextmanager
def with_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module call another function instead of its method `forward`."""
    own = vars(layer).get("forward")  # of the object, where something replaced that of its class
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own


def trace(step: nn.Module, layers: Layers, inputs: Any) -> tuple[Sequence[Any], EqualLayers]:
    """Call a model without data; return its results, and which of its layers are equal.

    The results have shapes and types, but no data.

    Parameters
    ----------
    step : the model as a function of token ids, positions, and keys and values of past tokens.
    layers : the names and modules of the layers, from `find_layers`.
    inputs : token ids, positions, and a tuple of keys and values, whose data is not read.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ids, positions, past = inputs
        tensors = [torch.zeros(x.shape, dtype=x.dtype) for x in (ids, positions, *past)]
        recorder = _Recorder(step, layers, tensors)
        with contextlib.ExitStack() as stack:
            for index, (_, layer) in enumerate(layers):
                stack.enter_context(with_forward(layer, recorder.recorded(index, layer.forward)))
            if layers:
                stack.enter_context(recorder)
            results = step(tensors[0], tensors[1], tuple(tensors[2:]))
    recorder.finish(results)
    first_equal: dict[Any, int] = {}
    keys = [recorder.key(index, results) for index in range(len(layers))]
    first = tuple(first_equal.setdefault(key, index) for index, key in enumerate(keys))
    return results, EqualLayers(first, tuple(map(recorder.length, range(len(layers)))))


def split_hidden(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the input of a layer, and its other positional and named arguments."""
    if args:
        return args[0], args[1:], kwargs
    others = dict(kwargs)
    return others.pop(HIDDEN, None), args, others


@dataclass(eq=False)
class _LayerCall:
    """The call of one layer: its operators are those from `begin` to `end` of all operators."""

    begin: int
    end: int
    hidden: Any
    others: Any
    result: Any


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Record all operators of a model, and what each of its layers takes and returns."""

    def __init__(self, step: nn.Module, layers: Layers, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._layers = layers
        self._operators: list[tuple[Any, ...]] = []
        self._calls: dict[int, list[_LayerCall]] = {}
        # Tensors by address; the list keeps them, so that no address is used twice.
        self._labels: dict[int, tuple[Any, ...]] = {}
        # By the number of an operator: its outputs, with the operators and results that use them.
        self._uses: dict[int, set[tuple[int, int]]] = {}
        self._kept: list[Any] = []
        for name, weight in step.named_parameters():
            self._label(weight, ("weight", name.removeprefix("inner.")))
        for index, tensor in enumerate(inputs):
            self._label(tensor, ("input", index) if index < 2 else ("past", index - 2))

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operands = self._described((args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        number = len(self._operators)
        tensors = [tensor for tensor in _flat(result) if isinstance(tensor, torch.Tensor)]
        for output, tensor in enumerate(tensors):
            if id(tensor) not in self._labels:
                self._label(tensor, ("computed", number, output))
        self._operators.append((str(function), operands, self._described(result)))
        return result

    def recorded(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a layer that also records its call."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            begin = len(self._operators)
            result = forward(*args, **kwargs)
            hidden, *others = split_hidden(args, kwargs)
            end, described = len(self._operators), self._described(others)
            call = _LayerCall(begin, end, hidden, described, result)
            self._calls.setdefault(index, []).append(call)
            return result

        return recorded

    def key(self, index: int, results: Sequence[Any]) -> Any:
        """Return what equal layers have in common; the index for a layer that equals no other."""
        calls = self._calls.get(index, [])
        if len(calls) != 1:
            return index
        (call,) = calls
        hidden, output = call.hidden, call.result
        if type(output) is tuple:
            if not output or any(item is not None for item in output[1:]):
                return index
            output = output[0]
        if not isinstance(hidden, torch.Tensor) or not isinstance(output, torch.Tensor):
            return index
        if (hidden.shape, hidden.dtype) != (output.shape, output.dtype):
            return index
        states = results[1 + 2 * index : 3 + 2 * index]
        result_labels = [self._described(tensor) for tensor in (output, *states)]
        if not all(self._is_inside(call, label) for label in result_labels):
            return index
        if self._is_used_elsewhere(call, index, result_labels[0]):
            return index
        own = self._relative(call, index, self._operators[call.begin : call.end])
        return (
            _attributes(self._layers[index][1]),
            own,
            self._relative(call, index, call.others),
            self._relative(call, index, result_labels),
            self.length(index),
        )

    def length(self, index: int) -> int | None:
        """Return the length of the tuple that a layer returns; None for another result."""
        results = [call.result for call in self._calls.get(index, [])]
        return len(results[0]) if results and type(results[0]) is tuple else None

    def _label(self, tensor: Any, label: tuple[Any, ...]) -> None:
        self._labels[id(tensor)] = ("tensor", *label)
        self._kept.append(tensor)

    def _described(self, value: Any) -> Any:
        """Return a value that can be compared, with labels for its tensors."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._labels:  # a constant, or a tensor of Python code
                self._label(value, ("other", len(self._kept)))
            layout = (tuple(value.shape), value.dtype)
            return (*self._labels[id(value)], layout)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._described, value))
        if isinstance(value, dict):
            return tuple((name, self._described(item)) for name, item in value.items())
        if isinstance(value, _SIMPLE):
            return type(value), value
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return str(value)
        self._kept.append(value)
        return id(value)

    def _is_inside(self, call: _LayerCall, label: Any) -> bool:
        """Return whether a tensor is the result of an operator of the layer."""
        return bool(label[1] == "computed" and call.begin <= label[2] < call.end)

    def _is_used_elsewhere(self, call: _LayerCall, index: int, hidden: Any) -> bool:
        """Return whether something but the layer's results is used after it."""
        returned = len(self._operators) + 1 + 2 * index
        own = {*range(call.begin, call.end), returned, returned + 1}
        return any(
            user not in own and (number, output) != hidden[2:4]
            for number in range(call.begin, call.end)
            for output, user in self._uses.get(number, ())
        )

    def finish(self, results: Sequence[Any]) -> None:
        """Find the uses of all tensors, after the model returned its results."""
        operators = enumerate(self._operators)
        uses = [(number, operands) for number, (_, operands, _) in operators]
        uses += [(call.begin, call.others) for calls in self._calls.values() for call in calls]
        uses += enumerate(map(self._described, results), len(self._operators))
        for user, operands in uses:
            for _, kind, *place in _labels_of(operands):
                if kind == "computed":
                    self._uses.setdefault(place[0], set()).add((place[1], user))

    def _relative(self, call: _LayerCall, index: int, value: Any) -> Any:
        """Return a description with labels that do not depend on the place of the layer."""
        if not isinstance(value, (tuple, list)):
            return value
        if not value or value[0] != "tensor":
            return tuple(self._relative(call, index, item) for item in value)
        _, kind, *place = value
        if value[:4] == self._described(call.hidden)[:4]:
            return ("hidden", place[-1])
        if kind == "computed" and place[0] >= call.begin:
            return ("own", place[0] - call.begin, *place[1:])
        if kind == "past" and place[0] // 2 == index:
            return ("own past", place[0] % 2, *place[1:])
        prefix = f"{self._layers[index][0]}."
        if kind == "weight" and place[0].startswith(prefix):
            return ("own weight", place[0].removeprefix(prefix), *place[1:])
        return value


def _labels_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        if value and value[0] == "tensor":
            yield value
        else:
            for item in value:
                yield from _labels_of(item)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _attributes(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes and attributes of all modules in a layer."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (attribute, _identity(value))
                for attribute, value in sorted(vars(module).items())
                if attribute not in _OF_MODULES | _INDICES
            ),
        )
        for name, module in layer.named_modules()
    )


def _identity(value: Any) -> Any:
    """Return what equals only the same object, or one that is made of the same objects."""
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_identity, value))
    if isinstance(value, dict):
        return type(value), tuple((name, _identity(item)) for name, item in value.items())
    if isinstance(value, functools.partial):
        return type(value), *map(_identity, (value.func, value.args, value.keywords))
    return id(value)
