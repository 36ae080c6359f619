# SPDX-License-Identifier: Apache-2.0
"""Call the functions of a compiled model on the workers, with its weights and KV caches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm_ffi

from tvm_ipc.models.hf.compile_cache import CompiledModel
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.weight_to_stored_name_cache import weight_names
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint
from tvm_ipc.models.weights.load import load_weights
from tvm_ipc.models.weights.stack_or_concat_source_tensors import leaf_names
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.session import Session

#: Tokens of a prompt that one call processes. The attention scores of a head have this many rows.
PREFILL_CHUNK: Final = 512
#: The capacity of a KV cache, in tokens, is a multiple of this.
_CAPACITY_STEP: Final = 64


class ModelSteps:
    """The steps of a model whose weights the workers have loaded.

    Parameters
    ----------
    session : the session whose workers run the model.
    folder : the folder of the weights.
    compiled : the compiled model.
    """

    def __init__(self, session: Session, folder: ModelFolder, compiled: CompiledModel) -> None:
        self.session, self.compiled = session, compiled
        functions = session.load_vm_module(str(compiled.library))
        self._prefill, self._decode = functions["prefill"], functions["decode"]
        self._loaded = _load_weights(session, folder, compiled)
        self._weights = session.tuple(list(self._loaded.values()))
        self._decode_batch: Any = None
        self._weights_of_batch: DRef | None = None
        session.sync()

    @property
    def has_batch(self) -> bool:
        """True if the function for batches has been loaded."""
        return self._decode_batch is not None

    def load_batch(self, compiled: CompiledModel) -> None:
        """Load the function for batches; it uses the weights that have been loaded."""
        self._decode_batch = self.session.load_vm_module(str(compiled.library))["decode_batch"]
        weights = [self._loaded[name] for name in compiled.shards]
        self._weights_of_batch = self.session.tuple(weights)

    def prefill(self, tokens: list[int], seen: int, caches: DRef) -> DRef:
        """Process tokens of a prompt after `seen` tokens, and return the logits of the last."""
        return self._call(self._prefill, tokens, seen, caches)

    def decode(self, token: int, seen: int, caches: DRef) -> DRef:
        """Process one token after `seen` tokens, and return its logits."""
        return self._call(self._decode, [token], seen, caches)

    def _call(self, function: Any, tokens: list[int], seen: int, caches: DRef) -> DRef:
        ids = np.array([tokens], "int64")
        positions = np.arange(seen, seen + len(tokens), dtype="int64")[None]
        result: DRef = function(ids, positions, tvm_ffi.Shape([seen]), caches, self._weights)
        return result

    def decode_batch(self, tokens: Sequence[int], seen: Sequence[int], caches: DRef) -> DRef:
        """Process a token of each request, and return the logits of each.

        Parameters
        ----------
        tokens : the token of each request.
        seen : the number of tokens before it.
        caches : the tuple of the caches of each request.
        """
        ids, positions = (np.array(numbers, "int64")[:, None] for numbers in (tokens, seen))
        at = tvm_ffi.Shape([max(seen)])
        result: DRef = self._decode_batch(ids, positions, at, caches, self._weights_of_batch)
        return result

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the KV caches of one request on each worker."""
        return _capacity(tokens) * sum(spec.bytes_per_token for spec in self.compiled.caches)

    def allocate_caches(self, tokens: int) -> DRef:
        """Allocate the KV caches of one request, for a number of tokens."""
        tensors = [
            self.session.empty((_capacity(tokens), spec.heads, spec.dim), spec.dtype)
            for spec in self.compiled.caches
        ]
        return self.session.tuple(tensors)


def _capacity(tokens: int) -> int:
    return -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP


def _load_weights(
    session: Session, folder: ModelFolder, compiled: CompiledModel
) -> Mapping[str, DRef]:
    """Load the weights, by the names that they have in the folder."""
    stored = read_checkpoint(folder.path)
    names = {
        name: stored_name
        for name, stored_name in weight_names(folder, stored, compiled).items()
        if stored_name != name
    }
    wanted = {leaf for name in compiled.shards for leaf in leaf_names(names.get(name, name))}
    ignored = [
        name
        for name in stored
        if name not in wanted and any(re.search(pattern, name) for pattern in compiled.ignored)
    ]
    return load_weights(session, folder.path, compiled.shards, names=names, ignore=ignored)
