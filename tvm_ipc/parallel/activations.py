# SPDX-License-Identifier: Apache-2.0
"""Activations that a plan divides, as places in the program.

Before, where `norm` has the style "sequence_parallel", and `w` and `head` are divided:
    y = R.add(x, R.matmul(h, w))
    z = R.nn.rms_norm(y, norm, axes=-1)
    p = R.matmul(z, head)

After:
    lv = R.comm.place(R.matmul(h, w), mesh, {"tp": comm.Shard(1)})  # reduce_scatter
    y = R.add(x, lv)
    z = R.comm.place(R.nn.rms_norm(y, norm, axes=-1), mesh, {"tp": comm.Shard(1)})
    p = R.matmul(R.comm.place(z, mesh, {"tp": comm.Replica()}), head)  # allgather

The axis is followed back from the norm, through operators whose rules allow that, to the products
and tables where sums over ranks begin, so that additions of residuals are divided too. Weights
that are divided by their outputs are given whole rows: it is these that move, and not the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvm import relax

from tvm_ipc.comm import Mesh, Placement, Replica, Shard, place
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import extents
from tvm_ipc.comm.placements import Placements
from tvm_ipc.parallel.meet import where_tensors_lie
from tvm_ipc.parallel.styles import Style
from tvm_ipc.parallel.uses import Meeting, meetings_of, variables_of
from tvm_ipc.transform.ir.rewrite import rewrite, typed, walk, with_value
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.transform.rules import images, products
from tvm_ipc.transform.rules.operation import operation_of, short_name
from tvm_ipc.transform.rules.rule import Refusal, Rule
from tvm_ipc.transform.rules.table import rule_of

#: What makes activations of weights: an axis is not followed further back.
_SOURCES: Final = frozenset({"take", *products.RULES, *images.RULES})
_RESHAPES: Final = ("reshape", "expand_dims", "squeeze")


def with_activations(
    name: str,
    function: relax.Function,
    mesh: Mesh,
    params: Mapping[relax.Var, Placements],
    styles: Mapping[relax.Var, Mapping[str, Style]],
) -> relax.Function:
    """Return the function with places for activations that styles of parameters divide.

    Parameters
    ----------
    name : of the function.
    params : where parameters lie.
    styles : of parameters, by axes of the mesh.
    """
    if not any(one.result is not None for of in styles.values() for one in of.values()):
        return function
    return _Activations(name, function, mesh, params, styles).function


class _Activations:
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
        self.lie = where_tensors_lie(function, mesh, params)
        self.params = set(function.params)
        self.value_of: dict[relax.Var, relax.Expr] = {}
        self.users: dict[relax.Var, list[relax.Binding]] = {}
        for binding, value in walk(function):
            if binding is None:
                continue
            self.value_of[binding.var] = value
            if isinstance(value, relax.Call):
                for one in set(variables_of(value)):
                    self.users.setdefault(one, []).append(binding)
        #: In which block a variable is bound, those within others left out.
        self.blocks = {
            one.var: k for k, block in enumerate(function.body.blocks) for one in block.bindings[:]
        }
        meetings = meetings_of(function, function.params)
        #: Which axes of tensors were followed back already, by axes of the mesh.
        self.seen: set[tuple[relax.Var, int, int]] = set()
        #: Where results of bindings are to lie.
        self.placed: dict[relax.Var, list[Placement]] = {}
        #: Which variables are gathered, and where they are to lie then.
        self.gathered: dict[relax.Var, list[Placement]] = {}
        self.wholes: dict[relax.Var, relax.Var] = {}
        #: Which of them is given to which call as a whole.
        self.given_whole: set[tuple[relax.Var, relax.Var]] = set()
        for param, by_axis in styles.items():
            for mesh_axis, style in by_axis.items():
                for meeting in meetings.get(param, ()):
                    if style.result is not None:
                        self._divide(param, style, self.axes.index(mesh_axis), meeting)
        order = {var: k for k, var in enumerate(self.value_of)}
        products = [
            (order[meeting.binding.var], self.axes.index(mesh_axis), meeting)
            for param, by_axis in styles.items()
            for mesh_axis, style in by_axis.items()
            if style.divides == "outputs" and style.result is None
            for meeting in meetings.get(param, ())
        ]
        for _, index, meeting in sorted(products, key=lambda one: one[:2]):
            self._gather(index, meeting)
        self.function = rewrite(function, self._change)

    # ---- what is to be placed ---------------------------------------------------------------

    def _divide(self, param: relax.Var, style: Style, index: int, meeting: Meeting) -> None:
        var = self._result(meeting.binding.var)
        shape = extents(var.ty) if isinstance(var.ty, relax.TensorType) else None
        axis = style.result
        assert axis is not None
        if shape is None or not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"parallelize: plan: function {self.name!r}: what comes of {str(param.name)!r} is "
                f"{var.ty}, and the style divides axis {axis}"
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
                    "left whole",
                    f"axis {axis} of {var.ty} is less than {workers} ranks",
                )
            )
            return
        if style.sequence:
            for one, its_axis in self._sources(var, axis, index).items():
                self._place(one, index, Shard(its_axis))
        self._place(var, index, Shard(axis))

    def _result(self, var: relax.Var) -> relax.Var:
        """Return what a module gives, whose rows were flattened for a table or a product."""
        users = self.users.get(var, [])
        if len(users) == 1 and var.ty.ndim == 2:
            value = users[0].value
            if short_name(value) in _RESHAPES and users[0].var.ty.ndim == 3:
                return users[0].var
        return var

    def _sources(self, var: relax.Var, axis: int, index: int) -> dict[relax.Var, int]:
        """Return of which products and tables a tensor is made, and which axis of each it is.

        Those that another tensor led to are left out.
        """
        found: dict[relax.Var, int] = {}
        pending = [(var, axis)]
        while pending:
            one, its_axis = pending.pop()
            if (one, its_axis, index) in self.seen:
                continue
            self.seen.add((one, its_axis, index))
            operands = self._before(one, its_axis, index)
            if operands is not None:
                pending += operands
            elif not isinstance(self._lies(one)[index], Shard):
                found.setdefault(one, its_axis)
        return found

    def _before(self, var: relax.Var, axis: int, index: int) -> list[tuple[relax.Var, int]] | None:
        """Return operands that have an axis of a result; None if the axis begins here."""
        value = self.value_of[var]
        if isinstance(value, relax.Var):
            return None if value in self.params else [(value, axis)]
        if not isinstance(value, relax.Call) or short_name(value) in _SOURCES:
            return None
        rule = _rule(value, var)
        if rule is None or len(rule.results) != 1:
            return None
        label = rule.results[0][axis]
        if not any(label in labels for labels in rule.operands):
            return None
        if rule.why_not(label, list(self.mesh.axes.values())[index]):
            return None
        operands = list(variables_of(value))
        if len(operands) != len(rule.operands):
            # Constants are operands of rules as well.
            operands = [x for x in value.args if isinstance(x.ty, relax.TensorType)]
        if len(operands) != len(rule.operands):
            return None
        found = [
            (x, labels.index(label))
            for x, labels in zip(operands, rule.operands, strict=True)
            if label in labels and isinstance(x, relax.Var)
        ]
        if not found or any(x in self.params for x, _ in found):
            return None
        return found

    def _gather(self, index: int, meeting: Meeting) -> None:
        """Have a product with a weight that is divided by its outputs be given whole rows.

        Rows that are flattened for it are gathered before that, once for all products.
        """
        block = self.blocks.get(meeting.binding.var)
        if block is None:
            return
        for number, argument in enumerate(meeting.call.args):
            if number == meeting.place or not isinstance(argument, relax.Var):
                continue
            source, user, value = argument, meeting.binding.var, self.value_of.get(argument)
            if isinstance(value, relax.Call) and short_name(value) == "reshape":
                source, user = value.args[0], argument
            if source in self.params or isinstance(self._lies(source)[index], Shard):
                continue
            if self.blocks.get(user) != block or self.blocks.get(source) != block:
                continue
            self.gathered.setdefault(source, list(self._lies(source)))[index] = Replica()
            self.given_whole.add((source, user))

    def _lies(self, var: relax.Var) -> Placements:
        found = self.lie.get(var)
        return self.replicas if found is None else found

    def _place(self, var: relax.Var, index: int, placement: Placement) -> None:
        self.placed.setdefault(var, list(self._lies(var)))[index] = placement

    # ---- places -----------------------------------------------------------------------------

    def _change(self, binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        var = binding.var
        bindings = [binding]
        if isinstance(value, relax.Call):
            arguments = [
                self._whole_of(x) if (x, var) in self.given_whole else x for x in value.args
            ]
            if any(one is not x for one, x in zip(arguments, value.args, strict=True)):
                call = relax.Call(value.op, arguments, value.attrs, list(value.ty_args), value.span)
                bindings = [with_value(binding, typed(call, value.ty))]
        if var in self.placed:
            first = type(var)(f"{var.name}_whole", var.ty)
            bindings = [
                relax.VarBinding(first, bindings[0].value),
                relax.VarBinding(var, self._at(first, self.placed[var])),
            ]
        if var in self.gathered:
            whole = self._whole_of(var)
            bindings.append(relax.VarBinding(whole, self._at(var, self.gathered[var])))
        return None if bindings == [binding] else bindings

    def _whole_of(self, var: relax.Var) -> relax.Var:
        if var not in self.wholes:
            self.wholes[var] = type(var)(f"{var.name}_gathered", var.ty)
        return self.wholes[var]

    def _at(self, x: relax.Var, target: list[Placement]) -> relax.Call:
        return typed(place(x, self.mesh, dict(zip(self.axes, target, strict=True))), x.ty)


def _rule(call: relax.Call, var: relax.Var) -> Rule | None:
    try:
        operation = operation_of(call, var.ty)
        return None if operation is None else rule_of(operation)
    except Refusal:
        return None
