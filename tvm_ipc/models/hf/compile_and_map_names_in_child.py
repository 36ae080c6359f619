# SPDX-License-Identifier: Apache-2.0
"""The steps that need PyTorch, transformers or TVM's compiler, for a child process.

`tvm_ipc.models.hf.calls_in_child` calls these functions in the child. Their requests and results
are JSON values.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tvm_ipc import arguments, this_machine
from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.models.hf.compile_cache import FACTS, LIBRARY, KvCacheSpec, digest
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.optional_deps import require
from tvm_ipc.models.hf.weight_to_stored_name_cache import copy_names, name_to_json, save_names
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint
from tvm_ipc.runtime.subprocess_call import is_child


def compile_model(request: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Compile a model into the private folder `request["work"]`."""
    import tvm

    from tvm_ipc.cpu.host_cpu_target import cpu_target
    from tvm_ipc.models.hf.batch_kv_cache_update import update_batch_in_place
    from tvm_ipc.models.hf.imported_decoder import DECODE_BATCH
    from tvm_ipc.models.hf.inplace_kv_cache_update import update_in_place
    from tvm_ipc.models.hf.shard_imported_model import kv_cache_specs, shard
    from tvm_ipc.pipeline import get_pipeline

    work, workers = Path(request["work"]), request["workers"]
    reproducible = request["reproducible"]
    decoder = _import(request, progress)
    progress(f"sharding the model for {arguments.counted(workers, 'worker')}")
    parallel = shard(decoder, workers, request["plan"], reproducible=reproducible)
    batch_of = request["batch_of"]
    if batch_of is None:
        module = update_in_place(parallel.module, len(decoder.caches))
    else:
        if _placements(parallel) != batch_of["placements"]:  # as a search for a plan may find
            plan = _as_plan(batch_of["placements"])
            parallel = shard(decoder, workers, plan, reproducible=reproducible)
        _check_like(
            batch_of, _placements(parallel), _cache_fields(kv_cache_specs(parallel, decoder))
        )
        module = update_batch_in_place(parallel.module, DECODE_BATCH, len(decoder.caches))
    target = cpu_target(reproducible=reproducible)
    pipeline = get_pipeline(target, workers, reproducible=reproducible)
    with tvm.transform.PassContext(instruments=[_phase_names(progress)]):
        executable = tvm.compile(module, target, relax_pipeline=pipeline)
    progress("writing the library")
    library = work / LIBRARY
    executable.export_library(str(library))
    caches = _cache_fields(kv_cache_specs(parallel, decoder))
    weights = [spec for spec in parallel.shards.values() if not spec.is_input]
    facts = {
        "vocabulary": decoder.vocabulary,
        "dtype": request["dtype"],
        "ignored": list(decoder.ignored),
        "collectives": dict(parallel.collectives),
        "notes": list(parallel.notes),
        "caches": caches,
        "weights": [
            [w.name, w.parameter, list(w.shape), w.dtype, list(map(str, w.placements))]
            for w in weights
        ],
        "library": digest(library),
    }
    (work / FACTS).write_text(json.dumps(facts))


def _import(request: dict[str, Any], progress: Callable[[str], None]) -> Any:
    """Return the imported model, from the cache if that has it."""
    from tvm_ipc.models.hf.imported_decoder import read_decoder, write_decoder
    from tvm_ipc.models.hf.user_sharding_plan import shards_experts

    work, workers, entry = Path(request["work"]), request["workers"], Path(request["imported"])
    folder = ModelFolder(Path(request["path"]), request["config"])
    decoder = read_decoder(entry, workers)
    if decoder is not None:
        with contextlib.suppress(IPCError):
            copy_names(entry, work, sorted(read_checkpoint(folder.path)))
        return decoder
    progress("importing PyTorch and transformers")
    require("to compile a model")
    from tvm_ipc.models.hf import read_config_and_tokenizer, torch_import

    model = torch_import.build(read_config_and_tokenizer.configuration(folder), request["dtype"])
    decoder = torch_import.import_decoder(
        model,
        workers,
        shard_experts=shards_experts(request["plan"]),
        batch=request["batch_of"] is not None,
        progress=progress,
        side_by_side=is_child()
        and threading.active_count() == 1
        and this_machine.available_cores() > 1,
    )
    write_decoder(entry, workers, decoder)
    # Errors in the checkpoint are raised later, when the weights are loaded.
    with contextlib.suppress(IPCError):
        stored = sorted(read_checkpoint(folder.path))
        stored_names = _map_names(model, stored, decoder.names.values())
        save_names(work, stored, stored_names)
        save_names(entry, stored, stored_names)
    return decoder


def _phase_names(progress: Callable[[str], None]) -> Any:
    """Return an instrument that reports the phases of the pipeline."""
    from tvm.ir.instrument import pass_instrument

    @pass_instrument
    class PhaseNames:
        def run_before_pass(self, _mod: Any, info: Any) -> None:
            prefix, _, phase = str(info.name).rpartition(".")
            if prefix == "tvm_ipc" and phase != "pipeline":
                progress(f"compiling: {phase}")

    return PhaseNames()


def _placements(parallel: Any) -> dict[str, list[str]]:
    """Return the placements of each weight."""
    weights = [spec for spec in parallel.shards.values() if not spec.is_input]
    return {weight.name: list(map(str, weight.placements)) for weight in weights}


def _as_plan(placements: dict[str, list[str]]) -> dict[str, str]:
    """Return a plan that gives weights these placements, on a mesh with one axis."""
    return {name: placement for name, (placement,) in placements.items() if placement != "R"}


def _cache_fields(caches: Iterable[KvCacheSpec]) -> list[list[Any]]:
    return [[cache.heads, cache.dim, cache.dtype] for cache in caches]


def _check_like(
    model: dict[str, Any], placements: dict[str, list[str]], caches: list[list[Any]]
) -> None:
    """Raise `ModelError` unless batches use the weights and caches of a compiled model."""
    different = [name for name in placements if placements[name] != model["placements"].get(name)]
    if different or placements.keys() != model["placements"].keys() or caches != model["caches"]:
        what = f"{different[0]!r} is" if different else "keys and values are"
        raise ModelError(
            f"batches of several requests are not supported with this plan: {what} sharded in "
            "another way than for one request; load the model with the plan of transformers"
        )


def names(request: dict[str, Any], _progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the names that the weights of a model have in its files."""
    require("to find the weights of a model")
    from tvm_ipc.models.hf import read_config_and_tokenizer, torch_import

    folder = ModelFolder(Path(request["path"]), request["config"])
    model = torch_import.build(read_config_and_tokenizer.configuration(folder), request["dtype"])
    return _map_names(model, request["stored"], request["weights"])


def _map_names(model: Any, stored: Iterable[str], weights: Iterable[str]) -> dict[str, Any]:
    from tvm_ipc.models.hf.checkpoint_names import checkpoint_names

    stored_names = checkpoint_names(model, stored)
    return {name: name_to_json(stored_names[name]) for name in weights if name in stored_names}
