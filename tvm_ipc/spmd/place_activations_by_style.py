# SPDX-License-Identifier: Apache-2.0
"""Insertion of `R.comm.place` for activations that styles of a plan shard.

Before, with the style "sequence_parallel" for `norm`, and with `w` and `head` sharded:
    y = R.add(x, R.matmul(h, w))
    z = R.nn.rms_norm(y, norm, axes=-1)
    p = R.matmul(z, head)

After:
    lv = R.comm.place(R.matmul(h, w), mesh, {"tp": comm.Shard(1)})  # reduce_scatter
    y = R.add(x, lv)
    z = R.comm.place(R.nn.rms_norm(y, norm, axes=-1), mesh, {"tp": comm.Shard(1)})
    p = R.matmul(R.comm.place(z, mesh, {"tp": comm.Replica()}), head)  # allgather

The axis is traced back from the norm, through operators whose rules propagate it, to the matmuls
and lookups that give partial sums. Residual additions in between are therefore sharded too. The
operand of a weight that is sharded by outputs is gathered, so that the weight is not moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tvm import relax

from tvm_ipc.analysis.binding_builders import replace_call
from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.analysis.resolve_variables import variables_of
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.walk_and_rewrite_bindings import rewrite, walk, with_value
from tvm_ipc.comm import Mesh, Placement, Replica, Shard
from tvm_ipc.comm.collective_relax_op import extents
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.place_op import is_place
from tvm_ipc.comm.placements import Placements
from tvm_ipc.spmd.insert_reshards import placements_of_tensors
from tvm_ipc.spmd.placements.place_calls import place_typed
from tvm_ipc.spmd.rules import convolution_pooling_resize, matmul_attention
from tvm_ipc.spmd.rules.operation import operation_of, short_name, tensors_among
from tvm_ipc.spmd.rules.operator_rule_table import rule_for
from tvm_ipc.spmd.weight_placements_of_styles import Style
from tvm_ipc.transform.report import Decision, note

#: Operators that combine activations with weights, at which the trace of an axis ends.
_SOURCES: Final = frozenset({"take", *matmul_attention.RULES, *convolution_pooling_resize.RULES})
_RESHAPES: Final = ("reshape", "expand_dims", "squeeze")


def place_activations(
    name: str,
    function: relax.Function,
    mesh: Mesh,
    params: Mapping[relax.Var, Placements],
    styles: Mapping[relax.Var, Mapping[str, Style]],
) -> relax.Function:
    """Return the function with `R.comm.place` for the activations that styles shard.

    Parameters
    ----------
    name : the name of the function.
    function : a function for one device.
    mesh : the mesh of the ranks.
    params : the placements of parameters.
    styles : the styles of parameters, by axis of the mesh.
    """
    all_styles = [style for by_axis in styles.values() for style in by_axis.values()]
    if all(style.result is None for style in all_styles):
        return function
    return _ActivationPlacer(name, function, mesh, params, styles).function


class _ActivationPlacer:
    """Places the activations of one function; the result is the attribute `function`."""

    def __init__(
        self,
        name: str,
        function: relax.Function,
        mesh: Mesh,
        params: Mapping[relax.Var, Placements],
        styles: Mapping[relax.Var, Mapping[str, Style]],
    ) -> None:
        self.name, self.mesh = name, mesh
        self.axes = list(mesh.axes)
        self.replicas: Placements = (Replica(),) * len(self.axes)
        self.placement_of = placements_of_tensors(function, mesh, params)
        self.params = set(function.params)
        self.uses = Uses(linearize(name, function))
        operand_uses = _operand_uses_of(function, function.params)
        #: Traced axes: a variable, its axis, and the index of the mesh axis.
        self.traced: set[tuple[relax.Var, int, int]] = set()
        #: The placements to insert on the results of bindings.
        self.placed: dict[relax.Var, list[Placement]] = {}
        #: The variables to gather, with their placements afterwards.
        self.gathered: dict[relax.Var, list[Placement]] = {}
        self.gathered_vars: dict[relax.Var, relax.Var] = {}
        #: Pairs of a gathered variable and the variable of a call that uses its gathered copy.
        self.uses_gathered: set[tuple[relax.Var, relax.Var]] = set()
        for param, by_axis in styles.items():
            for mesh_axis, style in by_axis.items():
                for use in operand_uses.get(param, ()):
                    if style.result is not None:
                        self._shard_result(param, style, self.axes.index(mesh_axis), use)
        products = [
            (self.uses.bound[use.binding.var].entry, self.axes.index(mesh_axis), use)
            for param, by_axis in styles.items()
            for mesh_axis, style in by_axis.items()
            if style.shards == "outputs" and style.result is None
            for use in operand_uses.get(param, ())
            if use.binding.var in self.uses.bound  # not in a local function
        ]
        for _, index, use in sorted(products, key=lambda product: product[:2]):
            self._gather(index, use)
        self.function = rewrite(function, self._change)

    # ---- the choice of placements -----------------------------------------------------------

    def _shard_result(
        self, param: relax.Var, style: Style, index: int, operand_use: _OperandUse
    ) -> None:
        """Place the result of a module as its style specifies."""
        var = self._result(operand_use.binding.var)
        shape = extents(var.ty) if isinstance(var.ty, relax.TensorType) else None
        axis = style.result
        assert axis is not None
        if shape is None or not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"parallelize: plan: function {self.name!r}: the result of {str(param.name)!r} is "
                f"{var.ty}, but its style shards axis {axis}; choose an axis of the result"
            )
        axis %= len(shape)
        workers = list(self.mesh.axes.values())[index]
        extent = constant(shape[axis])
        if extent is not None and extent < workers:
            note(
                Decision(
                    "parallelize",
                    self.name,
                    f"{var.name} along {self.axes[index]!r}",
                    "not sharded",
                    f"axis {axis} of {var.ty} has fewer elements than the {workers} ranks",
                )
            )
            return
        if style.sequence:
            for source, source_axis in self._sources(var, axis, index).items():
                self._place(source, index, Shard(source_axis))
        self._place(var, index, Shard(axis))

    def _result(self, var: relax.Var) -> relax.Var:
        """Return the result of a module, after the reshape that undoes a flattening of rows."""
        bindings = {step.entry: step.binding for step in self.uses.users[var]}
        users = [each for each in bindings.values() if each and isinstance(each.value, relax.Call)]
        if len(users) != 1 or short_name(users[0].value) not in _RESHAPES:
            return var
        return users[0].var if (var.ty.ndim, users[0].var.ty.ndim) == (2, 3) else var

    def _sources(self, var: relax.Var, axis: int, index: int) -> dict[relax.Var, int]:
        """Return the matmuls and lookups that a tensor depends on, each with the traced axis.

        Sources that were found from another tensor before are not returned again.
        """
        sources: dict[relax.Var, int] = {}
        pending = [(var, axis)]
        while pending:
            current, current_axis = pending.pop()
            if (current, current_axis, index) in self.traced:
                continue
            self.traced.add((current, current_axis, index))
            operands = self._trace(current, current_axis, index)
            if operands is not None:
                pending += operands
            elif not isinstance(self._placement_of(current)[index], Shard):
                sources.setdefault(current, current_axis)
        return sources

    def _trace(self, var: relax.Var, axis: int, index: int) -> list[tuple[relax.Var, int]] | None:
        """Return the operands that have an axis of a result, or None if the trace ends here."""
        value = self._value_of(var)
        if isinstance(value, relax.Var):
            return None if value in self.params else [(value, axis)]
        if not isinstance(value, relax.Call) or short_name(value) in _SOURCES:
            return None
        rule = rule_for(operation_of(value, var.ty))
        if rule is None or len(rule.results) != 1:
            return None
        label = rule.results[0][axis]
        if not any(label in labels for labels in rule.operands):
            return None
        if rule.why_not(label, list(self.mesh.axes.values())[index]):
            return None
        with_axis = [
            (x, labels.index(label))
            for x, labels in zip(tensors_among(value.args), rule.operands, strict=True)
            if label in labels and isinstance(x, relax.Var)
        ]
        if not with_axis or any(x in self.params for x, _ in with_axis):
            return None
        return with_axis

    def _gather(self, index: int, operand_use: _OperandUse) -> None:
        """Gather the other operand of a matmul with a weight that is sharded by outputs.

        An operand that is flattened for it is gathered before that, once for all matmuls.
        """
        bound = self.uses.bound
        product = bound[operand_use.binding.var]
        for number, argument in enumerate(operand_use.call.args):
            if number == operand_use.position or not isinstance(argument, relax.Var):
                continue
            source, user, value = argument, operand_use.binding.var, self._value_of(argument)
            if short_name(value) == "reshape":
                source, user = value.args[0], argument
            if source in self.params or isinstance(self._placement_of(source)[index], Shard):
                continue
            if any(
                var not in bound or not bound[var].shares_block(product) for var in (user, source)
            ):
                continue
            self.gathered.setdefault(source, list(self._placement_of(source)))[index] = Replica()
            self.uses_gathered.add((source, user))

    def _value_of(self, var: relax.Var) -> Any:
        step = self.uses.bound.get(var)
        return None if step is None else step.value

    def _placement_of(self, var: relax.Var) -> Placements:
        placements = self.placement_of.get(var)
        return self.replicas if placements is None else placements

    def _place(self, var: relax.Var, index: int, placement: Placement) -> None:
        if is_place(self._value_of(var)):  # the program specifies its own placement
            return
        self.placed.setdefault(var, list(self._placement_of(var)))[index] = placement

    # ---- the rewrite ------------------------------------------------------------------------

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        var = binding.var
        bindings = [binding]
        if isinstance(value, relax.Call):
            arguments = [
                self._gathered_var(x) if (x, var) in self.uses_gathered else x for x in value.args
            ]
            if any(new is not old for new, old in zip(arguments, value.args, strict=True)):
                bindings = [with_value(binding, replace_call(value, value.op, arguments))]
        if var in self.placed:
            unplaced = type(var)(f"{var.name}_whole", var.ty)
            bindings = [
                relax.VarBinding(unplaced, bindings[0].value),
                relax.VarBinding(var, self._place_call(unplaced, self.placed[var])),
            ]
        if var in self.gathered:
            gathered = self._gathered_var(var)
            bindings.append(relax.VarBinding(gathered, self._place_call(var, self.gathered[var])))
        return None if bindings == [binding] else bindings

    def _gathered_var(self, var: relax.Var) -> relax.Var:
        if var not in self.gathered_vars:
            self.gathered_vars[var] = type(var)(f"{var.name}_gathered", var.ty)
        return self.gathered_vars[var]

    def _place_call(self, x: relax.Var, target: list[Placement]) -> relax.Call:
        return place_typed(x, self.mesh, tuple(target), inserted=True)


@dataclass(frozen=True, eq=False)
class _OperandUse:
    """A call that combines a parameter with other values.

    Attributes
    ----------
    binding : the binding of the call.
    call : the call.
    position : the index of the argument that depends on the parameter.
    """

    binding: relax.Binding
    call: relax.Call
    position: int


def _operand_uses_of(
    function: relax.Function, params: Iterable[relax.Var]
) -> dict[relax.Var, list[_OperandUse]]:
    """Return the calls that combine each parameter with other values, in program order."""
    # Variables that depend on one parameter only, with that parameter.
    param_of: dict[relax.Var, relax.Var] = {param: param for param in params}
    uses: dict[relax.Var, list[_OperandUse]] = {param: [] for param in param_of}
    for binding, value in walk(function):
        if binding is None:
            continue
        if isinstance(value, relax.Var) and value in param_of:
            param_of[binding.var] = param_of[value]
        if not isinstance(value, relax.Call):
            continue
        variables = [list(variables_of(argument)) for argument in value.args]
        sources = {param_of.get(var) for of_argument in variables for var in of_argument}
        if len(sources) == 1 and None not in sources:
            param_of[binding.var] = sources.pop()
            continue
        for position, of_argument in enumerate(variables):
            for param in {param_of[var] for var in of_argument if var in param_of}:
                uses[param].append(_OperandUse(binding, value, position))
    return uses
