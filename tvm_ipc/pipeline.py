# SPDX-License-Identifier: Apache-2.0
"""Provide `get_pipeline`, which compiles a Relax module with collectives to an executable.

    executable = tvm.relax.build(
        mod, target, relax_pipeline=tvm_ipc.get_pipeline(target, world_size=2)
    )

The pipeline consists of TVM's own passes for the target, and passes of tvm_ipc between them:

    1 dispatch   lower programs for all ranks to the program of one rank; overlap matmuls with
                 communication; fuse all-reduces with the norm after them, and attention, if
                 requested; offload matmuls to BLAS, or fix the order of all sums; run TVM's library
                 dispatch
    2 legalize   turn operators into kernels, one for all equal calls; fuse kernels
    3 schedule   run the caller's schedule pass, if any; on CPUs, schedule the remaining kernels
    4 dataflow   allocate outputs explicitly, including those of external compilers' functions
    5 rewrite    compute slices directly in the concatenated tensor; run collectives in the
                 background, if requested; let all-reduces read inputs in memory that peers map;
                 choose the memory scopes of tensors
    6 plan       let tensors share storages, but only after all ranks have read them; omit exit
                 barriers that are not needed
    7 verify     prove that no rank writes memory that a peer may still read
    8 lower      turn allocations and copies into calls of the runtime; make functions with
                 collectives check the number of workers
    9 finalize   run the rest of TVM's pipeline

After the placements are lowered, local functions are lifted, and a module with tensors on two
devices is refused. A module without collectives passes through the same phases. If
`TVM_IPC_VERIFY_EACH=1` is set, the pipeline checks after each phase that the module is well-formed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline
from tvm.relax.backend.cuda import pipeline as cuda_pipeline

from tvm_ipc import arguments
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls, relax_functions, walk
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm import CollectiveAttrs, Mesh
from tvm_ipc.comm.collective_attrs import check_attributes
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.comm.expert_ops import RAGGED_OPERATORS
from tvm_ipc.comm.place_op import NAME as PLACE
from tvm_ipc.comm.place_op import mesh_of
from tvm_ipc.cpu import FixSumOrder, FuseAttention, OffloadBLAS, ScheduleForCPU
from tvm_ipc.cpu import openblas_discovery as blas_library
from tvm_ipc.cpu.blas.byoc_backend import COMPILER as BLAS_COMPILER
from tvm_ipc.cpu.check_reproducible_pipeline import check_options, check_placements
from tvm_ipc.errors import TransformError
from tvm_ipc.gpu import RewriteCUDAGraph
from tvm_ipc.gpu.rewrite_cuda_graph import uses_cuda_graphs
from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS, AllReduceStrategy, backends_of
from tvm_ipc.packed_functions.program_function_declarations import KERNEL_ALIGNMENT, RUN_BY
from tvm_ipc.runtime import config
from tvm_ipc.spmd import LowerPlacements
from tvm_ipc.transform import (
    AsyncCollectives,
    ElideConcatCopies,
    EraseMemoryScopes,
    FuseAllReduceEpilogue,
    FuseSupported,
    IPCAllReduceRewrite,
    LegalizeOps,
    LowerExternCalls,
    LowerGPUIPCAllocStorage,
    OverlapCommunication,
    RequireWorkers,
    StaticPlanBlockMemory,
    VerifyCrossRankSafety,
    script,
)
from tvm_ipc.transform.lift_local_functions import lift_local_functions
from tvm_ipc.transform.one_device_per_worker import check_one_device
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.transform.well_formedness import check_input, check_phase

#: The supported kinds of targets, and TVM's pipeline for each.
_TARGETS: Final = {"llvm": cpu_pipeline, "c": cpu_pipeline, "cuda": cuda_pipeline}
#: The alignment of tensors in a storage, in bytes.
_ALIGNMENT: Final = {"llvm": KERNEL_ALIGNMENT, "c": KERNEL_ALIGNMENT, "cuda": 256}
_LEGALIZE: Final = "LegalizeOps"
_FUSION: Final = ("FoldConstant", "FuseOps", "FuseTIR")
_PLAN: Final = "StaticPlanBlockMemory"
_GRAPHS: Final = "RewriteCUDAGraph"
_LOWER: Final = "LowerAllocTensor"

_PLACE: Final = tvm.ir.Op.get(PLACE)
_HINT: Final = "relax.hint_on_device"
#: Operators that are bound to a number of workers or to a device.
_BOUND_OPS: Final = (
    "relax.ccl.allgather",
    "relax.ccl.scatter_from_worker0",
    COLLECTIVE,
    *RAGGED_OPERATORS,
    _HINT,
)

Phase = tuple[str, list[tvm.transform.Pass]]


def get_pipeline(
    target: tvm.target.Target | str,
    world_size: int,
    allreduce_strategy: AllReduceStrategy | int | str = "auto",
    *,
    num_groups: int = 1,
    barrier_budget: int | None = None,
    blas: bool | None = None,
    fuse_attention: bool | None = None,
    fuse_epilogue: bool | None = None,
    schedule: tvm.transform.Pass | None = None,
    async_collectives: bool = False,
    overlap: Calibration | int | None = None,
    streams: int = 2,
    reproducible: bool = False,
    dump: str | Path | None = None,
) -> tvm.transform.Pass:
    """Return a pipeline for `relax.build` and `tvm.compile`.

    Parameters
    ----------
    target : the target to compile for: `llvm`, `c` or `cuda`, with options.
    world_size : the number of workers that will run the module. If the module has collectives, a
        session with another number of workers raises an error when it loads it.
    allreduce_strategy : "auto", "oneshot", "twoshot", "default", or an `AllReduceStrategy`.
    num_groups : the number of groups of the session.
    barrier_budget : the bytes by which memory that peers map may grow so that exit barriers can be
        omitted; see `StaticPlanBlockMemory`.
    blas : whether matmuls on a CPU are offloaded to OpenBLAS (see `OffloadBLAS`). By default (None)
        they are offloaded if OpenBLAS is installed. It must also be installed where the program
        runs.
    fuse_attention : whether attention becomes one function, which needs no memory for scores (see
        `FuseAttention`). By default (None) it does for CPUs; there is none for GPUs.
    fuse_epilogue : whether an all-reduce, the addition of a residual and the norm after it become
        one function (see `FuseAllReduceEpilogue`). By default (None) they do, except in programs
        that CUDA graphs capture, where three kernels are faster than the fused one.
    schedule : a pass that schedules fused kernels. For `llvm`, `ScheduleForCPU` runs after it and
        schedules the remaining kernels.
    async_collectives : whether collectives run in the background until the program needs their
        results. They run in another thread of each worker, or on another stream of its GPU. See
        `AsyncCollectives`.
    overlap : whether matmuls overlap with the communication before or after them. If you pass a
        calibration, they do where that is predicted to be faster. If you pass a number, all of them
        are split into that many chunks. See `OverlapCommunication`.
    streams : the number of chunks that are communicated or computed at the same time, for tensors
        that `comm.place` marks for streams. For the target `cuda`, chunk i is computed on stream
        i % `streams` of the GPU. If `overlap` is a calibration, marks that do not pay are left out.
        See `LowerPlacements`.
    reproducible : whether the bits of the results must not depend on the number of workers, on the
        number of rows that are computed at once, or on threads. A program with an operator for
        which that cannot be promised is refused. The target is `cpu_target(reproducible=True)`. It
        excludes `fuse_epilogue`, `schedule`, `overlap` and marked streams, which sum in another
        order. See `docs/determinism.md`.
    dump : a folder to which the module is written after each phase, as TVMScript.

    Returns
    -------
    tvm.transform.Pass
        The pipeline, which takes a module of Relax operators.

    Raises
    ------
    TypeError, ValueError
        An argument is not valid, or the target is not supported.

    Examples
    --------
    >>> import numpy as np
    >>> import tvm
    >>> import tvm_ipc
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((4,), "float32")):
    ...         return R.ccl.allreduce(R.exp(x), "sum")
    ... ''')
    >>> pipeline = tvm_ipc.get_pipeline("llvm", world_size=2)
    >>> program = tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    >>> with tvm_ipc.Session(num_workers=2) as session:
    ...     main = session.load_vm_module(program)["main"]
    ...     session.get(main(session.put(np.zeros(4, "float32"))), rank=1).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    target = parse_target("get_pipeline: target", target)
    world_size, num_groups = arguments.workers(
        "get_pipeline", "world_size", world_size, num_groups, MAX_WORKERS
    )
    if schedule is not None:
        expected = "a pass, or None"
        arguments.instance("get_pipeline: schedule", schedule, tvm.transform.Pass, expected)
    if arguments.flag("get_pipeline: reproducible", reproducible):
        check_options(target, fuse_epilogue, schedule, overlap, blas)
        fuse_epilogue = False
    epilogue = _epilogue(fuse_epilogue, target, allreduce_strategy, num_groups, world_size)
    use_async = arguments.flag("get_pipeline: async_collectives", async_collectives)
    folder = _folder(dump)
    verify_each = config.verify_each()
    streams = arguments.integer(
        "get_pipeline: streams", streams, "a number of streams, 1 or more", 1
    )
    rewrite = IPCAllReduceRewrite(allreduce_strategy, num_groups=num_groups)
    use_blas, blas_reason = _blas(target, True if reproducible else blas)
    matmuls: list[Any] = [OffloadBLAS()] if use_blas else []
    if reproducible:
        matmuls = [FixSumOrder(world_size, num_groups)]
    compilers = (BLAS_COMPILER,) if use_blas else ()
    attention = _attention(target, fuse_attention, reproducible=reproducible)
    _check_calibration(overlap, target)
    placements = LowerPlacements(
        streams=streams,
        calibration=overlap if isinstance(overlap, Calibration) else None,
        blas=use_blas,
        compute_streams=target.kind.name == "cuda",
    )
    overlap_passes = _overlap(overlap, blas=use_blas, world_size=world_size, num_groups=num_groups)
    before_plan, after_plan, finalize = _memory_passes(target)
    plan = StaticPlanBlockMemory(
        packed=True, alignment=_ALIGNMENT[target.kind.name], barrier_budget=barrier_budget
    )
    phases: list[Phase] = [
        (
            "dispatch",
            [
                *overlap_passes,
                *epilogue,
                *attention,
                *matmuls,
                *_for_target(target, "library_dispatch_passes"),
            ],
        ),
        ("legalize", _legalize(_for_target(target, "legalize_passes"))),
        (
            "schedule",
            [
                *([schedule] if schedule is not None else []),
                *(
                    [ScheduleForCPU(reproducible=reproducible)]
                    if target.kind.name == "llvm"
                    else []
                ),
            ],
        ),
        (
            "dataflow",
            [
                *_for_target(target, "dataflow_lower_passes"),
                LowerExternCalls(place_arguments=False),
            ],
        ),
        ("rewrite", [ElideConcatCopies(), *([AsyncCollectives()] if use_async else []), rewrite]),
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
        check_input(mod)
        has_local_functions = _check_meshes(mod, world_size)
        if reproducible:
            check_placements(mod)
        mod = tvm.transform.Sequential([placements], name="tvm_ipc.placements")(mod)
        if verify_each:
            check_phase("placements", mod)
        if has_local_functions:
            mod = lift_local_functions("get_pipeline", mod, compilers)
        check_one_device("get_pipeline", mod, target)
        _check_workers_and_devices(mod, target, world_size, world_size // num_groups)
        note(Decision("get_pipeline", "", "BLAS", "used" if use_blas else "not used", blas_reason))
        with target:
            for number, (name, passes) in enumerate(phases, start=1):
                mod = tvm.transform.Sequential(passes, name=f"tvm_ipc.{name}")(mod)
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{number}-{name}.py").write_text(script(mod))
                if verify_each:
                    check_phase(name, mod)
        return mod

    return pipeline


def _epilogue(
    requested: bool | None,
    target: tvm.target.Target,
    strategy: AllReduceStrategy | int | str,
    num_groups: int,
    world_size: int,
) -> list[tvm.transform.Pass]:
    """Return the pass that fuses all-reduces with the norm after them, where it is to run."""
    fuse: Any = FuseAllReduceEpilogue(strategy, num_groups=num_groups, world_size=world_size)
    if requested is not None:
        return [fuse] if arguments.flag("get_pipeline: fuse_epilogue", requested) else []
    if target.kind.name != "cuda":
        return [fuse]

    @tvm.transform.module_pass(opt_level=0, name="tvm_ipc.epilogue")  # type: ignore[untyped-decorator]
    def fuse_without_graphs(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        if not uses_cuda_graphs():
            return fuse(mod)
        reason = "CUDA graphs capture the program; fuse_epilogue=True fuses nevertheless"
        note(Decision("FuseAllReduceEpilogue", "", "all-reduces", "not fused", reason))
        return mod

    return [fuse_without_graphs]


def _attention(
    target: tvm.target.Target, requested: bool | None, *, reproducible: bool
) -> list[tvm.transform.Pass]:
    """Return the pass that fuses attention, where it is to run."""
    if requested is not None:
        requested = arguments.flag("get_pipeline: fuse_attention", requested)
    is_cpu = _TARGETS[target.kind.name] is cpu_pipeline
    if requested and not is_cpu:
        kind = target.kind.name
        raise ValueError(f"get_pipeline: fuse_attention is for CPUs, not for {kind!r}")
    fuse = FuseAttention(reproducible=reproducible)
    return [fuse] if is_cpu and requested is not False else []


def _blas(target: tvm.target.Target, requested: bool | None) -> tuple[bool, str]:
    """Return whether matmuls are offloaded to BLAS, and the reason."""
    if requested is not None:
        requested = arguments.flag("get_pipeline: blas", requested)
    if _TARGETS[target.kind.name] is not cpu_pipeline:
        if requested:
            raise ValueError(f"get_pipeline: blas is for CPUs, not for {target.kind.name!r}")
        return False, f"the target is {target.kind.name}"
    if requested is not None:
        return requested, f"get_pipeline was given blas={requested}"
    version = blas_library.version()
    if blas_library.installed():
        return True, f"{blas_library.DISTRIBUTION} {version} is installed"
    return False, f"{blas_library.DISTRIBUTION} is not installed"


def _overlap(overlap: object, **options: Any) -> list[tvm.transform.Pass]:
    if overlap is None:
        return []
    if isinstance(overlap, Calibration):
        return [OverlapCommunication(overlap, **options)]
    expected = "a tvm_ipc.Calibration, a number of chunks, or None"
    chunks = arguments.integer("get_pipeline: overlap", overlap, expected, 0, MAX_EXPOSED)
    return [OverlapCommunication(chunks=chunks, **options)]


def _check_calibration(overlap: object, target: tvm.target.Target) -> None:
    """Raise an error if a calibration was measured on devices of another kind than the target's."""
    if not isinstance(overlap, Calibration):
        return
    on_cpu = _TARGETS[target.kind.name] is cpu_pipeline
    if on_cpu != (overlap.backend in backends_of("cpu")):
        raise ValueError(
            f"get_pipeline: overlap is a calibration of {overlap.machine} with the backend "
            f"{overlap.backend!r}, which does not apply to {target.kind.name!r}; pass a number of "
            "chunks"
        )


def parse_target(name: str, value: object) -> tvm.target.Target:
    """Return a target of one of the supported kinds.

    Parameters
    ----------
    name : the name of the argument, for error messages.
    value : a target, or a text or dictionary from which TVM constructs one.

    Raises
    ------
    TypeError
        The value is not a target.
    ValueError
        TVM does not know the target, or `get_pipeline` does not support it.
    """
    expected = f"one of {', '.join(map(repr, _TARGETS))}, with options"
    if not isinstance(value, (str, dict, tvm.target.Target)):
        raise arguments.wrong_type(name, expected, value)
    # Check first: constructing the target prints warnings about missing drivers and libraries.
    _check_kind(name, value, _kind_of(value))
    try:
        target = tvm.target.Target(value)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is {expected}, not {arguments.quote(value)}: {error}") from None
    _check_kind(name, value, str(target.kind.name))
    return target


def _kind_of(value: object) -> str:
    """Return the kind in the specification of a target, or "" if only TVM can tell it.

    For example, the tag of a device has no kind in it.
    """
    if isinstance(value, tvm.target.Target):
        return str(value.kind.name)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return ""  # TVM explains what is wrong
    kind = value.get("kind", "") if isinstance(value, dict) else next(iter(str(value).split()), "")
    return kind if kind in tvm.target.Target.list_kinds() else ""


def _check_kind(name: str, value: object, kind: str) -> None:
    if kind and kind not in _TARGETS:
        raise ValueError(
            f"{name} is {arguments.quote(value)}, but tvm_ipc has no collectives for {kind!r}; "
            "supported are 'llvm' and 'c' for CPUs, and 'cuda' for NVIDIA GPUs"
        )


def _folder(dump: object) -> Path | None:
    if dump is None:
        return None
    name, expected = "get_pipeline: dump", "a folder to write to, or None"
    folder = arguments.path(name, dump, expected)
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        raise arguments.wrong_value(name, expected, str(dump))
    return folder


def _for_target(target: tvm.target.Target, kind: str) -> list[tvm.transform.Pass]:
    """Return the passes of one stage of TVM's pipeline for a target."""
    return list(getattr(_TARGETS[target.kind.name], kind)(target))


def _legalize(passes: list[tvm.transform.Pass]) -> list[tvm.transform.Pass]:
    """Replace TVM's legalization and fusion passes by those of tvm_ipc."""
    names = [str(legalize_pass.info.name) for legalize_pass in passes]
    passes = [
        LegalizeOps() if name == _LEGALIZE else legalize_pass
        for name, legalize_pass in zip(names, passes, strict=True)
    ]
    fusion = [index for index, name in enumerate(names) if name in _FUSION]
    begin, end = min(fusion), max(fusion) + 1
    return [*passes[:begin], FuseSupported(passes[begin:end]), *passes[end:]]


def _memory_passes(
    target: tvm.target.Target,
) -> tuple[list[tvm.transform.Pass], list[tvm.transform.Pass], list[tvm.transform.Pass]]:
    """Return TVM's last passes in three lists.

    These are the passes before its memory plan, those between that plan and the lowering of
    allocations, and the rest.
    """
    passes = _for_target(target, "finalize_passes")
    names = [str(memory_pass.info.name) for memory_pass in passes]
    passes = [
        RewriteCUDAGraph() if name == _GRAPHS else memory_pass
        for name, memory_pass in zip(names, passes, strict=True)
    ]
    if _PLAN not in names or _LOWER not in names[names.index(_PLAN) :]:
        raise TransformError(
            f"get_pipeline: TVM's pipeline for {target.kind.name!r} has no {_PLAN} followed by "
            f"{_LOWER}, where the passes of tvm_ipc are inserted; "
            f"{arguments.listed('pass', names, len(names))}"
        )
    plan, lower = names.index(_PLAN), names.index(_LOWER)
    return passes[:plan], passes[plan + 1 : lower], passes[lower:]


def _check_meshes(mod: tvm.IRModule, world_size: int) -> bool:
    """Check the meshes; return whether functions contain functions, which the same walk finds."""
    has_local_functions = False
    for global_var, function in relax_functions(mod):
        meshes: dict[Mesh, None] = {}
        for _, value in walk(function):
            if type(value) is not relax.Call:
                has_local_functions = has_local_functions or type(value) is relax.Function
            elif value.op.same_as(_PLACE):
                meshes[mesh_of(value)] = None
        ranks = {rank for mesh in meshes for rank in mesh.ranks}
        if meshes and sorted(ranks) != list(range(world_size)):
            raise TransformError(
                f"get_pipeline: function {global_var.name_hint!r} places tensors on "
                f"{' and on '.join(map(str, meshes))}, but world_size is {world_size}; use "
                f"{'a mesh' if len(meshes) == 1 else 'meshes'} of the ranks "
                f"{arguments.ranks_below(world_size)}, or pass the world_size of the mesh"
            )
    return has_local_functions


def _check_workers_and_devices(
    mod: tvm.IRModule, target: tvm.target.Target, world_size: int, group_size: int
) -> None:
    for name, op, call in _bound_calls(mod):
        attrs = call.attrs
        if op == _HINT:
            _check_hint(name, tvm.device(int(attrs.device_type), int(attrs.index)), target)
        else:
            if op == COLLECTIVE:
                attrs = CollectiveAttrs.of(call)
                check_attributes(attrs)
            elif op in RAGGED_OPERATORS and int(attrs.workers) == 1:
                continue  # without communication
            in_group, workers = _workers(attrs)
            expected = group_size if in_group else world_size
            _check_workers(name, op, workers or expected, in_group, expected)
            if not isinstance(getattr(attrs, "team", ""), str):
                _check_ranks(name, op, attrs, world_size, mod[name].attrs)


def _check_hint(name: str, device: tvm.runtime.Device, target: tvm.target.Target) -> None:
    if (device.dlpack_device_type(), device.index) != (target.get_target_device_type(), 0):
        raise TransformError(
            f"get_pipeline: function {name!r} has a hint_on_device for {device}, but each worker "
            f"has only one device, of the target {target.kind.name!r}; remove the hint"
        )


def _check_workers(name: str, op: str, workers: int, in_group: bool, expected: int) -> None:
    if workers != expected:
        raise TransformError(
            f"get_pipeline: function {name!r} has a {op} over "
            f"{arguments.counted(workers, 'worker')}, but "
            f"{'a group' if in_group else 'the session'} has {expected}; build the module for "
            f"{expected}, or pass the world_size that it was built for"
        )


def _workers(attrs: Any) -> tuple[bool, int]:
    """Return whether a collective is over a group, and its number of workers, or 0 if unknown."""
    if not hasattr(attrs, "team"):
        return bool(getattr(attrs, "in_group", False)), int(attrs.num_workers)
    return attrs.team == "group", int(attrs.workers) if isinstance(attrs.team, str) else 0


def _check_ranks(name: str, op: str, attrs: Any, world_size: int, function_attrs: Any) -> None:
    kind = str(attrs.kind) if op == COLLECTIVE else op.rpartition(".")[2]
    ranks = {int(rank) for team in attrs.team for rank in team}
    if op == COLLECTIVE and attrs.root_rank is not None:
        ranks.add(attrs.root_rank)
    if RUN_BY in (function_attrs or {}) and ranks <= set(range(world_size)):
        without_team = sorted({int(rank) for rank in function_attrs[RUN_BY]} - ranks)
        if without_team:
            raise TransformError(
                f"get_pipeline: function {name!r} has a collective ({kind}) over "
                f"{_teams(attrs)}, but rank {without_team[0]} runs it too ({RUN_BY}); each rank "
                "that runs it must be in one team"
            )
    elif not ranks <= set(range(world_size)):
        raise TransformError(
            f"get_pipeline: function {name!r} has a collective ({kind}) over "
            f"{_teams(attrs)}, but world_size is {world_size}; a team consists of the ranks "
            f"{arguments.ranks_below(world_size)}"
        )
    elif op != COLLECTIVE and ranks != set(range(world_size)):
        raise TransformError(
            f"get_pipeline: function {name!r} has a collective ({kind}) over "
            f"{_teams(attrs)}, but world_size is {world_size}; each of the ranks "
            f"{arguments.ranks_below(world_size)} must be in one team"
        )


def _teams(attrs: Any) -> str:
    teams = [list(team) for team in attrs.team]
    return f"the team {teams[0]}" if len(teams) == 1 else f"the teams {teams}"


def _bound_calls(mod: tvm.IRModule) -> Iterator[tuple[str, str, relax.Call]]:
    """Yield function name, operator and call of calls bound to workers or a device."""
    # Comparing the addresses of operators is faster than comparing their names.
    names = {tvm.ir.Op.get(name).__chandle__(): name for name in _BOUND_OPS}
    for global_var, function in mod.functions_items():
        for call in calls(function) if isinstance(function, relax.Function) else ():
            name = names.get(call.op.__chandle__())
            if name is not None:
                yield str(global_var.name_hint), name, call
