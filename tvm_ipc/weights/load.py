# SPDX-License-Identifier: Apache-2.0
"""Weights onto the workers of a session, to each its parts."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from tvm_ipc import arguments, terminal
from tvm_ipc.errors import WeightsError
from tvm_ipc.parts import Runs, extents, moves_of_box
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.session import Session
from tvm_ipc.weights import folder, held, match, worker
from tvm_ipc.weights.elsewhere import Elsewhere
from tvm_ipc.weights.held import Held
from tvm_ipc.weights.joined import Joined, Name, Whole
from tvm_ipc.weights.reading import convert
from tvm_ipc.weights.stored import Stored, byte_count

if TYPE_CHECKING:
    from tvm_ipc.parallel import Cut

#: What weights are called in a source, by the names of parameters, or a function that says it.
Names: TypeAlias = "Mapping[str, Name] | Callable[[str], Name] | None"

_CUT: Final = "what parallelize says of each parameter: parallel.cut"
_NAMES: Final = (
    "names in the source by those of parameters, a function from these to those, or None"
)
#: Bytes of parts on their way to the workers; then they are waited for.
_AT_ONCE: Final = 1 << 28
#: Bytes of which the place of a part in the memory of a rank is a multiple.
_ALIGNMENT: Final = 128


def load_weights(
    session: Session,
    source: Any,
    cut: Mapping[str, Cut],
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, DRef]:
    """Return the weights of a model on the workers, in the order of its parameters.

    Each worker has its part of each. Of files it reads them itself, and only them, while the others
    read theirs; the controller reads names alone. What other nodes do not have (see docs/nodes.md)
    worker 0 reads, and sends to each worker its parts. All names, shapes and types are compared
    before anything is loaded. Floats are converted to the type that the program wants, and integers
    where nothing is lost.

        parallel = tvm_ipc.parallelize(mod, plan, 4, names=names)
        weights = tvm_ipc.load_weights(session, "folder", parallel.cut)
        main(ids, *weights.values())

    Parameters
    ----------
    session : whose workers get them.
    source : a safetensors file; a folder with one, or with several and an index; a folder that
        `tvm.contrib.tvmjs` or mlc-llm wrote; an ExportedProgram or a model of PyTorch; a mapping
        from names to arrays or tensors.
    cut : how each parameter is divided: `Parallelized.cut`. Inputs in it are left out.
    names : of weights in the source, where they are others than those of the parameters. Parameters
        may share one: `{"lm_head.weight": "model.embed_tokens.weight"}`; several that are one
        parameter are joined by `stack` and `concat` of `tvm_ipc.weights`.
    ignore : patterns of names in the source that no parameter need have, such as "*.inv_freq".
        Others that no parameter has are an error. Of models of PyTorch all are ignored.
    progress : show on a terminal how much is loaded, if it takes longer than a second.

    Raises
    ------
    WeightsError
        Weights are missing, too many or others than the program wants, or a file is damaged.
    WorkerError
        A worker could not read its part; the session goes on.
    """
    arguments.instance("load_weights: session", session, Session, "a tvm_ipc.Session")
    cuts = _weights(cut, session.num_workers)
    progress = arguments.flag("load_weights: progress", progress)
    patterns = arguments.texts("load_weights: ignore", ignore, "patterns of names in the source")
    tensors: Mapping[str, Stored | Held]
    if isinstance(source, (str, os.PathLike)):
        path = arguments.path("load_weights: source", source, "a file or a folder")
        tensors, other_names, strict = folder.stored_in(path), {}, True
        where = str(path)
    else:
        found = held.tensors_of(source)
        tensors, other_names, strict = found.by_name, found.other_names, found.chosen
        where = f"the {type(source).__name__}"
    called = _names(names, cuts, other_names)
    wholes = match.matched(where, cuts, called, tensors, patterns, strict)
    loading = _Loading(session, cuts, wholes, progress)
    with loading.shown():
        return {name: loading.load(name, wholes[name], one) for name, one in cuts.items()}


class _Loading:
    """Weights on their way; those that are the same on each rank are loaded once."""

    def __init__(
        self, session: Session, cuts: Mapping[str, Cut], wholes: Mapping[str, Whole], progress: bool
    ) -> None:
        self.session = session
        self.ranks = range(session.num_workers)
        self.all_bytes = sum(one.bytes_per_rank or 0 for one in cuts.values())
        self.bytes = 0
        self.on_their_way = 0
        self.loaded: dict[Any, DRef] = {}
        session.import_python_module(worker.__name__)
        tensors = (one.tensor for name in cuts for one in wholes[name].pieces)
        self.elsewhere = Elsewhere(session, (t.file for t in tensors if isinstance(t, Stored)))
        self.bar = terminal.Bar(progress)
        self.read = session.get_global_func(worker.READ)
        self.make = session.get_global_func(worker.MAKE)
        self.of_rank = {
            name: {r: cut.runs(r, wholes[name].shape) for r in self.ranks if r in cut.mesh.ranks}
            for name, cut in cuts.items()
        }
        self.used: dict[str, Counter[int]] = {}
        self.rooms = self._rooms(cuts)

    def _rooms(self, cuts: Mapping[str, Cut]) -> dict[str, DRef]:
        """Return memory of the workers for all parts of a type."""
        for name, cut in cuts.items():
            self._place(cut.dtype, self.of_rank[name])
        needed, self.used = self.used, {}
        room = self.session.get_global_func(worker.ROOM)
        return {
            dtype: room(json.dumps({"dtype": dtype, "bytes": by_rank}))
            for dtype, by_rank in needed.items()
        }

    def _place(self, dtype: str, of_rank: Mapping[int, Runs]) -> dict[int, int]:
        """Return where the next part begins in the room for parts of its type, by ranks."""
        used = self.used.setdefault(dtype, Counter())
        places = {}
        for rank, runs in of_rank.items():
            places[rank] = used[rank]
            used[rank] += -(-byte_count(dtype, extents(runs)) // _ALIGNMENT) * _ALIGNMENT
        return places

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Wait for what is on its way at the end, and let nothing of the progress be left."""
        try:
            yield
            self.session.sync()
        finally:
            self.bar.end()

    def load(self, name: str, whole: Whole, cut: Cut) -> DRef:
        """Return a weight that is there, or on its way."""
        of_rank = self.of_rank[name]
        memory = tuple(one.tensor.memory for one in whole.pieces if isinstance(one.tensor, Held))
        key = (whole, memory, cut.dtype, tuple(of_rank.items()))
        if key not in self.loaded:
            stored = all(isinstance(one.tensor, Stored) for one in whole.pieces)
            send = self._stored if stored else self._held
            self.loaded[key] = send(name, whole.pieces, cut.dtype, of_rank)
        self._count(name, cut)
        return self.loaded[key]

    def _stored(
        self, name: str, pieces: Sequence[Any], dtype: str, of_rank: dict[int, Runs]
    ) -> DRef:
        different = list(dict.fromkeys(of_rank.values()))
        said = {
            "name": name,
            "pieces": [
                {
                    "path": one.tensor.file.path,
                    "state": one.tensor.file.state,
                    "dtype": one.tensor.dtype,
                    "offset": one.tensor.offset,
                    "shape": one.shape,
                    "begin": one.begin,
                }
                for one in pieces
            ],
            "dtype": dtype,
            "place": self._place(dtype, of_rank),
            "runs": different,
            "of_rank": {rank: different.index(runs) for rank, runs in of_rank.items()},
            "sends": self.elsewhere.sends((one.tensor.file for one in pieces), different, of_rank),
            "broadcast": f"runtime.disco.{self.session.backend}.broadcast_from_worker0",
            "settle": f"runtime.disco.{self.session.backend}.sync_worker",
        }
        return self.read(json.dumps(said), self.rooms[dtype])

    def _held(self, name: str, pieces: Sequence[Any], dtype: str, of_rank: dict[int, Runs]) -> DRef:
        arrays = [one.tensor.array().reshape(one.shape) for one in pieces]
        different = list(dict.fromkeys(of_rank.values()))
        shapes = {str(rank): extents(runs) for rank, runs in of_rank.items()}
        target = None
        for runs in different:
            part = np.zeros(extents(runs), np.dtype(dtype))
            try:
                for one, array in zip(pieces, arrays, strict=True):
                    for place, source in moves_of_box(runs, one.begin, one.shape):
                        convert(array[source], part[place] if place else part[...])
            except ValueError as error:
                raise WeightsError(f"load_weights: {name!r}: {error}") from error
            if len(different) == 1 and len(of_rank) == len(self.ranks):
                return self.session.put(part)
            if target is None:
                places = self._place(dtype, of_rank)
                said = {"name": name, "dtype": dtype, "shapes": shapes, "place": places}
                target = self.make(json.dumps(said), self.rooms[dtype])
            for rank in (rank for rank, has in of_rank.items() if has == runs):
                target.debug_copy_from(rank, part)
        assert target is not None
        return target

    def _count(self, name: str, cut: Cut) -> None:
        self.bytes += cut.bytes_per_rank or 0
        self.on_their_way += cut.bytes_per_rank or 0
        if self.on_their_way >= _AT_ONCE:
            self.session.sync()
            self.on_their_way = 0
        how = "loading and sending" if self.elsewhere else "loading"
        self.bar.show(self.bytes / max(1, self.all_bytes), f"{how} {name}")


def _weights(cut: Any, workers: int) -> dict[str, Cut]:
    """Return the parameters that are weights."""
    name = "load_weights: cut"
    arguments.instance(name, cut, Mapping, _CUT)
    for key, one in cut.items():
        arguments.text(f"{name}, a name", key)
        if not hasattr(one, "runs") or not hasattr(one, "mesh"):
            raise arguments.wrong_type(f"{name}, of {key!r}", "a Cut, as in parallel.cut", one)
        if max(one.mesh.ranks) >= workers:
            raise ValueError(
                f"{name}: {key!r} is divided among the ranks of {one.mesh}, and the session has "
                f"{workers} workers: open it with {max(one.mesh.ranks) + 1}"
            )
    return {key: one for key, one in cut.items() if not one.is_input}


def _names(names: Any, cuts: Mapping[str, Cut], other_names: Mapping[str, str]) -> dict[str, Name]:
    """Return what the weight of each parameter is called in the source."""
    if names is None:
        names = {}
    if callable(names):
        found = {name: names(name) for name in cuts}
    elif isinstance(names, Mapping):
        unknown = [one for one in names if one not in cuts]
        if unknown:
            near = get_close_matches(str(unknown[0]), cuts)
            hint = f"near it are {', '.join(map(repr, near))}" if near else "no name is near it"
            raise ValueError(
                f"load_weights: names: there is no parameter {arguments.show(unknown[0])}; {hint}"
            )
        found = {name: names.get(name, name) for name in cuts}
    else:
        raise arguments.wrong_type("load_weights: names", _NAMES, names)
    for name, called in found.items():
        if not isinstance(called, Joined):
            arguments.text(f"load_weights: names, of {name!r}", called)
            found[name] = other_names.get(called, called)
    return found
