# SPDX-License-Identifier: Apache-2.0
"""From a model's folder to a library that each rank loads, and what is to be given to it.

A library is kept in a folder of the cache that is named after all that it is made of: the
configuration, the number of workers, the element type, the processor, and the versions of all code.
It is moved there when it is whole, so that several may compile the same at a time.

Nothing here needs TVM's compiler, PyTorch or transformers: `making` does, in a process of its own.
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
from typing import Final

from tvm_ipc import comm, machine
from tvm_ipc.comm.placements import placement_of
from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.hf.caches import Cached
from tvm_ipc.hf.folder import Folder
from tvm_ipc.hf.plans import Plan
from tvm_ipc.parallel import Cut
from tvm_ipc.runtime import config as settings
from tvm_ipc.runtime.apart import apart

#: Of what is kept; part of the name of its folder.
_FORMAT: Final = 3
_DAY: Final = 86400
#: Bytes that a folder has where a compiler can write all that it makes.
_ROOM: Final = 256 << 20
#: What a folder has.
LIBRARY: Final = "model.so"
FACTS: Final = "model.json"
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
    name = _name(folder, workers, dtype, plan)
    place = settings.cache_folder() / "models" / name
    found = _kept(place, workers)
    if found is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name[:16]}-", dir=place.parent))
        why_not = ""
        _sweep(place.parent)
    except OSError as error:
        work, why_not = Path(tempfile.mkdtemp(prefix="tvm_ipc-model-")), str(error)
        atexit.register(shutil.rmtree, work, ignore_errors=True)
    try:
        _make(work, folder, workers, dtype, progress, plan)
        if why_not:
            return _read(work, workers, why_not)
        if not _moved(work, place):
            raise IPCError(f"{place}: it cannot be replaced; remove it")
        return _read(place, workers)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _make(
    work: Path,
    folder: Folder,
    workers: int,
    dtype: str,
    progress: Callable[[str], None],
    plan: Plan,
) -> None:
    """Compile into a folder that nobody else knows, in a process with all that this takes."""
    given = {
        "work": str(work),
        "path": str(folder.path),
        "config": folder.config,
        "workers": workers,
        "dtype": dtype,
        "plan": plan,
    }
    try:
        apart("tvm_ipc.hf.making:make", given, progress, "to compile a model")
    except (ModelError, ValueError):
        raise
    except RuntimeError as error:  # compilers and linkers do not name what is full
        places = {"TVM_IPC_CACHE": work.parent, "TMPDIR": Path(tempfile.gettempdir())}
        full = _full(places)
        if not full:
            raise
        raise IPCError(f"a model was not compiled, and {full}. {error}") from error


def _full(places: Mapping[str, Path]) -> str:
    """Say which of these folders may have had too little room; "" if none."""
    for variable, place in places.items():
        free = shutil.disk_usage(place).free
        if free < _ROOM:
            return (
                f"{place} has {free / 2**20:.1f} MiB free; free more, or set {variable} to another"
            )
    return ""


def _name(folder: Folder, workers: int, dtype: str, plan: Plan) -> str:
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
        "processor": machine.instruction_sets(),
        "plan": plan,
        "code": code.hexdigest(),
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:40]


def _moved(work: Path, place: Path) -> bool:
    """Move a folder to its place, unless somebody else has put the same there meanwhile."""
    try:
        work.rename(place)
        return True
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        return (place / FACTS).is_file()


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
    facts = json.loads((place / FACTS).read_text())
    library = place / LIBRARY
    if digest(library) != facts["library"]:
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


def digest(path: Path) -> str:
    """Return what tells the content of a file from others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
