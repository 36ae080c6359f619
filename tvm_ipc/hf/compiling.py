# SPDX-License-Identifier: Apache-2.0
"""From a model's folder to a library that each rank loads, and what is to be given to it.

A library is kept in a folder of the cache that is named after all that it is made of: the
configuration, the number of workers, the element type, the processor, and the versions of all code.
It is moved there when it is whole, so that several may compile the same at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import tvm

from tvm_ipc import comm
from tvm_ipc.comm.placements import placement_of
from tvm_ipc.errors import IPCError
from tvm_ipc.hf.caches import Cached
from tvm_ipc.hf.folder import Folder
from tvm_ipc.hf.packages import needed
from tvm_ipc.hf.plans import Plan
from tvm_ipc.parallel import Cut
from tvm_ipc.pipeline import get_pipeline
from tvm_ipc.runtime import config as settings

#: Of what is kept; part of the name of its folder.
_FORMAT: Final = 2
_DAY: Final = 86400
_LIBRARY: Final = "model.so"
_FACTS: Final = "model.json"
#: Packages whose versions decide what is compiled.
_PACKAGES: Final = (
    *("tvm-ipc", "apache-tvm", "apache-tvm-ffi", "torch", "transformers", "scipy-openblas64"),
)


@dataclass(frozen=True)
class Compiled:
    """A model that is compiled for some ranks.

    Attributes
    ----------
    library : that each rank loads, with `prefill` and `decode`.
    cut : how each weight is divided, in the order in which the functions take them.
    caches : shapes without the number of tokens, and types, of keys and values on one rank.
    vocabulary : how many tokens there are.
    dtype : what they compute in.
    ignored : expressions for names in checkpoints that the model does not have.
    collectives : how many of each kind both functions have.
    notes : what there is to know of the plan.
    kept : whether the library was there already.
    why_not_kept : why the library is in no folder of the cache, "" if it is.
    """

    library: Path
    cut: Mapping[str, Cut]
    caches: tuple[Cached, ...]
    vocabulary: int
    dtype: str
    ignored: tuple[str, ...]
    collectives: Mapping[str, int]
    notes: tuple[str, ...] = ()
    kept: bool = False
    why_not_kept: str = ""


def compiled(
    folder: Folder,
    workers: int,
    dtype: str,
    progress: Callable[[str], None] = lambda _: None,
    plan: Plan = None,
) -> Compiled:
    """Return the model of a folder, compiled for some ranks, from the cache if it is there.

    Parameters
    ----------
    folder : with the configuration; its weights are not read.
    workers : how many ranks.
    dtype : what they compute in.
    progress : hears what is done.
    plan : which weights are divided, and how; see `dividing`.
    """
    target = tvm.target.Target.from_device("cpu")
    name = _name(folder, workers, dtype, target, plan)
    place = settings.cache_folder() / "models" / name
    found = _kept(place, workers)
    if found is not None:
        return found
    needed("to compile a model")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name[:16]}-", dir=place.parent))
        why_not = ""
        _sweep(place.parent)
    except OSError as error:
        work, why_not = Path(tempfile.mkdtemp(prefix="tvm_ipc-model-")), str(error)
        atexit.register(shutil.rmtree, work, ignore_errors=True)
    try:
        _make(work, folder, workers, dtype, target, progress, plan)
        if why_not:
            return _read(work, workers, why_not)
        if not _moved(work, place):
            raise IPCError(f"{place}: it cannot be replaced; remove it")
        return _read(place, workers)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _name(folder: Folder, workers: int, dtype: str, target: Any, plan: Plan) -> str:
    """Return a name that says all that a library is made of."""
    code = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    made_of = {
        "format": _FORMAT,
        "config": folder.config,
        "workers": workers,
        "dtype": dtype,
        "target": str(target),
        "plan": plan,
        "code": code.hexdigest(),
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:40]


def _make(
    work: Path,
    folder: Folder,
    workers: int,
    dtype: str,
    target: Any,
    progress: Callable[[str], None],
    plan: Plan,
) -> None:
    """Compile into a folder that nobody else knows."""
    progress("importing PyTorch and transformers")
    from tvm_ipc.hf import importing, reading
    from tvm_ipc.hf.dividing import caches_of_a_rank, divide
    from tvm_ipc.hf.keeping import keep_in_place

    model = importing.build(reading.configuration(folder), dtype)
    progress("exporting the model")
    decoder = importing.import_decoder(model, workers)
    progress(f"dividing it among {workers} workers")
    parallel = divide(decoder, workers, plan)
    module = keep_in_place(parallel.module, len(decoder.caches))
    progress("compiling")
    pipeline = get_pipeline(target, workers)
    executable = tvm.compile(module, target, relax_pipeline=pipeline)
    library = work / _LIBRARY
    executable.export_library(str(library))
    caches = caches_of_a_rank(parallel, decoder)
    facts = {
        "vocabulary": decoder.vocabulary,
        "dtype": dtype,
        "ignored": list(importing.ignored(model)),
        "collectives": dict(parallel.collectives),
        "notes": list(parallel.notes),
        "caches": [[one.heads, one.dim, one.dtype] for one in caches],
        "weights": [
            [one.name, one.parameter, list(one.shape), one.dtype, list(map(str, one.placements))]
            for one in parallel.cut.values()
            if not one.is_input
        ],
        "library": _digest(library),
    }
    (work / _FACTS).write_text(json.dumps(facts))


def _moved(work: Path, place: Path) -> bool:
    """Move a folder to its place, unless somebody else has put the same there meanwhile."""
    try:
        work.rename(place)
        return True
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        return (place / _FACTS).is_file()


def _sweep(folder: Path) -> None:
    """Remove what was not finished a day ago: who made it was killed."""
    for path in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY:
                shutil.rmtree(path, ignore_errors=True)


def _kept(place: Path, workers: int) -> Compiled | None:
    """Return what is in a folder of the cache, None where there is nothing whole."""
    if not place.exists():
        return None
    try:
        return _read(place, workers, kept=True)
    except (OSError, ValueError, KeyError, TypeError):
        # It was damaged after it was moved there. Nobody who has it open is harmed.
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=place.parent))
            place.rename(aside / place.name)
            shutil.rmtree(aside, ignore_errors=True)
        return None


def _read(place: Path, workers: int, why_not_kept: str = "", *, kept: bool = False) -> Compiled:
    facts = json.loads((place / _FACTS).read_text())
    library = place / _LIBRARY
    if _digest(library) != facts["library"]:
        raise ValueError(f"{library}: it is damaged")
    mesh = comm.Mesh({"tp": workers})
    cut = {
        name: Cut(
            name,
            parameter,
            tuple(shape),
            dtype,
            mesh,
            tuple(placement_of(name, one) for one in placements),
        )
        for name, parameter, shape, dtype, placements in facts["weights"]
    }
    return Compiled(
        library,
        cut,
        tuple(Cached(*one) for one in facts["caches"]),
        int(facts["vocabulary"]),
        str(facts["dtype"]),
        tuple(facts["ignored"]),
        facts["collectives"],
        tuple(facts["notes"]),
        kept,
        why_not_kept,
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
