# SPDX-License-Identifier: Apache-2.0
"""The whole way from a Relax module with collectives to what the virtual machine runs.

    executable = tvm.relax.build(
        mod, target, relax_pipeline=tvm_ipc.get_pipeline(target, world_size=2)
    )

TVM's own pipeline for the target, with our passes at the places where they belong:

    1 dispatch   of programs for all ranks, what one rank runs; products in chunks beside what
                 they communicate; sums over workers with the norm after them as one function,
                 matrix products for the BLAS, TVM's choice of libraries
    2 legalize   operators become kernels, those that are alike once, and kernels are fused
    3 schedule   what the caller gives, if anything; on CPUs kernels that have no schedule yet
    4 dataflow   outputs are allocated explicitly, those of external compilers' functions too
    5 rewrite    all-reduces read their input in memory that peers map; scopes are placed
    6 plan       storages, live ranges that end when all ranks have read, barriers left out
    7 verify     nothing is written that a peer may still read
    8 lower      allocations and copies become calls of the runtime; functions with collectives
                 refuse another number of workers
    9 finalize   TVM's own rest

A module without collectives passes through the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline
from tvm.relax.backend.cuda import pipeline as cuda_pipeline

from tvm_ipc import arguments
from tvm_ipc import blas as blas_library
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import CollectiveAttrs
from tvm_ipc.comm.attributes import check_attributes
from tvm_ipc.comm.operator import NAME as COLLECTIVE
from tvm_ipc.comm.place_operator import NAME as PLACE
from tvm_ipc.comm.place_operator import mesh_of
from tvm_ipc.contract import MAX_SHOWN, MAX_WORKERS, AllReduceStrategy, backends_of
from tvm_ipc.contract.programs import KERNEL_ALIGNMENT, RUN_BY
from tvm_ipc.errors import TransformError
from tvm_ipc.transform import (
    EraseMemoryScopes,
    FuseAllReduceEpilogue,
    IPCAllReduceRewrite,
    KeepFromFusion,
    LegalizeOps,
    LowerExternCalls,
    LowerGPUIPCAllocStorage,
    LowerPlacements,
    OffloadBLAS,
    OverlapCommunication,
    PlaceParts,
    PostCollectives,
    RequireWorkers,
    RewriteCUDAGraph,
    ScheduleForCPU,
    StaticPlanBlockMemory,
    VerifyCrossRankSafety,
    script,
)
from tvm_ipc.transform.ir.rewrite import calls
from tvm_ipc.transform.report import Decision, note

#: Targets with memory that peers map, and TVM's pipeline for them.
_TARGETS: Final = {"llvm": cpu_pipeline, "c": cpu_pipeline, "cuda": cuda_pipeline}
#: Where tensors in a storage start, in multiples of so many bytes.
_ALIGNMENT: Final = {"llvm": KERNEL_ALIGNMENT, "c": KERNEL_ALIGNMENT, "cuda": 256}
_LEGALIZE: Final = "LegalizeOps"
_FUSION: Final = ("FoldConstant", "FuseOps", "FuseTIR")
_PLAN: Final = "StaticPlanBlockMemory"
_GRAPHS: Final = "RewriteCUDAGraph"
_LOWER: Final = "LowerAllocTensor"

_PLACE: Final = tvm.ir.Op.get(PLACE)
_HINT: Final = "relax.hint_on_device"
#: Operators that are for so many workers, or for a device.
_TOLD: Final = ("relax.ccl.allgather", "relax.ccl.scatter_from_worker0", COLLECTIVE, _HINT)

Phase = tuple[str, list[tvm.transform.Pass]]


def get_pipeline(
    target: tvm.target.Target | str,
    world_size: int,
    allreduce_strategy: AllReduceStrategy | int | str = "auto",
    *,
    num_groups: int = 1,
    barrier_budget: int | None = None,
    blas: bool | None = None,
    fuse_epilogue: bool = True,
    schedule: tvm.transform.Pass | None = None,
    post_collectives: bool = False,
    overlap: Calibration | int | None = None,
    streams: int = 2,
    dump: str | Path | None = None,
) -> tvm.transform.Pass:
    """Return a pipeline for `relax.build` and `tvm.compile`.

    Parameters
    ----------
    target : what to compile for: `llvm`, `c` or `cuda`, with its options.
    world_size : the number of workers that will run the module. Sessions of another size refuse it,
        if it has a collective.
    allreduce_strategy : "auto", "oneshot", "twoshot", "ring", or an `AllReduceStrategy`.
    num_groups : the number of groups that the session will have.
    barrier_budget : bytes of IPC memory that may be spent on leaving out exit barriers; see
        `StaticPlanBlockMemory`.
    blas : whether matrix products on a CPU are OpenBLAS's (see `OffloadBLAS`). None means where it
        is installed, which it must also be where the program runs.
    fuse_epilogue : whether a sum over workers, the addition of a residual and its norm are one
        function (see `FuseAllReduceEpilogue`).
    schedule : a pass that runs on the fused kernels. For `llvm` those that it leaves as they were
        are scheduled by `ScheduleForCPU`.
    post_collectives : whether collectives go on while the program does what does not need them, in
        a thread of each worker, or on a stream of its GPU; see `PostCollectives`.
    overlap : what was measured on a machine, by which matrix products go on beside the
        communication before or after them where that pays; or a number of chunks for all of them.
        See `OverlapCommunication`.
    streams : of products along an axis that `comm.place` marks for streams, how many chunks have
        their rows on their way, or are multiplied, at a time; see `LowerPlacements`.
    dump : a folder to write the module to after each phase, as TVMScript.
    """
    target = _target(target)
    world_size, num_groups = arguments.workers(
        "get_pipeline", "world_size", world_size, num_groups, MAX_WORKERS
    )
    if schedule is not None:
        wanted = "a pass, or None"
        arguments.instance("get_pipeline: schedule", schedule, tvm.transform.Pass, wanted)
    fuse_epilogue = arguments.flag("get_pipeline: fuse_epilogue", fuse_epilogue)
    epilogue = FuseAllReduceEpilogue(allreduce_strategy, num_groups=num_groups)
    posts = arguments.flag("get_pipeline: post_collectives", post_collectives)
    folder = _folder(dump)
    streams = arguments.integer(
        "get_pipeline: streams", streams, "a number of streams, 1 or more", 1
    )
    placements = LowerPlacements(streams=streams)
    rewrite = IPCAllReduceRewrite(allreduce_strategy, num_groups=num_groups)
    use_blas, why = _blas(target, blas)
    _check_calibration(overlap, target)
    overlapped = _overlap(overlap, blas=use_blas, world_size=world_size, num_groups=num_groups)
    before_plan, after_plan, finalize = _around_the_plan(target)
    plan = StaticPlanBlockMemory(
        packed=True, alignment=_ALIGNMENT[target.kind.name], barrier_budget=barrier_budget
    )
    phases: list[Phase] = [
        (
            "dispatch",
            [
                *overlapped,
                *([epilogue] if fuse_epilogue else []),
                *([OffloadBLAS()] if use_blas else []),
                *_for_target(target, "library_dispatch_passes"),
            ],
        ),
        ("legalize", _legalize(_for_target(target, "legalize_passes"))),
        (
            "schedule",
            [
                *([schedule] if schedule is not None else []),
                *([ScheduleForCPU()] if target.kind.name == "llvm" else []),
            ],
        ),
        (
            "dataflow",
            [
                *_for_target(target, "dataflow_lower_passes"),
                LowerExternCalls(place_arguments=False),
            ],
        ),
        ("rewrite", [PlaceParts(), *([PostCollectives()] if posts else []), rewrite]),
        ("plan", [*before_plan, plan, *after_plan]),
        ("verify", [VerifyCrossRankSafety(world_size=world_size, num_groups=num_groups)]),
        (
            "lower",
            [
                LowerGPUIPCAllocStorage(),
                EraseMemoryScopes(),
                RequireWorkers(world_size, num_groups),
            ],
        ),
        ("finalize", finalize),
    ]

    @tvm.transform.module_pass(opt_level=0, name="tvm_ipc.pipeline")  # type: ignore[untyped-decorator]
    def pipeline(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        _check_well_formed(mod)
        _check_meshes(mod, world_size)
        mod = tvm.transform.Sequential([placements], name="tvm_ipc.placements")(mod)
        _check_workers_and_devices(mod, target, world_size, world_size // num_groups)
        note(Decision("get_pipeline", "", "BLAS", "used" if use_blas else "not used", why))
        with target:
            for number, (name, passes) in enumerate(phases, start=1):
                mod = tvm.transform.Sequential(passes, name=f"tvm_ipc.{name}")(mod)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{number}-{name}.py").write_text(script(mod))
        return mod

    return pipeline


def _blas(target: tvm.target.Target, wanted: bool | None) -> tuple[bool, str]:
    """Return whether products are for the BLAS, and why."""
    if wanted is not None:
        wanted = arguments.flag("get_pipeline: blas", wanted)
    if _TARGETS[target.kind.name] is not cpu_pipeline:
        if wanted:
            raise ValueError(f"get_pipeline: blas is for CPUs, not for {target.kind.name!r}")
        return False, f"the target is {target.kind.name}"
    if wanted is not None:
        return wanted, f"get_pipeline was given blas={wanted}"
    version = blas_library.version()
    if blas_library.installed():
        return True, f"{blas_library.DISTRIBUTION} {version} is installed"
    return False, f"{blas_library.DISTRIBUTION} is not installed"


def _overlap(given: object, **options: Any) -> list[tvm.transform.Pass]:
    if given is None:
        return []
    if isinstance(given, Calibration):
        return [OverlapCommunication(given, **options)]
    wanted = "a tvm_ipc.Calibration, a number of chunks, or None"
    chunks = arguments.integer("get_pipeline: overlap", given, wanted, 0, MAX_SHOWN)
    return [OverlapCommunication(chunks=chunks, **options)]


def _check_calibration(given: object, target: tvm.target.Target) -> None:
    """Refuse what was measured between other devices than those that are compiled for."""
    if not isinstance(given, Calibration):
        return
    on_cpu = _TARGETS[target.kind.name] is cpu_pipeline
    if on_cpu != (given.backend in backends_of("cpu")):
        raise ValueError(
            f"get_pipeline: overlap is a calibration of {given.machine} with the backend "
            f"{given.backend!r}, which says nothing of {target.kind.name!r}; give a number of "
            "chunks"
        )


def _target(given: object) -> tvm.target.Target:
    name, wanted = "get_pipeline: target", f"one of {', '.join(map(repr, _TARGETS))}, with options"
    if not isinstance(given, (str, dict, tvm.target.Target)):
        raise arguments.wrong_type(name, wanted, given)
    try:
        target = tvm.target.Target(given)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is {wanted}, not {arguments.show(given)}: {error}") from None
    if target.kind.name not in _TARGETS:
        raise ValueError(
            f"{name} is {wanted}, not {arguments.show(given)}: workers share no memory there"
        )
    return target


def _folder(dump: object) -> Path | None:
    if dump is None:
        return None
    name, wanted = "get_pipeline: dump", "a folder to write to, or None"
    folder = arguments.path(name, dump, wanted)
    if any(one.exists() and not one.is_dir() for one in (folder, *folder.parents)):
        raise arguments.wrong_value(name, wanted, str(dump))
    return folder


def _for_target(target: tvm.target.Target, kind: str) -> list[tvm.transform.Pass]:
    """Return the passes of one part of TVM's pipeline."""
    return list(getattr(_TARGETS[target.kind.name], kind)(target))


def _legalize(passes: list[tvm.transform.Pass]) -> list[tvm.transform.Pass]:
    """Legalize calls that are alike once, and keep from fusion what it does not know."""
    passes = [LegalizeOps() if str(one.info.name) == _LEGALIZE else one for one in passes]
    first, *others = [n for n, one in enumerate(passes) if str(one.info.name) in _FUSION]
    last = max(others, default=first) + 1
    return [*passes[:first], KeepFromFusion(passes[first:last]), *passes[last:]]


def _around_the_plan(
    target: tvm.target.Target,
) -> tuple[list[tvm.transform.Pass], list[tvm.transform.Pass], list[tvm.transform.Pass]]:
    """Split TVM's last passes: before its memory plan, up to its lowering, and the rest."""
    passes = _for_target(target, "finalize_passes")
    names = [str(one.info.name) for one in passes]
    passes = [
        RewriteCUDAGraph() if name == _GRAPHS else one
        for name, one in zip(names, passes, strict=True)
    ]
    if _PLAN not in names or _LOWER not in names[names.index(_PLAN) :]:
        raise TransformError(
            f"get_pipeline: TVM's pipeline for {target.kind.name!r} has no {_PLAN} followed by "
            f"{_LOWER}, so our passes have no place in it; it has {', '.join(names)}"
        )
    plan, lower = names.index(_PLAN), names.index(_LOWER)
    return passes[:plan], passes[plan + 1 : lower], passes[lower:]


def _check_well_formed(mod: tvm.IRModule) -> None:
    try:
        # With `check_ty` it looks into the type at every use of a variable, which is quadratic
        # where weights are one tuple. A type that is missing is found without it, too.
        relax.analysis.well_formed(mod, check_ty=False)
    except (TypeError, ValueError) as error:
        raise TransformError(f"get_pipeline: the module is not well-formed: {error}") from error


def _check_meshes(mod: tvm.IRModule, world_size: int) -> None:
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            if not call.op.same_as(_PLACE):
                continue
            mesh = mesh_of(call.attrs)
            if sorted(mesh.ranks) != list(range(world_size)):
                raise TransformError(
                    f"get_pipeline: function {global_var.name_hint!r} places tensors on {mesh}, "
                    f"and all of {world_size} workers run it; give a mesh of the ranks 0 to "
                    f"{world_size - 1}, or the world_size it was written for"
                )


def _check_workers_and_devices(
    mod: tvm.IRModule, target: tvm.target.Target, world_size: int, group_size: int
) -> None:
    for name, op, attrs in _told(mod):
        if op == _HINT:
            _check_hint(name, tvm.device(int(attrs.device_type), int(attrs.index)), target)
        else:
            if op == COLLECTIVE:
                check_attributes(attrs)
            in_group, workers = _workers(attrs)
            expected = group_size if in_group else world_size
            _check_workers(name, op, workers or expected, in_group, expected)
            if op == COLLECTIVE and not isinstance(attrs.team, str):
                _check_ranks(name, attrs, world_size, mod[name].attrs)


def _check_hint(name: str, device: tvm.runtime.Device, target: tvm.target.Target) -> None:
    if (device.dlpack_device_type(), device.index) != (target.get_target_device_type(), 0):
        raise TransformError(
            f"get_pipeline: function {name!r} has a hint_on_device for {device}, and a worker has "
            f"one device, which is compiled for as {target.kind.name!r}; take the hint out"
        )


def _check_workers(name: str, op: str, workers: int, in_group: bool, expected: int) -> None:
    if workers != expected:
        raise TransformError(
            f"get_pipeline: function {name!r} has a {op} over {workers} workers, and "
            f"{'a group' if in_group else 'the session'} has {expected}; build the module "
            f"for {expected}, or give the world_size it was built for"
        )


def _workers(attrs: Any) -> tuple[bool, int]:
    """Return whether it is for the workers of a group, and how many these are; 0 if it is none."""
    if not isinstance(attrs, CollectiveAttrs):
        return bool(getattr(attrs, "in_group", False)), int(attrs.num_workers)
    return attrs.team == "group", int(attrs.workers) if isinstance(attrs.team, str) else 0


def _check_ranks(name: str, attrs: CollectiveAttrs, world_size: int, of: Any) -> None:
    ranks = {int(rank) for team in attrs.team for rank in team}
    if RUN_BY in (of or {}) and ranks <= set(range(world_size)):
        alone = sorted({int(rank) for rank in of[RUN_BY]} - ranks)
        if alone:
            raise TransformError(
                f"get_pipeline: function {name!r} has a collective ({attrs.kind}) over the teams "
                f"{[list(team) for team in attrs.team]}, and is run by rank {alone[0]} ({RUN_BY}); "
                "each rank that runs it has a place in one team"
            )
    elif ranks != set(range(world_size)):
        raise TransformError(
            f"get_pipeline: function {name!r} has a collective ({attrs.kind}) over the teams "
            f"{[list(team) for team in attrs.team]}, and all of {world_size} workers run it; each "
            "of them has a place in one team"
        )


def _told(mod: tvm.IRModule) -> Iterator[tuple[str, str, Any]]:
    """Yield the operators that say for how many workers or what device they are."""
    # An operator is one object, whose address is told faster than its name.
    told = {tvm.ir.Op.get(name).__chandle__(): name for name in _TOLD}
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            name = told.get(call.op.__chandle__())
            if name is not None:
                yield str(global_var.name_hint), name, call.attrs
