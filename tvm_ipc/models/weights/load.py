# SPDX-License-Identifier: Apache-2.0
"""Load the weights of a model into the workers of a session, to each worker its shards."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import WeightsError
from tvm_ipc.index_spans_per_axis import Spans, shape_of, slice_pairs_in_box
from tvm_ipc.models.weights import in_memory_weight_sources, list_checkpoint_tensors, match, worker
from tvm_ipc.models.weights.files_unreadable_on_other_nodes import RemoteFiles
from tvm_ipc.models.weights.in_memory_weight_sources import HostTensor
from tvm_ipc.models.weights.slice_reader import convert
from tvm_ipc.models.weights.stack_or_concat_source_tensors import Fused, Name, SourceTensor
from tvm_ipc.models.weights.tensor_in_file import FileTensor, byte_count
from tvm_ipc.runtime import terminal_progress_line
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.session import Session

if TYPE_CHECKING:
    from tvm_ipc.spmd import ShardSpec

#: The names in a source by the names of parameters, or a function from the latter to the former.
Names: TypeAlias = "Mapping[str, Name] | Callable[[str], Name] | None"

_SHARDS: Final = "a mapping from names to ShardSpecs: parallel.shards"
_NAMES: Final = (
    "a mapping from names of parameters to names in the source, such a function, or None"
)
#: The most bytes in flight to the workers before the controller waits for them.
_MAX_IN_FLIGHT: Final = 1 << 28
#: The alignment of a shard in the memory pool of a rank, in bytes.
_ALIGNMENT: Final = 128


def load_weights(
    session: Session,
    source: Any,
    shards: Mapping[str, ShardSpec],
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, DRef]:
    """Load the weights of a model into the workers, and return them in the order of `shards`.

    Each worker gets its shard of each weight. Workers read their shards from files themselves, all
    at the same time; the controller reads only the headers. Files that another node cannot read
    (see docs/nodes.md) are read by worker 0, which sends each worker its shards. All names, shapes
    and types are compared before anything is loaded. Floats are converted to the type that the
    program expects; integers are converted if no value changes.

    Parameters
    ----------
    session : the session whose workers get the weights.
    source : a safetensors file; a folder with one, or with several and an index; a folder that
        `tvm.contrib.tvmjs` or mlc-llm wrote; an ExportedProgram or a model of PyTorch; or a mapping
        from names to arrays or tensors.
    shards : how each parameter is sharded: `Parallelized.shards`. Inputs in it are skipped.
    names : the names in the source of the parameters whose names differ. Parameters may share a
        weight: `{"lm_head.weight": "model.embed_tokens.weight"}`. Use `stack` and `concat` of
        `tvm_ipc.models.weights` for a parameter that is fused from several tensors.
    ignore : patterns of names in the source that the program does not need, such as "*.inv_freq".
        Other tensors that are not the weight of any parameter are an error. Those of models of
        PyTorch are all ignored.
    progress : show a progress bar on a terminal if loading takes longer than a second.

    Returns
    -------
    dict
        A reference to each weight, by the names of the parameters.

    Raises
    ------
    WeightsError
        Weights are missing, superfluous, or have another shape or type than the program expects; or
        a file is damaged.
    WorkerError
        A worker could not read its shard. The session stays usable.

    Examples
    --------
    >>> import numpy as np
    >>> import tvm_ipc
    >>> from tvm_ipc import comm
    >>> spec = tvm_ipc.spmd.ShardSpec(
    ...     "w", "w", (4, 2), "float32", comm.Mesh({"tp": 2}), (comm.Shard(0),)
    ... )
    >>> source = {"w": np.arange(8, dtype="float32").reshape(4, 2)}
    >>> with tvm_ipc.Session(2) as session:
    ...     weights = tvm_ipc.load_weights(session, source, {"w": spec})
    ...     session.get(weights["w"], rank=1).tolist()
    [[4.0, 5.0], [6.0, 7.0]]

    Weights of a model, in the order of its parameters:

    >>> parallel = tvm_ipc.parallelize(mod, plan, 2)  # doctest: +SKIP
    >>> weights = tvm_ipc.load_weights(session, "folder", parallel.shards)  # doctest: +SKIP
    >>> main(ids, *weights.values())  # doctest: +SKIP
    """
    arguments.instance("load_weights: session", session, Session, "a tvm_ipc.Session")
    specs = _check_shards(shards, session.num_workers)
    progress = arguments.flag("load_weights: progress", progress)
    patterns = arguments.texts("load_weights: ignore", ignore, "patterns of names in the source")
    tensors: Mapping[str, FileTensor | HostTensor]
    if isinstance(source, (str, os.PathLike)):
        path = arguments.path("load_weights: source", source, "a file or a folder")
        tensors, aliases, strict = list_checkpoint_tensors.read_checkpoint(path), {}, True
        description = str(path)
    else:
        collected = in_memory_weight_sources.collect_tensors(source)
        tensors, aliases, strict = collected.by_name, collected.other_names, collected.chosen
        description = f"the {type(source).__name__}"
    source_names = _source_names(names, specs, aliases)
    sources = match.match_weights(description, specs, source_names, tensors, patterns, strict)
    loader = _Loader(session, specs, sources, progress)
    with loader.progress():
        return {name: loader.load(name, sources[name], spec) for name, spec in specs.items()}


class _Loader:
    """Loads weights, and loads those that are equal on each rank only once."""

    def __init__(
        self,
        session: Session,
        specs: Mapping[str, ShardSpec],
        sources: Mapping[str, SourceTensor],
        progress: bool,
    ) -> None:
        self.session = session
        self.ranks = range(session.num_workers)
        self.total_bytes = sum(spec.bytes_per_rank or 0 for spec in specs.values())
        self.loaded_bytes = 0
        self.bytes_in_flight = 0
        self.loaded: dict[Any, DRef] = {}
        session.import_python_module(worker.__name__)
        tensors = (piece.tensor for name in specs for piece in sources[name].pieces)
        self.remote_files = RemoteFiles(
            session, (t.file for t in tensors if isinstance(t, FileTensor))
        )
        self.bar = terminal_progress_line.Bar(progress)
        self.read = session.get_global_func(worker.READ)
        self.make = session.get_global_func(worker.MAKE)
        self.spans_of_rank = {
            name: {
                rank: spec.spans(rank, sources[name].shape)
                for rank in self.ranks
                if rank in spec.mesh.ranks
            }
            for name, spec in specs.items()
        }
        self.pool_bytes: dict[str, Counter[int]] = {}
        self.pools = self._reserve_pools(specs)

    def _reserve_pools(self, specs: Mapping[str, ShardSpec]) -> dict[str, DRef]:
        """Return one memory pool of the workers for all shards of each type."""
        for name, spec in specs.items():
            self._allocate(spec.dtype, self.spans_of_rank[name])
        needed, self.pool_bytes = self.pool_bytes, {}
        reserve = self.session.get_global_func(worker.RESERVE_POOL)
        return {
            dtype: reserve(json.dumps({"dtype": dtype, "bytes": by_rank}))
            for dtype, by_rank in needed.items()
        }

    def _allocate(self, dtype: str, spans_of_rank: Mapping[int, Spans]) -> dict[int, int]:
        """Return the offset of the next shard in the pool of its type, by ranks."""
        used = self.pool_bytes.setdefault(dtype, Counter())
        offsets = {}
        for rank, spans in spans_of_rank.items():
            offsets[rank] = used[rank]
            used[rank] += -(-byte_count(dtype, shape_of(spans)) // _ALIGNMENT) * _ALIGNMENT
        return offsets

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Wait for the workers at the end, and remove the progress bar in any case."""
        try:
            yield
            self.session.sync()
        finally:
            self.bar.end()

    def load(self, name: str, source: SourceTensor, spec: ShardSpec) -> DRef:
        """Return a weight, whose data may still be in flight."""
        spans_of_rank = self.spans_of_rank[name]
        memory = tuple(
            piece.tensor.memory for piece in source.pieces if isinstance(piece.tensor, HostTensor)
        )
        key = (source, memory, spec.dtype, tuple(spans_of_rank.items()))
        if key not in self.loaded:
            in_files = all(isinstance(piece.tensor, FileTensor) for piece in source.pieces)
            load = self._load_from_files if in_files else self._load_from_memory
            self.loaded[key] = load(name, source.pieces, spec.dtype, spans_of_rank)
        self._count(name, spec)
        return self.loaded[key]

    def _load_from_files(
        self, name: str, pieces: Sequence[Any], dtype: str, spans_of_rank: dict[int, Spans]
    ) -> DRef:
        request = self._request(name, dtype, spans_of_rank)
        files = (piece.tensor.file for piece in pieces)
        request |= {
            "pieces": [
                {
                    "path": piece.tensor.file.path,
                    "state": piece.tensor.file.state,
                    "dtype": piece.tensor.dtype,
                    "offset": piece.tensor.offset,
                    "shape": piece.shape,
                    "begin": piece.begin,
                }
                for piece in pieces
            ],
            "sends": self.remote_files.sends(files, request["shards"], spans_of_rank),
            "broadcast": f"runtime.disco.{self.session.backend}.broadcast_from_worker0",
            "sync": f"runtime.disco.{self.session.backend}.sync_worker",
        }
        return self.read(json.dumps(request), self.pools[dtype])

    def _request(self, name: str, dtype: str, spans_of_rank: Mapping[int, Spans]) -> dict[str, Any]:
        """Return what the workers need to allocate their shards of a weight."""
        shards = list(dict.fromkeys(spans_of_rank.values()))
        return {
            "name": name,
            "dtype": dtype,
            "pool_offset": self._allocate(dtype, spans_of_rank),
            "shards": shards,
            "shard_of_rank": {rank: shards.index(spans) for rank, spans in spans_of_rank.items()},
        }

    def _load_from_memory(
        self, name: str, pieces: Sequence[Any], dtype: str, spans_of_rank: dict[int, Spans]
    ) -> DRef:
        arrays = [piece.tensor.array().reshape(piece.shape) for piece in pieces]
        shards = list(dict.fromkeys(spans_of_rank.values()))
        weight = None
        for spans in shards:
            shard = np.zeros(shape_of(spans), np.dtype(dtype))
            try:
                for piece, array in zip(pieces, arrays, strict=True):
                    for target, source in slice_pairs_in_box(spans, piece.begin, piece.shape):
                        convert(array[source], shard[target] if target else shard[...])
            except ValueError as error:
                raise WeightsError(f"load_weights: {name!r}: {error}") from error
            if len(shards) == 1 and len(spans_of_rank) == len(self.ranks):
                return self.session.put(shard)
            if weight is None:
                request = self._request(name, dtype, spans_of_rank)
                weight = self.make(json.dumps(request), self.pools[dtype])
            for rank in (rank for rank, its_spans in spans_of_rank.items() if its_spans == spans):
                weight.debug_copy_from(rank, shard)
        assert weight is not None
        return weight

    def _count(self, name: str, spec: ShardSpec) -> None:
        """Update the progress bar, and wait for the workers if too much is in flight."""
        self.loaded_bytes += spec.bytes_per_rank or 0
        self.bytes_in_flight += spec.bytes_per_rank or 0
        if self.bytes_in_flight >= _MAX_IN_FLIGHT:
            self.session.sync()
            self.bytes_in_flight = 0
        action = "loading and sending" if self.remote_files else "loading"
        self.bar.show(self.loaded_bytes / max(1, self.total_bytes), f"{action} {name}")


def _check_shards(shards: Any, workers: int) -> dict[str, ShardSpec]:
    """Check the argument `shards`, and return its specs without those of inputs."""
    argument = "load_weights: shards"
    arguments.instance(argument, shards, Mapping, _SHARDS)
    for name, spec in shards.items():
        arguments.text(f"{argument}, a name", name)
        if not hasattr(spec, "spans") or not hasattr(spec, "mesh"):
            raise arguments.wrong_type(
                f"{argument}, of {name!r}", "a ShardSpec, as in parallel.shards", spec
            )
        if max(spec.mesh.ranks) >= workers:
            raise ValueError(
                f"{argument}: {name!r} is sharded on the ranks of {spec.mesh}, but the session has "
                f"{workers} workers; open it with {max(spec.mesh.ranks) + 1}"
            )
    return {name: spec for name, spec in shards.items() if not spec.is_input}


def _source_names(
    names: Any, specs: Mapping[str, ShardSpec], aliases: Mapping[str, str]
) -> dict[str, Name]:
    """Return the name in the source of each parameter."""
    if names is None:
        names = {}
    if callable(names):
        source_names = {parameter: names(parameter) for parameter in specs}
    elif isinstance(names, Mapping):
        unknown = [parameter for parameter in names if parameter not in specs]
        if unknown:
            near = get_close_matches(str(unknown[0]), specs)
            hint = arguments.similar(near) if near else "no name is similar"
            raise ValueError(
                f"load_weights: names: there is no parameter {arguments.quote(unknown[0])}; {hint}"
            )
        source_names = {parameter: names.get(parameter, parameter) for parameter in specs}
    else:
        raise arguments.wrong_type("load_weights: names", _NAMES, names)
    for parameter, name in source_names.items():
        if not isinstance(name, Fused):
            arguments.text(f"load_weights: names, of {parameter!r}", name)
            source_names[parameter] = aliases.get(name, name)
    return source_names
