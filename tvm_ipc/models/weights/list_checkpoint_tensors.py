# SPDX-License-Identifier: Apache-2.0
"""List the tensors of a checkpoint: a file of weights, or a folder with such files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvm_ipc.arguments import quote
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights import read_tvmjs_index, safetensors_header
from tvm_ipc.models.weights.read_and_check_json import read_json_file, read_prefix, sibling_file
from tvm_ipc.models.weights.tensor_in_file import FileTensor

_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_WHOLE: Final = f"model{_SUFFIX}"
#: Files that may be pickles. Reading a pickle can run any code.
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")


def read_checkpoint(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file or a folder, by their names.

    Raises
    ------
    WeightsError
        There are no tensors, a file cannot be read or is damaged, or the folder has several
        checkpoints.
    """
    try:
        is_folder = path.is_dir()
        names = sorted(file.name for file in path.iterdir()) if is_folder else []
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    if not is_folder:
        return _read_file(path)
    for name in (f"model{_INDEX}", _WHOLE):
        if name in names:
            return _read_file(path / name)
    for suffix in (_INDEX, _SUFFIX):
        candidates = [name for name in names if name.endswith(suffix)]
        if len(candidates) > 1:
            raise WeightsError(
                f"{path} has {len(candidates)} files of weights, and none is {_WHOLE}; pass the "
                f"path of one of {', '.join(candidates[:5])}"
            )
        if candidates:
            return _read_file(path / candidates[0])
    for name in read_tvmjs_index.NAMES:
        if name in names:
            return _read_file(path / name)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise WeightsError(_pickle_message(path / pickles[0]))
    raise WeightsError(
        f"{path} has no weights: there is no {_WHOLE}, no model{_INDEX}, and no "
        f"{read_tvmjs_index.NAMES[0]}"
    )


def _read_file(path: Path) -> dict[str, FileTensor]:
    if path.name.endswith(_INDEX):
        return _read_index(path)
    if path.name.endswith(".json"):
        return read_tvmjs_index.read_tensors(path)
    if path.name.endswith(_PICKLES):
        read_prefix(path, 0)  # raises if the file is missing
        raise WeightsError(_pickle_message(path))
    return safetensors_header.read_tensors(path)


def _read_index(path: Path) -> dict[str, FileTensor]:
    """Return the tensors that an index lists, each from its file."""
    files = read_json_file(path)[1].get("weight_map")
    if not isinstance(files, dict):
        raise WeightsError(f"{path} is damaged: it has no weight_map")
    shards: dict[Path, dict[str, FileTensor]] = {}
    tensors: dict[str, FileTensor] = {}
    for name, file in files.items():
        shard = sibling_file(path, file)
        if shard not in shards:
            shards[shard] = safetensors_header.read_tensors(shard)
        if name not in shards[shard]:
            raise WeightsError(f"{shard} has no tensor {quote(name)}, which {path} lists for it")
        tensors[name] = shards[shard][name]
    return tensors


def _pickle_message(path: Path) -> str:
    return (
        f"{path} may be a pickle, which can run any code when it is read; pass load_weights the "
        f"result of torch.load({path.name!r}, weights_only=True, mmap=True), or save the weights "
        "as safetensors"
    )
