# SPDX-License-Identifier: Apache-2.0
"""Export one of several equal layers, and repeat its operators for the others after the import.

Exported, where layer 1 equals layer 0:
    begin = mark(hidden, "begin", 0)
    a = f(begin, layers_0_weight, past_0)
    end = mark(a, "end", 0)
    b = mark(end, "repeat", 1)
    return g(b), past_0 and what f appended, past_2 ...

After `repeat_layers`:
    a = f(hidden, layers_0_weight, past_0)
    b = f(a, layers_1_weight, past_2)
    return g(b), past_0 and what f appended, past_2 and what f appended ...

This is the program that an export of all layers gives, except for the names of variables. PyTorch
takes most of the time to compile a model, and as long for each layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import tvm
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.walk_and_rewrite_bindings import typed
from tvm_ipc.models.hf.equal_layers import EqualLayers, Layers, split_hidden, with_forward
from tvm_ipc.tvm_moved_names import StringImm

_BEGIN: Final = "begin"
_END: Final = "end"
_REPEAT: Final = "repeat"
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
def marked(layers: Layers, equal: EqualLayers) -> Iterator[None]:
    """Mark the first of equal layers in what is exported, and skip the others."""
    with contextlib.ExitStack() as stack:
        for index, (_, layer) in enumerate(layers):
            if equal.first[index] != index:
                stack.enter_context(with_forward(layer, _skipped(index, equal.lengths[index])))
            elif equal.first.count(index) > 1:
                stack.enter_context(with_forward(layer, _between_marks(index, layer.forward)))
        yield


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
) -> relax.Function:
    """Return the imported function of all layers.

    Parameters
    ----------
    function : the function of a model that was exported within `marked`.
    names : the names of weights, by the names of parameters.
    layers : the names of the layers.
    first : for each layer the index of the first layer that equals it.
    """
    return _Repeat(function, names, layers, first).function


class _Repeat:
    """The function of all layers; `function` is the result."""

    def __init__(
        self,
        function: relax.Function,
        names: Mapping[str, str],
        layers: Sequence[str],
        first: Sequence[int],
    ) -> None:
        if len(function.body.blocks) != 1:
            raise NotRepeatableError("the function has several blocks")
        self._layers, self._first = layers, first
        params = {str(param.name): param for param in function.params}
        self._weights = {names[name]: param for name, param in params.items() if name in names}
        #: The operands of marks, by the variables of the marks.
        self._replaced: dict[Any, relax.Expr] = {}
        #: The variables with keys and values that a skipped layer returns, by their inputs.
        self._states: dict[Any, relax.Expr] = {}
        #: The input and the bindings of each layer between marks.
        self._inputs: dict[int, relax.Expr] = {}
        self._bindings: dict[int, list[relax.Binding]] = {}
        self._outputs: dict[int, relax.Expr] = {}
        (block,) = function.body.blocks
        *bindings, last = as_list(block.bindings)
        out: list[relax.Binding] = []
        self._past, self._results = self._keys_and_values(function, last)
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
        results = _with_variables(last.value, {**self._replaced, **self._states})
        result = type(last.var)(last.var.name, results.ty)
        out.append(relax.VarBinding(result, results, last.span))
        body = typed(relax.SeqExpr([type(block)(out, block.span)], result), results.ty)
        self.function = relax.Function(
            function.params, body, results.ty, function.is_pure, function.attrs, function.span
        )

    def _keys_and_values(
        self, function: relax.Function, last: relax.Binding
    ) -> tuple[list[relax.Var], list[relax.Expr]]:
        """Return the parameters with past keys and values, and the results after the logits."""
        count = 2 * len(self._layers)
        is_result = last.var.same_as(function.body.body) and isinstance(last.value, relax.Tuple)
        if not is_result or len(last.value.fields) != 1 + count:
            raise NotRepeatableError("the last binding is not the tuple of all results")
        return list(function.params[2 : 2 + count]), as_list(last.value.fields)[1:]

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
            state = self._results[2 * first + kind]
            self._states[self._past[2 * index + kind]] = variables[state]

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
