# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled model on the workers of a session: a prompt in, greedy tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm_ffi

import tvm_ipc
from tvm_ipc.demo import weights
from tvm_ipc.demo.config import Config
from tvm_ipc.demo.model import DECODE, PREFILL, Shard, cache_shapes
from tvm_ipc.demo.weights import Array

#: Seconds of work that are sent to the workers at once.
_AHEAD: Final = 0.2

#: Name, value, and how it is divided among workers.
Weight = tuple[str, Array, Shard | None]


@dataclass(frozen=True)
class Generation:
    """What the model said to a prompt.

    Attributes
    ----------
    tokens : those of each worker.
    logits : a row for each token, of worker 0.
    prefill, decode : seconds from the prompt to the first token, and from there to the last.
    """

    tokens: list[list[int]]
    logits: Array
    prefill: float
    decode: float


class Generator:
    """The model on the workers of a session: its weights and caches are there once."""

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
        pack = session.get_global_func("vm.builtin.make_tuple")
        self._field = session.get_global_func("vm.builtin.tuple_getitem")
        parts = []
        for _, value, how in model_weights:
            if how is None:
                parts.append(session.put(value))
            else:
                part = weights.shard(value, how, workers)
                parts.append(session.scatter(part, in_group=False))
            progress()
        self._weights = pack(*parts)
        shapes = cache_shapes(config, workers)
        self._caches = pack(*[session.empty(shape, config.dtype) for shape in shapes])
        session.sync()

    def generate(
        self, prompt: Sequence[int], count: int, progress: Callable[[int], None] = lambda _: None
    ) -> Generation:
        """Return `count` tokens; `progress` hears how many there are."""
        self._check(prompt, count)
        total = len(prompt)
        tokens = self.session.put(np.asarray(prompt, "int32"))
        self.session.sync()
        start = time.perf_counter()
        said = [self._prefill(tokens, tvm_ffi.Shape([total]), self._caches, self._weights)]
        self.session.sync()
        first = time.perf_counter()
        # A step takes no longer than the prompt.
        ahead = max(1, int(_AHEAD / (first - start)))
        while len(said) < count:
            progress(len(said))
            begin = time.perf_counter()
            ahead = min(ahead, count - len(said))
            for _ in range(ahead):
                total += 1
                shape = tvm_ffi.Shape([total])
                said.append(self._decode(said[-1], shape, self._caches, self._weights))
            self.session.sync()
            # The next batch is no longer than people like to wait for a sign of life.
            took = time.perf_counter() - begin
            ahead = max(1, min(2 * ahead, int(_AHEAD / (took / ahead))))
        end = time.perf_counter()
        progress(count)
        tokens_said = [self._field(step, 0) for step in said]
        logits = [self._field(step, 1) for step in said]
        return Generation(
            tokens=[
                [int(self.session.get(token, rank)[0]) for token in tokens_said]
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
            raise ValueError(f"{count} tokens are wanted; it must be at least 1")
        wrong = [token for token in prompt if not 0 <= token < self.config.vocabulary]
        if wrong:
            raise ValueError(
                f"the prompt has the token {wrong[0]}; they are 0 to {self.config.vocabulary - 1}"
            )
        # The last token is not looked at, so it needs no place.
        need = len(prompt) + count - 1
        if need > self.config.context:
            raise ValueError(
                f"the KV cache is full before the end: a prompt of {len(prompt)} tokens and "
                f"{count} new ones need a context of {need}, and the model has "
                f"{self.config.context}; take a shorter prompt, fewer tokens, or a longer context"
            )
