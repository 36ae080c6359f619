# SPDX-License-Identifier: Apache-2.0
"""Look up the names that the weights of a model have in its folder, and cache them on disk.

transformers knows the names, and takes seconds to import. They depend only on the model and the
names in the folder, so they are cached beside the compiled model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm_ipc.models.hf.compile_cache import CompiledModel
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.weights import concat, stack
from tvm_ipc.models.weights.stack_or_concat_source_tensors import Fused, Name
from tvm_ipc.runtime.subprocess_call import run_in_child


def weight_names(
    folder: ModelFolder, stored: Iterable[str], compiled: CompiledModel
) -> dict[str, Name]:
    """Return the names of the weights in the model's folder, by their names in the model.

    Parameters
    ----------
    folder : the model's folder.
    stored : the names of the tensors in its files.
    compiled : the compiled model.
    """
    names = sorted(stored)
    path = compiled.library.parent / _file_name(names)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return _parse(json.loads(path.read_text()))
    request = {
        "path": str(folder.path),
        "config": folder.config,
        "dtype": compiled.dtype,
        "stored": names,
        "weights": list(compiled.shards),
    }
    result = run_in_child(
        "tvm_ipc.models.hf.calls_in_child:names",
        request,
        purpose="to find the weights of a model",
    )
    save_names(path.parent, names, result)
    return _parse(result)


def _file_name(stored: Sequence[str]) -> str:
    return f"names-{hashlib.sha256(chr(0).join(stored).encode()).hexdigest()[:40]}.json"


def _parse(names: dict[str, Any]) -> dict[str, Name]:
    return {name: _name_from_json(value) for name, value in names.items()}


def save_names(folder: Path, stored: Sequence[str], names: dict[str, Any]) -> None:
    """Write the names to the cache atomically, and ignore errors of the file system."""
    path = folder / _file_name(stored)
    with contextlib.suppress(OSError):
        file, temporary = tempfile.mkstemp(prefix=".names-", dir=folder)
        with os.fdopen(file, "w") as out:
            json.dump(names, out)
        Path(temporary).replace(path)


def copy_names(source: Path, folder: Path, stored: Sequence[str]) -> None:
    """Copy the names from one folder of the cache to another, if they are there."""
    with contextlib.suppress(OSError, ValueError):
        save_names(folder, stored, json.loads((source / _file_name(stored)).read_text()))


def name_to_json(name: Name) -> Any:
    """Return a name as a JSON value."""
    return name if isinstance(name, str) else asdict(name)


def _name_from_json(value: Any) -> Name:
    if isinstance(value, str):
        return value
    fuse = stack if value["new"] else concat
    fused: Fused = fuse([_name_from_json(part) for part in value["parts"]], value["axis"])
    return fused
