# SPDX-License-Identifier: Apache-2.0
"""The steps that need PyTorch, transformers or TVM's compiler, for a child process.

`tvm_ipc.runtime.subprocess_call` calls these functions in the child. Their requests and results are
JSON values.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tvm_ipc.errors import IPCError
from tvm_ipc.models.hf.compile_cache import FACTS, LIBRARY, digest
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.optional_deps import require
from tvm_ipc.models.hf.weight_to_stored_name_cache import name_to_json, save_names
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint


def compile_model(request: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Compile a model into the private folder `request["work"]`."""
    progress("importing PyTorch and transformers")
    require("to compile a model")
    import tvm

    from tvm_ipc.cpu.host_cpu_target import cpu_target
    from tvm_ipc.models.hf import read_config_and_tokenizer, torch_import
    from tvm_ipc.models.hf.inplace_kv_cache_update import update_in_place
    from tvm_ipc.models.hf.shard_imported_model import kv_cache_specs, shard
    from tvm_ipc.pipeline import get_pipeline

    folder = ModelFolder(Path(request["path"]), request["config"])
    work, workers, dtype = Path(request["work"]), request["workers"], request["dtype"]
    model = torch_import.build(read_config_and_tokenizer.configuration(folder), dtype)
    progress("exporting the model")
    decoder = torch_import.import_decoder(model, workers)
    progress(f"sharding it for {workers} workers")
    parallel = shard(decoder, workers, request["plan"])
    module = update_in_place(parallel.module, len(decoder.caches))
    progress("compiling")
    target = cpu_target()
    pipeline = get_pipeline(target, workers)
    executable = tvm.compile(module, target, relax_pipeline=pipeline)
    library = work / LIBRARY
    executable.export_library(str(library))
    caches = kv_cache_specs(parallel, decoder)
    weights = [spec for spec in parallel.shards.values() if not spec.is_input]
    facts = {
        "vocabulary": decoder.vocabulary,
        "dtype": dtype,
        "ignored": list(torch_import.ignored(model)),
        "collectives": dict(parallel.collectives),
        "notes": list(parallel.notes),
        "caches": [[cache.heads, cache.dim, cache.dtype] for cache in caches],
        "weights": [
            [w.name, w.parameter, list(w.shape), w.dtype, list(map(str, w.placements))]
            for w in weights
        ],
        "library": digest(library),
    }
    # Errors in the checkpoint are raised later, when the weights are loaded.
    with contextlib.suppress(IPCError):
        stored = sorted(read_checkpoint(folder.path))
        save_names(work, stored, _map_names(model, stored, [w.name for w in weights]))
    (work / FACTS).write_text(json.dumps(facts))


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
