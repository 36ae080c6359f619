# SPDX-License-Identifier: Apache-2.0
"""Compile a model's folder into a library that each rank loads, and cache the library on disk.

The folder of the cache is named after a hash of everything that the library depends on: the
configuration, the number of workers, the element type, the processor, and the versions of all code.
A finished library is renamed into the cache, so several processes may compile the same model at a
time.

This module does not need TVM's compiler, PyTorch or transformers. `compile_and_map_names_in_child`
does, and runs in a child process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from tvm_ipc import comm, this_machine
from tvm_ipc.comm.placements import placement_of
from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.user_sharding_plan import Plan, shards_experts
from tvm_ipc.runtime import config as settings
from tvm_ipc.runtime.subprocess_call import run_in_child
from tvm_ipc.spmd import ShardSpec

#: The version of the cache's file format; part of the key.
_FORMAT: Final = 4
_DAY: Final = 86400
#: A folder with fewer free bytes may be too small for the compiler's output.
_NEEDED_DISK_SPACE: Final = 256 << 20
#: The files in a folder of the cache.
LIBRARY: Final = "model.so"
FACTS: Final = "model.json"
#: The types of models whose results may be reproducible.
REPRODUCIBLE_DTYPES: Final = ("float32", "bfloat16")
#: Packages whose versions are part of the key.
_PACKAGES: Final = (
    *("tvm-ipc", "apache-tvm", "apache-tvm-ffi", "torch", "transformers", "scipy-openblas64"),
)


@dataclass(frozen=True)
class KvCacheSpec:
    """The keys or the values of one layer: per token, `heads` vectors of `dim` elements.

    Attributes
    ----------
    heads : the number of key/value heads.
    dim : the elements of a head.
    dtype : the element type.
    """

    heads: int
    dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one token takes."""
        return self.heads * self.dim * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CompiledModel:
    """A model that is compiled for a number of ranks.

    Attributes
    ----------
    library : the library that each rank loads, with the functions `prefill` and `decode`; or with
        `decode_batch`.
    shards : how each weight is sharded, in the order in which the functions take the weights.
    caches : the keys and the values of each layer, as one rank stores them.
    vocabulary : the number of tokens in the vocabulary.
    dtype : the type that the functions compute in.
    ignored : regular expressions for names in checkpoints that the model does not have.
    collectives : the number of collectives of each kind in these functions.
    notes : remarks about the plan, for the user.
    cached : whether the library was in the cache already.
    why_not_cached : why the library was not written to the cache; "" if it was.
    plan : which weights to shard, and how, as the caller specified it.
    reproducible : whether the bits of the results do not depend on the number of workers.
    """

    library: Path
    shards: Mapping[str, ShardSpec]
    caches: tuple[KvCacheSpec, ...]
    vocabulary: int
    dtype: str
    ignored: tuple[str, ...]
    collectives: Mapping[str, int]
    notes: tuple[str, ...] = ()
    cached: bool = False
    why_not_cached: str = ""
    plan: Plan = None
    reproducible: bool = False


def load_or_compile(
    folder: ModelFolder,
    workers: int,
    dtype: str,
    progress: Callable[[str], None] = lambda _: None,
    plan: Plan = None,
    batch_of: CompiledModel | None = None,
    *,
    reproducible: bool = False,
) -> CompiledModel:
    """Return the compiled model of a folder: from the cache, or compiled now.

    Parameters
    ----------
    folder : the model's folder; its weights are not read.
    workers : the number of ranks.
    dtype : the type to compute in.
    progress : called with a short text before each step.
    plan : which weights to shard, and how; see `sharding`.
    batch_of : the model that batches share the weights with; the result then has the function for
        batches of requests only. Its plan is that of this model, and so is `reproducible`.
    reproducible : whether the bits of the results must not depend on the number of workers.
    """
    if batch_of is not None:
        plan, reproducible = batch_of.plan, batch_of.reproducible
    if reproducible and dtype not in REPRODUCIBLE_DTYPES:
        raise ModelError(
            f"{folder.path}: a model in {dtype} is not reproducible; choose the dtype "
            f"{' or '.join(REPRODUCIBLE_DTYPES)}"
        )
    request = {
        "path": str(folder.path),
        "config": folder.config,
        "workers": workers,
        "dtype": dtype,
        "plan": plan,
        "reproducible": reproducible,
        "batch_of": None if batch_of is None else _facts_for_batches(batch_of),
    }
    compiled = _load_or_compile(request, progress)
    return replace(compiled, plan=plan, reproducible=reproducible)


def _facts_for_batches(compiled: CompiledModel) -> dict[str, Any]:
    """Return what a function for batches must have in common with a compiled model."""
    return {
        "placements": {
            name: list(map(str, spec.placements)) for name, spec in compiled.shards.items()
        },
        "caches": [[cache.heads, cache.dim, cache.dtype] for cache in compiled.caches],
    }


def _load_or_compile(request: Mapping[str, Any], progress: Callable[[str], None]) -> CompiledModel:
    workers = request["workers"]
    inputs = {name: value for name, value in request.items() if name != "path"}
    key = _cache_key({**inputs, "processor": this_machine.instruction_sets()})
    cache = settings.cache_folder()
    entry = cache / "models" / key
    why_not = ""
    try:
        check_ownership(cache, entry.parent, entry, entry / FACTS, entry / LIBRARY)
        compiled = _read_cached(entry, workers)
        if compiled is not None:
            return compiled
        entry.parent.mkdir(parents=True, exist_ok=True)
        check_ownership(cache, entry.parent)  # another user may have created it meanwhile
        work = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-", dir=entry.parent))
        _remove_abandoned(entry.parent)
    except OSError as error:
        work, why_not = Path(tempfile.mkdtemp(prefix="tvm_ipc-model-")), str(error)
        atexit.register(shutil.rmtree, work, ignore_errors=True)
    try:
        _compile_into(work, request, progress)
        if why_not:
            return _read(work, workers, why_not)
        if not _publish(work, entry):
            raise IPCError(f"{entry}: this folder of the cache cannot be replaced; remove it")
        return _read(entry, workers)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _compile_into(work: Path, request: Mapping[str, Any], progress: Callable[[str], None]) -> None:
    """Compile into a private folder, in a child process that imports PyTorch and the compiler."""
    request = {**request, "work": str(work), "imported": str(_imported_entry(request))}
    try:
        run_in_child(
            "tvm_ipc.models.hf.calls_in_child:compile_model",
            request,
            progress,
            "to compile a model",
        )
    except (ModelError, ValueError):
        raise
    except RuntimeError as error:  # compilers and linkers do not name a file system that is full
        folders = {"TVM_IPC_CACHE": work.parent, "TMPDIR": Path(tempfile.gettempdir())}
        hint = _describe_full_disk(folders)
        if not hint:
            raise
        raise IPCError(f"the model was not compiled, and {hint}. {error}") from error


def _describe_full_disk(folders: Mapping[str, Path]) -> str:
    """Return a sentence about the first folder with too little free space; "" if none is."""
    for variable, folder in folders.items():
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_DISK_SPACE:
            return (
                f"{folder} has {free / 2**20:.1f} MiB free; free more space, or set {variable} to "
                "another folder"
            )
    return ""


def _cache_key(inputs: Mapping[str, Any]) -> str:
    """Return a hash of the code, and all else that something in the cache depends on."""
    code = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    inputs = {
        "format": _FORMAT,
        **inputs,
        "code": code.hexdigest(),
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:40]


def _imported_entry(request: Mapping[str, Any]) -> Path:
    """Return where the cache has the imported model, for all plans with the same operators."""
    inputs = {name: request[name] for name in ("config", "dtype")}
    experts, batch = shards_experts(request["plan"]), request["batch_of"] is not None
    return (
        settings.cache_folder()
        / "imported"
        / _cache_key({**inputs, "experts": experts, "batch": batch})
    )


def _publish(work: Path, entry: Path) -> bool:
    """Rename a folder into the cache, and return whether the cache has the entry now.

    If another process has published the same entry meanwhile, that one is used.
    """
    try:
        work.rename(entry)
        return True
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        return (entry / FACTS).is_file()


def check_ownership(*paths: Path) -> None:
    """Raise PermissionError if another user could have written code that would run here.

    The digest of a library detects damage, not intent. Folders above the cache are the user's own
    choice.
    """
    for path in paths:
        try:
            status, link_status = path.stat(), path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not {status.st_uid, link_status.st_uid} <= {os.geteuid(), 0}:
            raise PermissionError(
                f"{path} belongs to another user, whose code would run; set TVM_IPC_CACHE to a "
                "folder of your own"
            )
        if status.st_mode & stat.S_IWOTH:
            raise PermissionError(
                f"every user may write to {path}, and code in it would run; use chmod o-w, or set "
                "TVM_IPC_CACHE to a folder of your own"
            )


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished folders that are a day old, whose processes were killed."""
    for path in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY:
                shutil.rmtree(path, ignore_errors=True)


def _read_cached(entry: Path, workers: int) -> CompiledModel | None:
    """Return the model in a folder of the cache; None if there is none, or it is damaged."""
    if not entry.exists():
        return None
    try:
        return _read(entry, workers, cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        # The entry was damaged after it was published. A rename harms no process that has it open.
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=entry.parent))
            entry.rename(aside / entry.name)
            shutil.rmtree(aside, ignore_errors=True)
        return None


def _read(
    folder: Path, workers: int, why_not_cached: str = "", *, cached: bool = False
) -> CompiledModel:
    facts = json.loads((folder / FACTS).read_text())
    library = folder / LIBRARY
    if digest(library) != facts["library"]:
        raise ValueError(f"{library}: the file is damaged")
    mesh = comm.Mesh({"tp": workers})
    shards = {
        name: ShardSpec(
            name,
            parameter,
            tuple(shape),
            dtype,
            mesh,
            tuple(placement_of(name, placement) for placement in placements),
        )
        for name, parameter, shape, dtype, placements in facts["weights"]
    }
    return CompiledModel(
        library,
        shards,
        tuple(KvCacheSpec(*fields) for fields in facts["caches"]),
        int(facts["vocabulary"]),
        str(facts["dtype"]),
        tuple(facts["ignored"]),
        facts["collectives"],
        tuple(facts["notes"]),
        cached,
        why_not_cached,
    )


def digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
