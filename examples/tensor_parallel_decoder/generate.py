# SPDX-License-Identifier: Apache-2.0
"""Generate tokens with the compiled model on the workers of a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm_ffi

import tvm_ipc
from tvm_ipc.tvm_private_names import MAKE_TUPLE, TUPLE_GETITEM

from . import random_weights
from .decoder_config import Config
from .decoder_model import DECODE, PREFILL, Shard, cache_shapes
from .random_weights import Array

#: Length of a batch of steps that is sent to the workers at once, in seconds.
_BATCH_SECONDS: Final = 0.2

#: Name, value, and sharding; None for a replicated weight.
Weight = tuple[str, Array, Shard | None]


@dataclass(frozen=True)
class Generation:
    """The tokens generated for a prompt, with their logits and times.

    Attributes
    ----------
    tokens : the tokens of each worker.
    logits : one row per token, of worker 0.
    prefill, decode : seconds to the first token, and from there to the last.
    """

    tokens: list[list[int]]
    logits: Array
    prefill: float
    decode: float


class Generator:
    """The model on the workers of a session, with its weights and caches."""

    def __init__(
        self,
        session: tvm_ipc.Session,
        executable: Any,
        config: Config,
        model_weights: Sequence[Weight],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.session, self.config = session, config
        workers = session.num_workers
        config.check_workers(workers)
        functions = session.load_vm_module(executable)
        self._prefill, self._decode = functions[PREFILL], functions[DECODE]
        pack = session.get_global_func(MAKE_TUPLE)
        self._field = session.get_global_func(TUPLE_GETITEM)
        loaded = []
        for _, value, spec in model_weights:
            if spec is None:
                loaded.append(session.put(value))
            else:
                shards = random_weights.shard(value, spec, workers)
                loaded.append(session.scatter(shards, in_group=False))
            progress()
        self._weights = pack(*loaded)
        shapes = cache_shapes(config, workers)
        self._caches = pack(*[session.empty(shape, config.dtype) for shape in shapes])
        session.sync()

    def use_threads(self, count: int) -> None:
        """Let each worker run its kernels, with those of OpenBLAS, in this number of threads."""
        self.session.get_global_func("tvm_ipc.worker.set_threads")(count)

    def generate(
        self, prompt: Sequence[int], count: int, progress: Callable[[int], None] = lambda _: None
    ) -> Generation:
        """Generate `count` tokens; `progress` is called with the number of tokens so far."""
        self._check(prompt, count)
        total = len(prompt)
        tokens = self.session.put(np.asarray(prompt, "int32"))
        self.session.sync()
        start = time.perf_counter()
        outputs = [self._prefill(tokens, tvm_ffi.Shape([total]), self._caches, self._weights)]
        self.session.sync()
        first = time.perf_counter()
        # A decoding step takes no longer than the prompt.
        batch = max(1, int(_BATCH_SECONDS / (first - start)))
        while len(outputs) < count:
            progress(len(outputs))
            begin = time.perf_counter()
            batch = min(batch, count - len(outputs))
            for _ in range(batch):
                total += 1
                shape = tvm_ffi.Shape([total])
                outputs.append(self._decode(outputs[-1], shape, self._caches, self._weights))
            self.session.sync()
            # Keep batches short, so that the progress bar moves.
            seconds = time.perf_counter() - begin
            batch = max(1, min(2 * batch, int(_BATCH_SECONDS / (seconds / batch))))
        end = time.perf_counter()
        progress(count)
        tokens_of_steps = [self._field(output, 0) for output in outputs]
        logits = [self._field(output, 1) for output in outputs]
        return Generation(
            tokens=[
                [int(self.session.get(token, rank)[0]) for token in tokens_of_steps]
                for rank in range(self.session.num_workers)
            ],
            logits=np.stack([self.session.get(row) for row in logits]),
            prefill=first - start,
            decode=end - first,
        )

    def _check(self, prompt: Sequence[int], count: int) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; it must have at least one token")
        if count < 1:
            raise ValueError(f"the number of new tokens is {count}; it must be at least 1")
        invalid = [token for token in prompt if not 0 <= token < self.config.vocabulary]
        if invalid:
            raise ValueError(
                f"the prompt has the token {invalid[0]}; tokens must be 0 to "
                f"{self.config.vocabulary - 1}"
            )
        # The last token is not an input, so it needs no position in the cache.
        need = len(prompt) + count - 1
        if need > self.config.context:
            raise ValueError(
                f"the KV cache is too small: a prompt of {len(prompt)} tokens and {count} new ones "
                f"need a context of {need}, but the model has {self.config.context}; use a shorter "
                "prompt, fewer tokens, or a longer context"
            )
