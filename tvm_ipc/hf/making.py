# SPDX-License-Identifier: Apache-2.0
"""What needs PyTorch, transformers and TVM's compiler, for a process of its own.

Called by `tvm_ipc.runtime.apart`, with what JSON can say.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tvm_ipc.errors import IPCError
from tvm_ipc.hf.called import json_of, keep
from tvm_ipc.hf.compiling import FACTS, LIBRARY, digest
from tvm_ipc.hf.folder import Folder
from tvm_ipc.hf.packages import needed
from tvm_ipc.weights.folder import stored_in


def make(given: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Compile a model into a folder that nobody else knows."""
    progress("importing PyTorch and transformers")
    needed("to compile a model")
    import tvm

    from tvm_ipc.hf import importing, reading
    from tvm_ipc.hf.dividing import caches_of_a_rank, divide
    from tvm_ipc.hf.keeping import keep_in_place
    from tvm_ipc.pipeline import get_pipeline

    folder = Folder(Path(given["path"]), given["config"])
    work, workers, dtype = Path(given["work"]), given["workers"], given["dtype"]
    model = importing.build(reading.configuration(folder), dtype)
    progress("exporting the model")
    decoder = importing.import_decoder(model, workers)
    progress(f"dividing it among {workers} workers")
    parallel = divide(decoder, workers, given["plan"])
    module = keep_in_place(parallel.module, len(decoder.caches))
    progress("compiling")
    target = tvm.target.Target.from_device("cpu")
    pipeline = get_pipeline(target, workers)
    executable = tvm.compile(module, target, relax_pipeline=pipeline)
    library = work / LIBRARY
    executable.export_library(str(library))
    caches = caches_of_a_rank(parallel, decoder)
    weights = [one for one in parallel.cut.values() if not one.is_input]
    facts = {
        "vocabulary": decoder.vocabulary,
        "dtype": dtype,
        "ignored": list(importing.ignored(model)),
        "collectives": dict(parallel.collectives),
        "notes": list(parallel.notes),
        "caches": [[one.heads, one.dim, one.dtype] for one in caches],
        "weights": [
            [one.name, one.parameter, list(one.shape), one.dtype, list(map(str, one.placements))]
            for one in weights
        ],
        "library": digest(library),
    }
    # What is wrong with the weights is said when they are loaded.
    with contextlib.suppress(IPCError):
        stored = sorted(stored_in(folder.path))
        keep(work, stored, _found(model, stored, [one.name for one in weights]))
    (work / FACTS).write_text(json.dumps(facts))


def names(given: dict[str, Any], _progress: Callable[[str], None]) -> dict[str, Any]:
    """Return what the weights of a model are called among the names of its files."""
    needed("to find the weights of a model")
    from tvm_ipc.hf import importing, reading

    folder = Folder(Path(given["path"]), given["config"])
    model = importing.build(reading.configuration(folder), given["dtype"])
    return _found(model, given["stored"], given["weights"])


def _found(model: Any, stored: Iterable[str], weights: Iterable[str]) -> dict[str, Any]:
    from tvm_ipc.hf.names import checkpoint_names

    found = checkpoint_names(model, stored)
    return {name: json_of(found[name]) for name in weights if name in found}
