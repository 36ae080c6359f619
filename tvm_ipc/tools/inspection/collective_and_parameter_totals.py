# SPDX-License-Identifier: Apache-2.0
"""Count the collectives and the parameters of a module, and estimate the time of the collectives.

The counts are those of the program of one worker before any pass changes its collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.collective_calls import match_collective
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.comm import KINDS, CollectiveAttrs
from tvm_ipc.comm.collective_attrs import kind_of
from tvm_ipc.comm.collective_relax_op import is_collective
from tvm_ipc.comm.expert_ops import RAGGED_OPERATORS
from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import evaluate
from tvm_ipc.tools.inspection.peak_live_bytes import sizes_of
from tvm_ipc.transform.convert_from_and_to_ccl import from_ccl
from tvm_ipc.transform.overlap.cost_model import predict_collective


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind in a function."""

    function: str
    kind: str  #: such as "allreduce"
    count: int
    bytes: int  #: the inputs of one worker, summed


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, which are inputs and weights."""

    function: str
    bytes: int  #: of one worker
    bytes_before_sharding: int | None  #: None if only the program of one worker is known


@dataclass(frozen=True)
class Estimate:
    """The predicted time of the collectives of a function, if nothing overlaps with them."""

    function: str
    seconds: float
    covered: int  #: how many collectives the calibration has times for
    count: int


@dataclass(frozen=True)
class Figures:
    """The headline figures of a module, by function."""

    collectives: tuple[CollectiveCount, ...] = ()
    parameters: tuple[Parameters, ...] = ()
    estimates: tuple[Estimate, ...] = ()  #: none without a calibration


@dataclass(frozen=True)
class _Site:
    function: str
    kind: str
    bytes: int
    is_world: bool


def figures(
    module: tvm.IRModule,
    unsharded: tvm.IRModule | None,
    sizes: Mapping[str, int],
    workers: int,
    calibration: Calibration | None = None,
) -> Figures:
    """Return the headline figures.

    Parameters
    ----------
    module : the program of one worker.
    unsharded : the same module for one worker with all data; None if it is not known.
    sizes : values of symbolic variables; others count as their upper bound.
    workers : number of workers that the module is compiled for.
    calibration : measured times of the collectives; None for no estimates.
    """
    sites = [site for name, f in _functions(module) for site in _sites(name, f, sizes)]
    counts: dict[tuple[str, str], list[_Site]] = {}
    for site in sites:
        counts.setdefault((site.function, site.kind), []).append(site)
    whole = {} if unsharded is None else dict(_functions(unsharded))
    return Figures(
        tuple(
            CollectiveCount(*key, len(group), sum(site.bytes for site in group))
            for key, group in counts.items()
        ),
        tuple(
            Parameters(
                name,
                _parameter_bytes(function, sizes),
                _parameter_bytes(whole[name], sizes) if name in whole else None,
            )
            for name, function in _functions(module)
        ),
        () if calibration is None else tuple(_estimates(sites, workers, calibration)),
    )


def _functions(module: tvm.IRModule) -> Iterator[tuple[str, relax.Function]]:
    for global_var, function in module.functions_items():
        if isinstance(function, relax.Function):
            yield str(global_var.name_hint), function


def _sites(name: str, function: relax.Function, sizes: Mapping[str, int]) -> Iterator[_Site]:
    known = sizes_of(function, sizes)
    for call in calls(function):
        converted = from_ccl(call)
        converted = call if converted is None else converted
        if is_collective(converted):
            attrs = CollectiveAttrs.of(converted)
            if kind_of(attrs).communicates:
                size = _bytes(converted.args[0].ty, known)
                yield _Site(name, str(attrs.kind), size, attrs.team == "world")
            continue
        operator = operator_of(call)
        if operator in RAGGED_OPERATORS and int(call.attrs.workers) > 1:
            size = _bytes(call.args[0].ty, known)
            yield _Site(name, operator.rpartition(".")[2], size, call.attrs.team == "world")
            continue
        collective = match_collective(call)
        if collective is not None:
            operands = collective.operands(collective.function.reads)
            kind = collective.general_form.name.rpartition(".")[2]
            size = sum(_bytes(operand.ty, known) for operand in operands)
            yield _Site(name, kind, size, collective.team == 0)


def _parameter_bytes(function: relax.Function, sizes: Mapping[str, int]) -> int:
    known = sizes_of(function, sizes)
    return sum(_bytes(parameter.ty, known) for parameter in function.params)


def _bytes(type_: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of all tensors of a type whose shape is known up to symbolic variables."""
    if isinstance(type_, relax.TupleType):
        return sum(_bytes(field, sizes) for field in type_.fields)
    if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
        return 0
    count = 1
    for extent in type_.shape.values:
        count *= evaluate(str(extent), sizes) or 0
    return count * int(tvm.DataType(str(type_.dtype)).itemsize)


def _estimates(sites: list[_Site], workers: int, calibration: Calibration) -> Iterator[Estimate]:
    by_function: dict[str, list[_Site]] = {}
    for site in sites:
        by_function.setdefault(site.function, []).append(site)
    for function, group in by_function.items():
        covered = [site for site in group if site.kind in COLLECTIVES and site.is_world]
        seconds = sum(
            predict_collective(
                site.kind,
                ceil(KINDS[site.kind].slice_bytes(site.bytes, workers)),
                workers,
                calibration,
            )
            for site in covered
        )
        yield Estimate(function, seconds, len(covered), len(group))
