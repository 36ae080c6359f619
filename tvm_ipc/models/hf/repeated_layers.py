# SPDX-License-Identifier: Apache-2.0
"""Export one of several equal layers, and repeat its operators for the others after the import.

Exported, where layer 1 equals layer 0:
    begin = mark(hidden, "begin", 0)
    a = f(begin, layers_0_weight, past_0)
    end = mark(a, "end", 0)
    b = mark(end, "repeat", 1)
    return g(b), past_0 and what f appended

After `repeat_layers`:
    a = f(hidden, layers_0_weight, past_0)
    b = f(a, layers_1_weight, past_2)
    return g(b), past_0 and what f appended, past_2 and what f appended ...

This is the program that an export of all layers gives, except for the names of variables. PyTorch
takes most of the time to compile a model, and as long for each layer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import tvm
from torch import nn
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import typed
from tvm_ipc.models.hf.equal_layers import EqualLayers, Layers, split_hidden, with_forward
from tvm_ipc.tvm_moved_names import StringImm

_BEGIN: Final = "begin"
_END: Final = "end"
_REPEAT: Final = "repeat"
#: The number of parameters before keys and values, and how the names of weights begin.
_INPUTS: Final = 2
_WEIGHT: Final = "p_inner_"
#: The function that stands for a mark in an imported program, until `repeat_layers` replaces it.
_MARK: Final = "tvm_ipc.mark"
_PACKED: Final = tvm.ir.Op.get("relax.call_pure_packed")


def _mark(x: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
    raise NotImplementedError("it is only exported")


def _type_of_mark(x: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.custom_op("tvm_ipc::mark", _mark, mutates_args=())
torch.library.register_fake("tvm_ipc::mark", _type_of_mark)
_MARKED: Final = torch.ops.tvm_ipc.mark


class NotRepeatableError(Exception):
    """The imported operators of a layer cannot be copied."""


def convert_mark(node: Any, importer: Any) -> relax.Var:
    """Import a mark as a call of a function that does not exist."""
    x, kind, layer = node.args
    operand = importer.env[x]
    number = relax.prim_value(layer)
    call = relax.op.call_pure_packed(_MARK, operand, StringImm(kind), number, ty_args=[operand.ty])
    return importer.block_builder.emit(call)


@contextlib.contextmanager
def marked(model: nn.Module, layers: Layers, equal: EqualLayers) -> Iterator[None]:
    """Mark the first of equal layers in what is exported, and skip the others.

    A skipped layer is replaced by a copy without weights, so that PyTorch does not process them.
    """
    with contextlib.ExitStack() as stack:
        for index, (name, layer) in enumerate(layers):
            if equal.first[index] != index:
                if any(True for _ in layer.buffers()):
                    raise NotRepeatableError("a layer has buffers")
                skipped = _skipped(index, equal.lengths[index])
                stack.enter_context(_replaced_by_empty(model, name, skipped))
                stack.enter_context(with_forward(layer, skipped))
            elif equal.first.count(index) > 1:
                stack.enter_context(with_forward(layer, _between_marks(index, layer.forward)))
        yield


@contextlib.contextmanager
def _replaced_by_empty(model: nn.Module, name: str, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a layer by one with the same attributes, and without weights and modules."""
    list_name, _, index = name.rpartition(".")
    layers = model.get_submodule(list_name)
    layer = layers[int(index)]
    empty = copy.copy(layer)
    vars(empty).update(_parameters={}, _modules={}, forward=forward)
    layers[int(index)] = empty
    try:
        yield
    finally:
        layers[int(index)] = layer


def _between_marks(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs = split_hidden(args, kwargs)
        result = forward(_MARKED(hidden, _BEGIN, index), *args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _MARKED(result, _END, index)
        return (_MARKED(result[0], _END, index), *result[1:])

    return call


def _skipped(index: int, length: int | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        hidden, _, _ = split_hidden(args, kwargs)
        result = _MARKED(hidden, _REPEAT, index)
        return result if length is None else (result, *[None] * (length - 1))

    return call


def repeat_layers(
    function: relax.Function,
    names: Mapping[str, str],
    layers: Sequence[str],
    first: Sequence[int],
    weights: Sequence[str],
) -> tuple[relax.Function, dict[str, str]]:
    """Return the imported function of all layers, and the names of weights by its parameters.

    Parameters
    ----------
    function : the function of a model that was exported within `marked`. Its parameters are ids,
        positions, the keys and values of the exported layers, and weights.
    names : the names of weights, by the names of parameters.
    layers : the names of the layers.
    first : for each layer the index of the first layer that equals it.
    weights : the names of the weights of the model, in the order of the parameters; all names of
        tied ones.
    """
    repeated = _Repeat(function, names, layers, first, weights)
    return repeated.function, repeated.names


class _Repeat:
    """The function of all layers: `function`, and `names`, those of its weights."""

    def __init__(
        self,
        function: relax.Function,
        names: Mapping[str, str],
        layers: Sequence[str],
        first: Sequence[int],
        weights: Sequence[str],
    ) -> None:
        if len(function.body.blocks) != 1:
            raise NotRepeatableError("the function has several blocks")
        self._layers, self._first = layers, first
        self._own = sorted(set(first))
        #: The operands of marks, by the variables of the marks; and keys and values that are
        #: parameters with another name here.
        self._replaced: dict[Any, relax.Expr] = {}
        #: The input and the bindings of each layer between marks.
        self._inputs: dict[int, relax.Expr] = {}
        self._bindings: dict[int, list[relax.Binding]] = {}
        self._outputs: dict[int, relax.Expr] = {}
        (block,) = function.body.blocks
        *bindings, last = as_list(block.bindings)
        is_result = last.var.same_as(function.body.body) and isinstance(last.value, relax.Tuple)
        if not is_result or len(last.value.fields) != 1 + 2 * len(self._own):
            raise NotRepeatableError("the last binding is not the tuple of all results")
        logits, *states = as_list(last.value.fields)
        #: Keys and values that the layers return.
        self._states = {
            2 * layer + kind: states[2 * number + kind]
            for number, layer in enumerate(self._own)
            for kind in range(2)
        }
        self._past = self._keys_and_values(function)
        params = self._parameters(function, names, weights)
        out: list[relax.Binding] = []
        open_layer: int | None = None
        for binding in bindings:
            mark = _mark_of(binding.value)
            if mark is None:
                if self._replaced:
                    binding = self._copied(binding, self._replaced, binding.var)
                out.append(binding)
                if open_layer is not None:
                    self._bindings[open_layer].append(binding)
                continue
            operand, kind, index = mark
            operand = self._replaced.get(operand, operand)
            if kind == _REPEAT:
                out += self._repeated(index, operand, binding.var)
                continue
            self._replaced[binding.var] = operand
            if kind == _BEGIN:
                self._inputs[index], self._bindings[index], open_layer = operand, [], index
            else:
                self._outputs[index], open_layer = operand, None
        all_states = [self._states[number] for number in range(2 * len(layers))]
        results = _with_variables(relax.Tuple([logits, *all_states]), self._replaced)
        result = type(last.var)(last.var.name, results.ty)
        out.append(relax.VarBinding(result, results, last.span))
        body = typed(relax.SeqExpr([type(block)(out, block.span)], result), results.ty)
        self.function = relax.Function(
            params, body, results.ty, function.is_pure, function.attrs, function.span
        ).with_attr("num_input", _INPUTS + len(self._past))

    def _keys_and_values(self, function: relax.Function) -> list[relax.Var]:
        """Return the parameters with past keys and values, those of skipped layers too."""
        past = []
        for layer, first in enumerate(self._first):
            for kind in range(2):
                old = function.params[_INPUTS + 2 * self._own.index(first) + kind]
                stem, _, number = str(old.name).rpartition("_")
                if int(number) != 2 * self._own.index(first) + kind:
                    raise NotRepeatableError("keys and values are not numbered")
                var = old
                if int(number) != 2 * layer + kind:
                    var = relax.Var(f"{stem}_{2 * layer + kind}", old.ty)
                    if first == layer:
                        self._replaced[old] = var
                past.append(var)
        return past

    def _parameters(
        self, function: relax.Function, names: Mapping[str, str], weights: Sequence[str]
    ) -> list[relax.Var]:
        """Return all parameters, and set the names of the weights."""
        others = as_list(function.params)[_INPUTS + 2 * len(self._own) :]
        params = {names[param.name]: param for param in others if param.name in names}
        of_name = {weight: str(param.name) for weight, param in params.items()}
        for layer, (prefix, first) in enumerate(zip(self._layers, self._first, strict=True)):
            if layer == first:
                continue
            for weight in [w for w in params if w.startswith(f"{self._layers[first]}.")]:
                new = f"{prefix}.{weight.removeprefix(f'{self._layers[first]}.')}"
                old_stem, new_stem = (
                    f"{_WEIGHT}{stem.replace('.', '_')}_" for stem in (self._layers[first], prefix)
                )
                if new not in weights or not of_name[weight].startswith(old_stem):
                    raise NotRepeatableError(f"{new} is not the weight of a layer")
                of_name[new] = new_stem + of_name[weight].removeprefix(old_stem)
                params[new] = relax.Var(of_name[new], params[weight].ty)
        if not {*params} <= {*weights} or len({*of_name.values()}) != len(params):
            raise NotRepeatableError("other weights are exported than the model has")
        weights = [weight for weight in weights if weight in params]  # tied ones have one name
        self._weights = params
        self.names = {of_name[weight]: weight for weight in weights}
        rest = [param for param in others if param.name not in names]
        inputs = as_list(function.params)[:_INPUTS]
        return [*inputs, *self._past, *(params[weight] for weight in weights), *rest]

    def _repeated(
        self, index: int, hidden: relax.Expr, result: relax.Var
    ) -> Iterator[relax.Binding]:
        """Yield the bindings of a skipped layer, whose result is a variable that exists."""
        first = self._first[index]
        output = self._outputs[first]
        variables: dict[Any, relax.Expr] = {self._inputs[first]: hidden}
        for kind in range(2):
            variables[self._past[2 * first + kind]] = self._past[2 * index + kind]
        prefix, new_prefix = f"{self._layers[first]}.", f"{self._layers[index]}."
        for name, param in self._weights.items():
            if name.startswith(prefix):
                variables[param] = self._weights[new_prefix + name.removeprefix(prefix)]
        for binding in self._bindings[first]:
            var = binding.var
            if isinstance(binding, relax.MatchCast):
                raise NotRepeatableError("a layer has a match_cast")
            copy = result if var.same_as(output) else type(var)(var.name, var.ty)
            yield self._copied(binding, variables, copy)
            variables[var] = copy
        for kind in range(2):
            self._states[2 * index + kind] = variables[self._states[2 * first + kind]]

    def _copied(
        self, binding: relax.Binding, variables: Mapping[Any, relax.Expr], var: relax.Var
    ) -> relax.Binding:
        """Return a binding of a variable to a value with other variables."""
        if isinstance(binding, relax.MatchCast):
            value = _with_variables(binding.value, variables)
            return relax.MatchCast(var, value, binding.ty, binding.span)
        return relax.VarBinding(var, _with_variables(binding.value, variables), binding.span)


def _mark_of(value: relax.Expr) -> tuple[relax.Expr, str, int] | None:
    """Return the operand, the kind and the layer of a mark; None for another value."""
    if not isinstance(value, relax.Call) or not value.op.same_as(_PACKED):
        return None
    function, *args = as_list(value.args)
    if not isinstance(function, relax.ExternFunc) or function.global_symbol != _MARK:
        return None
    operand, kind, layer = args
    return operand, str(kind.value), int(layer)


def _with_variables(expr: relax.Expr, variables: Mapping[Any, relax.Expr]) -> relax.Expr:
    """Return an expression with variables replaced; itself if it has none of them."""
    if isinstance(expr, relax.Var):
        return variables.get(expr, expr)
    if isinstance(expr, relax.Call):
        old = as_list(expr.args)
        args = [_with_variables(arg, variables) for arg in old]
        if all(new is arg for new, arg in zip(args, old, strict=True)):
            return expr
        return typed(relax.Call(expr.op, args, expr.attrs, expr.ty_args, expr.span), expr.ty)
    if isinstance(expr, relax.Tuple):
        old = as_list(expr.fields)
        fields = [_with_variables(field, variables) for field in old]
        if all(new is field for new, field in zip(fields, old, strict=True)):
            return expr
        return relax.Tuple(fields, expr.span)  # has a type, as its fields have
    if isinstance(expr, relax.TupleGetItem):
        value = _with_variables(expr.tuple_value, variables)
        if value is expr.tuple_value:
            return expr
        return relax.TupleGetItem(value, expr.index, expr.span)
    if isinstance(expr, (relax.If, relax.Function, relax.SeqExpr)):
        raise NotRepeatableError(f"a layer has a {type(expr).__name__}")
    return expr
