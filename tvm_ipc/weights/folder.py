# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder hold what."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvm_ipc.arguments import show
from tvm_ipc.errors import WeightsError
from tvm_ipc.weights import safetensors, tvmjs
from tvm_ipc.weights.stored import Stored, begin_of, beside, object_of

_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_WHOLE: Final = f"model{_SUFFIX}"
#: Files of pickles, which run what they like when they are read.
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")


def stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file or a folder by their names.

    Raises
    ------
    WeightsError
        There are none, something cannot be read or is damaged, or there is a choice.
    """
    try:
        is_folder = path.is_dir()
        names = sorted(one.name for one in path.iterdir()) if is_folder else []
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    if not is_folder:
        return _in_file(path)
    for name in (f"model{_INDEX}", _WHOLE):
        if name in names:
            return _in_file(path / name)
    for suffix in (_INDEX, _SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) > 1:
            raise WeightsError(
                f"{path} has {len(found)} files of weights, and none is {_WHOLE}: which is meant? "
                f"{', '.join(found[:5])}"
            )
        if found:
            return _in_file(path / found[0])
    for name in tvmjs.NAMES:
        if name in names:
            return _in_file(path / name)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise WeightsError(_pickled(path / pickles[0]))
    raise WeightsError(
        f"{path} has no weights: there is no {_WHOLE}, no model{_INDEX}, and no {tvmjs.NAMES[0]}"
    )


def _in_file(path: Path) -> dict[str, Stored]:
    if path.name.endswith(_INDEX):
        return _by_index(path)
    if path.name.endswith(".json"):
        return tvmjs.tensors_of(path)
    if path.name.endswith(_PICKLES):
        begin_of(path, 0)  # if it is not there, that is what is to be said
        raise WeightsError(_pickled(path))
    return safetensors.tensors_of(path)


def _by_index(path: Path) -> dict[str, Stored]:
    """Return the tensors that an index names, each from its file."""
    files = object_of(path)[1].get("weight_map")
    if not isinstance(files, dict):
        raise WeightsError(f"{path} is damaged: it has no weight_map")
    shards: dict[Path, dict[str, Stored]] = {}
    tensors: dict[str, Stored] = {}
    for name, file in files.items():
        shard = beside(path, file)
        if shard not in shards:
            shards[shard] = safetensors.tensors_of(shard)
        if name not in shards[shard]:
            raise WeightsError(f"{shard} has no tensor {show(name)}, which {path} says it has")
        tensors[name] = shards[shard][name]
    return tensors


def _pickled(path: Path) -> str:
    return (
        f"{path} may be a pickle, which runs what it likes when it is read: give load_weights what "
        f"torch.load({path.name!r}, weights_only=True, mmap=True) returns, or save it as "
        "safetensors"
    )
