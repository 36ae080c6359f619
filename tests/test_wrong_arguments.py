# SPDX-License-Identifier: Apache-2.0
"""Every argument that a user can pass is refused in words where it is wrong.

The public functions and their parameters are found by inspection: one without a line here fails.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.runtime import disco
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc import comm, cpu, gpu, models, spmd, transform
from tvm_ipc.arguments import quote
from tvm_ipc.models import weights
from tvm_ipc.models.hf.compile_cache import CompiledModel
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.packed_functions import KINDS, Kind
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef
from tvm_ipc.spmd import Parallelized, ShardSpec


@I.ir_module
class Nothing:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        return x


class Everything:
    """A wrong value for any parameter; its text is what a message must show."""

    def __repr__(self) -> str:
        return "<everything>"


ANYTHING = Everything()
NO_WORDS = re.compile(r"kInvalid|not supported between|is not iterable|object has no attribute")
COUNTS = ["2", None, 2.5, True, np.True_, 0, -1, math.nan, [2], np.array(2), ANYTHING]
FLAGS = ["yes", None, 1, 0, 0.0, [], ANYTHING]
NAMES = [3, None, "", b"name", ["name"], True, ANYTHING]
#: Wrong values of parameters by their types, for names without a line of their own below.
BY_TYPE = {"bool": FLAGS, "int": COUNTS, "str": NAMES}
ARRAYS = ["text", None, object(), [[1], [1, 2]], 1j, {"a": 1}, np.array(["text"]), ANYTHING]
ARRAYS += [np.ones(2, np.longdouble)]
REFERENCES = [3, None, "text", [1, 2], np.ones(2), tvm.runtime.tensor(np.ones(2)), ANYTHING]
TARGETS = [one for one in REFERENCES if one is not None]
RANKS = ["1", None, 1.0, True, -1, 2, 10**30, np.array(1), ANYTHING]
DEVICES = [3, "gpux", np.ones(2), ["cpu"], ANYTHING]
HOSTS = [
    1,
    0,
    -2,
    True,
    2.0,
    "ab",
    [],
    ["a"],
    ["a", "a"],
    ["a", ""],
    ["a", 3],
    ["-x", "b"],
    ["a", "b:22"],
    ["a", "b/c"],
    ["a", "b\x7f"],
    {"a": 1, "b": 2},
    {"a", "b"},
    {"a": 1, "b": 2}.keys(),
    ANYTHING,
]
SIZES = [1.5e9, 0, -1, True, "lots", "1.5G", "", [1], 1 << 63, math.inf, ANYTHING]
SECONDS = ["x", 0, -1, math.nan, math.inf, True, 10**400, [1], 1j, np.ones(1), ANYTHING]
AMOUNTS = ["x", None, -1, math.nan, math.inf, True, 10**400, [1], 1j, np.ones(1), ANYTHING]
IDS = [3, "01", [0], [0, 1, 2], [0, -1], [0, "1"], [0, 1.0], [0, True], {0: 0, 1: 1}, ANYTHING]
IDS += [[0, 1 << 40], [1 << 70, 0]]
TEAMS = [3, None, "01", [], [2], [-1], [0, 0], [0, "1"], [0, 1.0], [0, True], {0: 0}, {0, 1}]
TEAMS += [[1 << 70], ANYTHING]
TEAM_OBJECTS = [3, True, "01", [0, 1], (0, 1), {0, 1}, ANYTHING]
PARTS = [3, "ab", [], [1, 2], [[1, 2]], [[1, 2], [3]], [[1, -1], [1, 1]], {0: [1]}, ANYTHING]
PARTS += [[[1, 2.5], [1, 1]], [[1 << 63, 1], [1, 1]], np.ones((2, 3), int)]
COPIES = ["1", None, 1.0, True, -1, 1 << 31, [0], ANYTHING]
SHAPES = [3, None, "34", (-1,), (2.5,), ("3",), (True,), {3}, (2, None), ANYTHING]
MODULES = [3, None, "module", max, R.Tensor, ANYTHING]
PATHS = [3, None, "", b"model.so", "a\0b", "/etc/passwd", "/no/such.so", Nothing, max]
PATHS += [ANYTHING]


@dataclass
class Call:
    """How to call something with right arguments, and what is wrong for each of them."""

    function: Callable[..., Any]
    right: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, list[Any]] = field(default_factory=dict)
    #: How messages name a parameter, where that is not its name.
    named: dict[str, str] = field(default_factory=dict)
    #: Parameters that take anything, or are not for users, with the reason.
    free: dict[str, str] = field(default_factory=dict)


def language_model() -> models.Model:
    """A model with 67 tokens, on no workers."""
    model = object.__new__(models.Model)
    model.folder = ModelFolder(Path(), {"max_position_embeddings": 64})
    model.compiled = CompiledModel(Path(), {}, (), 67, "float32", (), {})
    return model


def batch_of_one() -> models.Batch:
    """A batch with room for one request."""
    return models.Batch(None, 1, language_model()._check_prompt, lambda: None)  # type: ignore[arg-type]


def collective_call(kind: Kind, session: Any, x: DRef) -> Call:
    """The session method of a kind, with the wrong values of each parameter that it has."""
    source, target = kind.method_operands
    wrong = {
        source: REFERENCES,
        target: REFERENCES if kind.source_on_root else TARGETS,
        "op": [*NAMES, "median", "SUM"],
        "root": RANKS,
        "in_group": FLAGS,
        "team": TEAM_OBJECTS,
        "parts": PARTS,
    }
    method = getattr(session, kind.method)
    parameters = inspect.signature(method).parameters
    return Call(method, {source: x, target: x}, {name: wrong[name] for name in parameters})


def session_calls(session: Any) -> dict[str, Call]:
    x = session.put(np.ones(2))
    host = tvm.runtime.tensor(np.ones(2))
    function = session.get_global_func("runtime.disco.worker_rank")
    whole = ShardSpec("w", "w", (4,), "float32", comm.Mesh({"tp": 1}), (comm.Replica(),))
    in_group = {"in_group": FLAGS, "team": TEAM_OBJECTS}
    anything_else = {
        "self": "the object itself",
        "kwargs": "of `of`",
        "args": "see test_session_errors.py, test_argument_that_cannot_be_sent",
    }
    calls = {
        "Session": Call(
            tvm_ipc.Session,
            {"threads": True},
            {
                "num_workers": [*COUNTS, 65],
                "num_groups": [*COUNTS, 3],
                "threads": FLAGS,
                "compiler": FLAGS,
                "timeout": SECONDS,
                "arena_limit": SIZES,
                "device": [*NAMES, "gpu", "CPU", tvm.cpu()],
                "hosts": [*HOSTS, 3],  # nodes for two workers
                "order": ["random", "", "FLAT", None, 3],
                "device_ids": IDS,
                "backend": [*NAMES, "gloo"],
            },
        ),
        "init_ccl": Call(
            tvm_ipc.init_ccl,
            {"session": disco.ThreadedSession(2)},
            {
                "session": [3, None, "session", tvm_ipc.Session, ANYTHING],
                "ccl": [*NAMES, "gloo"],
                "device_ids": IDS,
                "device": [*one_less(NAMES, None), "gpu"],
            },
        ),
        "emulate_link": Call(
            session.emulate_link,
            {},
            {"latency": AMOUNTS, "bandwidth": AMOUNTS, "jitter": AMOUNTS},
        ),
        "load_weights": Call(
            tvm_ipc.load_weights,
            {"session": session, "source": {"w": np.ones(4)}, "shards": {"w": whole}},
            {
                "session": [3, None, "session", tvm_ipc.Session, disco.ThreadedSession, ANYTHING],
                "source": [3, None, "", b"file", [1], max, ANYTHING],
                "shards": [3, None, "w", ["w"], ANYTHING],
                "names": [3, "w", ["w"], ANYTHING],
                "ignore": [3, None, "w", [3], [""], ANYTHING],
                "progress": FLAGS,
            },
        ),
        "hf.load": Call(
            models.load,
            {"folder": "no folder", "session": session},
            {
                "folder": [3, None, "", b"model", "a\0b", ["model"], ANYTHING],
                "session": [3, None, "session", tvm_ipc.Session, disco.ThreadedSession, ANYTHING],
                "plan": [3, "", "best", b"auto", ["q_proj"], max, ANYTHING],
                "dtype": [3, "", "int8", "float64", ["float32"], np.float32, ANYTHING],
                "reproducible": FLAGS,
                "progress": [3, None, "yes", ANYTHING],
            },
        ),
        "generate": Call(
            language_model().generate,
            {"prompt": [1, 2]},
            {
                "prompt": [
                    *(3, None, b"12", [], [67], [-1], [1.0], [True], {1}, ANYTHING),
                    *([[1], []], [[1], 2], [[1], [67]], [[1], b"12"], [[1]] * 17, [[[1]]]),
                ],
                **GENERATION,
                "cancelled": [3, True, "yes", ANYTHING],
            },
        ),
        "batch": Call(language_model().batch, {}, {"size": [*COUNTS, 17]}),
        "add": Call(
            batch_of_one().add,
            {"prompt": [1, 2]},
            {
                "prompt": [3, None, b"12", [], [67], [-1], [1.0], [True], {1}, [[1]], ANYTHING],
                **GENERATION,
            },
        ),
        "call_packed": Call(session.call_packed, {"func": function}, {"func": REFERENCES}),
        "get": Call(session.get, {"reference": x}, {"reference": REFERENCES, "rank": RANKS}),
        "tuple": Call(
            session.tuple,
            {"fields": [x]},
            {"fields": [3, None, "ab", x, np.ones(2), {3}, [max], [x, [{3}]], ANYTHING]},
        ),
        "put": Call(session.put, {"array": [1, 2]}, {"array": [*ARRAYS, x, [x, x]]}),
        "empty": Call(
            session.empty,
            {"shape": (2,), "dtype": "float32"},
            {
                "shape": SHAPES,
                "dtype": [3, None, "float3", "floaty", "", Nothing, str, ANYTHING],
                "device": DEVICES,
                "worker0_only": FLAGS,
                "in_group": FLAGS,
            },
        ),
        "broadcast": Call(
            session.broadcast, {"src": [1, 2]}, {"src": [*ARRAYS, x], "dst": TARGETS, **in_group}
        ),
        "scatter": Call(
            session.scatter,
            {"src": [1, 2]},
            {"src": [*ARRAYS, x, [1], np.ones((3, 2)), 5], "dst": TARGETS, **in_group},
        ),
        "copy_to_worker_0": Call(
            session.copy_to_worker_0,
            {"host_array": [1, 2]},
            {"host_array": [*ARRAYS, x], "remote_array": TARGETS},
        ),
        "copy_from_worker_0": Call(
            session.copy_from_worker_0,
            {"host_array": host, "remote_array": x},
            {"host_array": [*ARRAYS, np.ones(2), x], "remote_array": REFERENCES},
        ),
        "team": Call(session.team, {"ranks": [0, 1]}, {"ranks": TEAMS, "copy": COPIES}),
        **{
            kind.method: collective_call(kind, session, x)
            for kind in KINDS.values()
            if kind.method_doc
        },
        "get_global_func": Call(session.get_global_func, {}, {"name": NAMES}),
        "import_python_module": Call(session.import_python_module, {}, {"module_name": NAMES}),
        "load_vm_module": Call(
            session.load_vm_module, {"path": "/no/such.so"}, {"path": PATHS, "device": DEVICES}
        ),
        "init_ccl of a session": Call(
            session.init_ccl,
            {},
            {"ccl": [*NAMES, "gloo"]},
            free={"device_ids": "each is one of many"},
        ),
        "debug_get_from_remote": Call(x.debug_get_from_remote, {}, {"worker_id": RANKS}),
        "debug_copy_from": Call(
            x.debug_copy_from,
            {"worker_id": 0, "value": [1, 2]},
            {"worker_id": RANKS, "value": [*ARRAYS, x]},
        ),
        "__getitem__": Call(lambda name: DModule.__getitem__(x, name), {}, {"name": NAMES}),
        "__call__": Call(function),
        **{
            name: Call(getattr(session, name))
            for name in ("sync", "close", "shutdown", "sync_worker_0")
        },
    }
    for call in calls.values():
        call.free.update(anything_else)
    return calls


def compiler_calls() -> dict[str, Call]:
    registry = transform.ScopeRegistry()
    optional_names = one_less(NAMES, None)
    amounts = one_less(COUNTS, None, 0)
    workers = [*COUNTS, 65]
    user = "what a compiler returns is checked when it returns it"
    result = "a result, which users only read"
    by_name: dict[str, list[Any]] = {
        "alignment": [*COUNTS, 3, 48, 1 << 70],
        "allreduce_strategy": ["fastest", "", None, 4, -1, 1.0, True, [1], ANYTHING],
        "axes": [*NAMES, "n k", "n k -> n k -> n", "n n -> n", "n-k -> n", "n -> k"],
        "barrier_budget": [*amounts, 1 << 80],
        "cache": [3, "cache", {}, transform.FreshGlobalSymbols, ANYTHING],
        "caches": [3, None, "x", ["x"], [3], ANYTHING],
        "calibration": [3, "file.json", ANYTHING],
        "chunks": COUNTS,
        "compile_fn": [3, None, "function", [max], ANYTHING],
        "compile_one": [3, None, "function", [max], ANYTHING],
        "compiler": optional_names,
        "customize_legalize_map": [3, "relax.add", {"relax.nothing": max}, ANYTHING],
        "dump": ["/etc/passwd", "/etc/passwd/below", "", 3, b"folder", "a\0b", ANYTHING],
        "functions": ["main", 3, [3], [""], ANYTHING],
        "lanes": [0, 3, 128, "8", 2.0, True, ANYTHING],
        "mesh": [*one_less(COUNTS, None), None, 65, "tp"],
        "min_work": amounts,
        "mod": MODULES,
        "name": NAMES,
        "names": [3, "x", ["x"], ANYTHING],
        "num_groups": COUNTS,
        "operand": ["0", None, 1.0, True, -1, [0], ANYTHING],
        "options": [3, "options", ["a"], ANYTHING],
        "otherwise": [3, "cache", {}, transform.FreshGlobalSymbols, ANYTHING],
        "overlap": ["file.json", 1.5, "2", True, -1, 65, [], ANYTHING],
        "passes": [3, None, "passes", [3], [cpu.OffloadBLAS], ANYTHING],
        "plan": [3, None, "colwise", ["x"], ANYTHING],
        "prefix": optional_names,
        "reduced": [3, "k", {"n": "sum"}, {"k": "mean"}, {"q": "sum"}, ANYTHING],
        "registry": [3, "registry", {}, transform.ScopeRegistry, ANYTHING],
        "schedule": [3, "pass", tvm.transform.Pass, max, [], ANYTHING],
        "scopes": ["global", 3, [3], [""], [None], ANYTHING],
        "sites": [3, "x", ["x"], {"x": -1}, {"x": "2"}, {3: 2}, ANYTHING],
        "skip_ops": [3, "relax.add", ["relax.nothing"], [3], [""], ANYTHING],
        "stages": [3, "x", ["x"], [3], ANYTHING],
        "streams": COUNTS,
        "symbols": [3, None, "f", ["f"], {3: "f"}, {"f": 3}, {"f": ""}],
        "target": ["nonsense", "llvm -mcpu=x", "", "vulkan", None, 3, ["llvm"], {}, ANYTHING],
        "whole": [3, None, ["n"], "q", ANYTHING],
        "world_size": one_less(workers, None),
        "writes": [3, "01", ["0"], [1.0], [True], ANYTHING],
    }
    calls = {
        "PipelineAllGather": Call(transform.PipelineAllGather, {"chunks": 2}),
        "LowerPlacements": Call(spmd.LowerPlacements, {}, {"streams": one_less(COUNTS, None)}),
        "get_pipeline": Call(
            tvm_ipc.get_pipeline,
            {"target": "llvm", "world_size": 2},
            {
                "world_size": workers,
                "num_groups": [*COUNTS, 3],
                "blas": one_less(FLAGS, None),
                "fuse_attention": one_less(FLAGS, None),
                "fuse_epilogue": one_less(FLAGS, None),
            },
        ),
        "IPCAllReduceRewrite": Call(
            transform.IPCAllReduceRewrite,
            {"allreduce_strategy": 0},
            {"num_groups": one_less(COUNTS, None)},
        ),
        "FuseAllReduceEpilogue": Call(
            transform.FuseAllReduceEpilogue, {}, {"num_groups": one_less(COUNTS, None)}
        ),
        "MarkCompilerFunctionsAsExtern": Call(
            transform.MarkCompilerFunctionsAsExtern, {}, {"compiler": one_less(NAMES, None)}
        ),
        "OverlapCommunication": Call(
            transform.OverlapCommunication,
            {"chunks": 2},
            {"chunks": [-1, 65, 1.5, "2", True, ANYTHING]},
        ),
        "parallelize": Call(
            tvm_ipc.parallelize, {"mod": Nothing, "plan": {"x": "replicated"}, "mesh": 2}
        ),
        "declare_rule": Call(
            spmd.declare_rule,
            {"name": "tests.declared", "axes": "n k, k m -> n m", "reduced": {"k": "sum"}},
        ),
        "FixSumOrder": Call(cpu.FixSumOrder, {"world_size": 2}, {"world_size": workers}),
        "RequireWorkers": Call(
            transform.RequireWorkers,
            {"world_size": 2},
            {"world_size": workers, "num_groups": [*COUNTS, 3]},
        ),
        "RunModuleCodegen": Call(
            transform.RunModuleCodegen,
            {"compiler": "mine", "compile_fn": max},
            {"compiler": NAMES},
        ),
        "verify_cross_rank_safety": Call(transform.verify_cross_rank_safety, {"mod": Nothing}),
        "plan_memory": Call(transform.plan_memory, {"mod": Nothing}),
        "compile_blas": Call(
            cpu.compile_blas,
            {"_options": {}},
            {"functions": MODULES},
            free={"_options": "not used"},
        ),
        "register_scope": Call(
            registry.register_scope,
            {"scope": "mine"},
            {"scope": [*NAMES, "two words"]},
        ),
        "demand_scope": Call(
            registry.demand_scope,
            {"name": "f", "scope": "ipc_memory"},
            {"name": [*NAMES, "two words", "f "], "scope": [*NAMES, "nowhere"]},
        ),
        "MappedGlobalSymbols": Call(transform.MappedGlobalSymbols, {"symbols": {}}),
        "Compiled": Call(
            transform.Compiled,
            free=dict.fromkeys(inspect.signature(transform.Compiled).parameters, user),
        ),
        "CompileError": Call(transform.CompileError, free={"function": user, "problem": user}),
        "Hazard": Call(
            transform.Hazard,
            free=dict.fromkeys(inspect.signature(transform.Hazard).parameters, result),
        ),
        "Report": Call(transform.Report, free={"decisions": result, "plans": result}),
        "ScopeRegistry": Call(
            transform.ScopeRegistry,
            free=dict.fromkeys(("scopes", "added", "written"), "filled by its methods"),
        ),
    }
    for name, function in public_compiler():
        call = calls.setdefault(name, Call(function))
        call.named["allreduce_strategy"] = "all-reduce strategy"
        add_wrong_values(call, by_name)
    return calls


def add_wrong_values(call: Call, by_name: dict[str, list[Any]]) -> None:
    """Add the wrong values that follow from the names and types of parameters."""
    for name, parameter in inspect.signature(call.function).parameters.items():
        of_type = BY_TYPE.get(getattr(parameter.annotation, "__name__", parameter.annotation))
        values = of_type if of_type is FLAGS else by_name.get(name, of_type)
        if values is not None and name not in call.free:
            call.wrong.setdefault(name, values)


def one_less(values: list[Any], *without: Any) -> list[Any]:
    """The values but for those that are meant, such as None and 0; True is no 1."""
    return [v for v in values if not any(v is w for w in without)]


#: Wrong options of a generation.
GENERATION = {
    "max_new_tokens": COUNTS,
    "temperature": AMOUNTS,
    "top_k": one_less(COUNTS, None),
    "top_p": [*AMOUNTS, 0, 1.5],
    "seed": ["1", 1.0, True, -1, [0], ANYTHING],
    "stop": [3, "1", b"1", ["1"], [1.0], [-1], {1: 1}, ANYTHING],
}


def communication_calls() -> dict[str, Call]:
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    shown = relax.Var("shown", relax.AnyType())
    axes = ["0", None, 1.0, True, -1, [0], ANYTHING]
    teams = [3, None, "all", [], [[]], [0, 0], [[0], [1, 2]], [-1], ["0"], [0.0], {0: 1}, ANYTHING]
    extents = ["4", 4.0, True, -1, [4], x, ANYTHING]
    wrong: dict[str, list[Any]] = {
        "x": [3, None, "x", np.ones(2), ANYTHING],
        "reduction": [3, None, "", "mean", ["sum"], ANYTHING],
        "root": ["0", None, 0.0, True, -1, [0], x, ANYTHING],
        "root_rank": [*one_less(axes, None), 64],
        "scale": ["1", True, math.nan, math.inf, [1.0], x, ANYTHING],
        "axis": axes,
        "split_axis": axes,
        "concat_axis": axes,
        "team": teams,
        "workers": one_less([*COUNTS, 65], None),
        "uneven": FLAGS,
        "extent": extents,
        "pairs": [3, None, "01", [0], [[0]], [["0", 1]], [[0, 5]], [[0.0, 1]], {0: 1}, ANYTHING],
        "source": axes,
        "target": axes,
        "backend": [*NAMES, "gloo"],
        "mesh": [3, None, "tp", ["tp"], [["tp"]], [["tp", 1, 2]], [[1, "tp"]], ANYTHING],
        "placements": [3, None, "R", [], ["R", "R"], {"dp": "R"}, ANYTHING],
        "ranks": ["01", 3, [0], [0, 0], [0, 64], ["0", 1], {0: 1}, ANYTHING],
        "stream": one_less(axes, None),
        "force": FLAGS,
        "inserted": FLAGS,
        "collective": [3, None, "x", x, comm.take_shard(x, workers=2), ANYTHING],
        "out": [3, None, "x", np.ones(2), ANYTHING],
        "request": [3, None, "work", ANYTHING],
        "tensor": [3, None, "x", relax.Var("s", relax.ShapeType(ndim=1)), ANYTHING],
        "start": ["0", None, 1.0, True, -1, [0], x, ANYTHING],
        "exposed": [3, None, "shown", [3], {3}, ANYTHING],
        "shift": ["1", None, 1.0, True, [0], x, ANYTHING],
        "stride": ["0", 1.0, True, -1, [0], x, ANYTHING],
        "dtype": [3, None, "", "floot32", ["float32"], ANYTHING],
        "slices": [3, None, "x", x, [], [3], {3: x}, ANYTHING],
        "positions": [
            3,
            None,
            "012",
            [0],
            [[0]],
            [["0", 1, 2]],
            [[0, -1, 2]],
            [],
            {0: 1},
            ANYTHING,
        ],
        "shape": [3, None, "34", (-1,), (2.5,), ("3",), (True,), {3}, (2, None), ANYTHING],
        "capacity": one_less(extents, None),
        "num_experts": COUNTS,
        "activation": [*NAMES, "tanh"],
    }
    tensors = ("counts", "experts", "rows", "received", "weights", "row_experts", "weight")
    wrong |= dict.fromkeys((*tensors, "gate_up", "down"), wrong["x"])
    ids = relax.Var("ids", relax.TensorType((4, 2), "int64"))
    stack = relax.Var("stack", relax.TensorType((3, 4, 4), "float32"))
    mesh = {"mesh": [["tp", 2]], "placements": ["R"]}
    right = {
        "permute": {"pairs": [[0, 1]]},
        "send_recv": {"source": 0, "target": 1},
        "place": mesh,
        "start": {"collective": comm.allreduce(x), "out": x},
        "wait": {"request": x},
        "view": {"tensor": x, "start": 0, "shape": (2,)},
        "expose": {"tensor": x},
        "peer_view": {"exposed": shown, "shift": 1, "shape": (2,), "dtype": "float32"},
        "release": {"exposed": shown},
        "own_slice": {"tensor": x, "shift": 1, "shape": (2,)},
        "reduce_slices": {"slices": [x, x], "out": x},
        "assemble": {"slices": [x], "positions": [(0, 4, 0)], "out": x},
        "ragged_all_to_all": {"counts": ids, "capacity": 8},
        "moe_dispatch": {"experts": ids, "num_experts": 4},
        "moe_combine": {"rows": x, "received": ids, "positions": ids, "weights": x},
        "expert_matmul": {"rows": x, "row_experts": ids, "weight": stack},
        "moe": {"experts": ids, "weights": x, "gate_up": stack, "down": stack},
    }
    calls = {}
    for name, function in public_communication():
        parameters = inspect.signature(function).parameters
        calls[name] = Call(
            function,
            {
                **({"x": x} if "x" in parameters else {}),
                **({"workers": 2} if "workers" in parameters else {}),
                **right.get(name, {}),
            },
            {parameter: wrong[parameter] for parameter in parameters if parameter in wrong},
        )
    return calls


def parallel_calls() -> dict[str, Call]:
    """What `parallelize` returns, and names of weights that are joined."""
    mesh = comm.Mesh({"tp": 2})
    cut = ShardSpec("w", "w", (4, 2), "float32", mesh, (comm.Shard(0),))
    module = tvm.IRModule()
    made = Parallelized(module, module, mesh, {"w": cut}, ())
    joined = {"names": [3, None, "ab", [], {"a": 1}, ANYTHING], "axis": ["0", None, 1.5, -1]}
    shapes = one_less([*SHAPES, (4,), (2, 4)], None)
    return {
        "Parallelized.bytes_of_rank": Call(made.bytes_of_rank, {}, {"rank": RANKS}),
        "ShardSpec.spans": Call(cut.spans, {"rank": 0}, {"rank": RANKS, "shape": shapes}),
        "ShardSpec.shard": Call(
            cut.shard,
            {"whole": np.ones((4, 2)), "rank": 0},
            {"rank": RANKS},
            named={"rank": "spans: rank"},
            free={"whole": "an array, whose shape is compared as that of `spans` is"},
        ),
        "stack": Call(weights.stack, {"names": ["a"]}, joined),
        "concat": Call(weights.concat, {"names": ["a"]}, joined),
    }


def public_parallel() -> Iterator[tuple[str, Any]]:
    for kind, one in ((Parallelized, "Parallelized"), (ShardSpec, "ShardSpec")):
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{one}.{name}", function
    for name in weights.__all__:
        yield name, getattr(weights, name)


def public_communication() -> Iterator[tuple[str, Any]]:
    """The functions of `tvm_ipc.comm` but for the form in which programs are printed."""
    for name in comm.__all__:
        if inspect.isfunction(getattr(comm, name)) and name != "collective":
            yield name, getattr(comm, name)


def public_compiler() -> Iterator[tuple[str, Any]]:
    """Everything that a user may call of `get_pipeline` and the passes."""
    yield "get_pipeline", tvm_ipc.get_pipeline
    yield "parallelize", tvm_ipc.parallelize
    yield "declare_rule", spmd.declare_rule
    yield "LowerPlacements", spmd.LowerPlacements
    for module in (transform, cpu, gpu):
        for name in module.__all__:
            if callable(getattr(module, name)):
                yield name, getattr(module, name)


def public_session() -> Iterator[tuple[str, Any]]:
    """Everything that a user may call of sessions and references, by its name here."""
    yield "Session", tvm_ipc.Session
    yield "init_ccl", tvm_ipc.init_ccl
    yield "load_weights", tvm_ipc.load_weights
    yield "hf.load", models.load
    yield "generate", language_model().generate
    yield "batch", language_model().batch
    yield "add", batch_of_one().add
    ffi = {"id_", "is_", "same_as"}  # of every object of tvm_ffi
    for kind in (tvm_ipc.Session, DRef, DPackedFunc, DModule):
        for name, value in inspect.getmembers(kind, callable):
            if name in ("__getitem__", "__call__") and kind is not tvm_ipc.Session:
                yield name, value
            elif not name.startswith("_") and name not in {*ffi, "of"}:
                yield ("init_ccl of a session" if name == "init_ccl" else name), value


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with tvm_ipc.Session(2, threads=True) as opened:
        yield opened


def complaint(call: Call, parameter: str, value: Any) -> str:
    """What is wrong with how a wrong value is refused; nothing is."""
    try:
        call.function(**{**call.right, parameter: value})
    except (TypeError, ValueError, FileNotFoundError) as error:
        message = str(error)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    else:
        return "is accepted"
    if call.named.get(parameter, parameter) not in message:
        return f"is not named: {message}"
    shown = (quote(value), type(value).__name__, "shape is", "has shape")
    if not any(what in message for what in shown):
        return f"is not shown: {message}"
    if len(message) > 600 or NO_WORDS.search(message):
        return f"is not refused in words: {message}"
    return ""


def wrong_values(calls: dict[str, Call]) -> Iterator[tuple[Call, str, Any]]:
    for call in calls.values():
        for parameter, values in call.wrong.items():
            for value in values:
                yield call, parameter, value


def complaints(calls: dict[str, Call]) -> list[str]:
    return [
        f"{parameter}={quote(value)} {problem}"
        for call, parameter, value in wrong_values(calls)
        if (problem := complaint(call, parameter, value))
    ]


def without_a_line(calls: dict[str, Call], public: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """What is public and has no wrong values here."""
    for name, function in public:
        if name not in calls:
            yield name
            continue
        call = calls[name]
        for parameter in inspect.signature(function).parameters:
            if parameter not in call.wrong and parameter not in call.free:
                yield f"{name}: {parameter}"


def test_wrong_arguments_of_sessions(session: Any) -> None:
    assert complaints(session_calls(session)) == []
    assert session.usable
    session.sync()  # nothing wrong was sent


def test_every_argument_of_sessions_has_wrong_values(session: Any) -> None:
    assert list(without_a_line(session_calls(session), public_session())) == []


def test_wrong_arguments_of_the_compiler() -> None:
    assert complaints(compiler_calls()) == []


def test_every_argument_of_the_compiler_has_wrong_values() -> None:
    assert list(without_a_line(compiler_calls(), public_compiler())) == []


def test_wrong_arguments_of_what_is_parallelized() -> None:
    assert complaints(parallel_calls()) == []


def test_every_argument_of_what_is_parallelized_has_wrong_values() -> None:
    calls = parallel_calls()
    for call in calls.values():
        call.free["self"] = "the object itself"
    assert list(without_a_line(calls, public_parallel())) == []


def test_wrong_arguments_of_communication() -> None:
    assert complaints(communication_calls()) == []


def test_every_argument_of_communication_has_wrong_values() -> None:
    assert list(without_a_line(communication_calls(), public_communication())) == []


def test_everything_public_is_looked_at() -> None:
    names = {name for name, _ in [*public_session(), *public_compiler()]}
    assert names >= {"Session", "get", "get_pipeline", "OffloadBLAS", "demand_scope"}
    modules = {
        "Calibration": "read from files: see test_calibration.py",
        "CurrentRank": "takes nothing",
        "Team": "what session.team returns",
        "comm": "",
        "cpu": "",
        "errors": "raised, not made",
        "gpu": "",
        "models": "looked at with the session",
        "packed_functions": "facts",
        "runtime_only": "takes nothing",
        "spmd": "",
        "transform": "",
        "__version__": "",
    }
    assert set(tvm_ipc.__all__) <= names | modules.keys()


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.int16(2)], ids=repr)
def test_numbers_of_numpy_are_numbers(number: Any, session: Any) -> None:
    options = {"timeout": np.float32(60), "arena_limit": np.int64(1 << 30), "threads": np.True_}
    with tvm_ipc.Session(number, num_groups=number, device_ids=np.arange(2), **options) as opened:
        x = opened.empty((number, np.int32(3)), np.float32, "cpu")
        assert opened.get(x, number - 1).shape == (2, 3)


def test_numbers_of_numpy_are_numbers_for_the_compiler() -> None:
    one, two = np.int64(1), np.uint8(2)
    tvm_ipc.get_pipeline("llvm", two, one, num_groups=two, barrier_budget=two, blas=np.False_)
    assert transform.IPCAllReduceRewrite(one).allreduce_strategy == 1
    assert type(transform.StaticPlanBlockMemory(alignment=two).alignment) is int
    assert type(cpu.OffloadBLAS(two).min_work) is int
    assert type(transform.RequireWorkers(two, two).world_size) is int
