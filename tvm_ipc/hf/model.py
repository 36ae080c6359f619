# SPDX-License-Identifier: Apache-2.0
"""A language model on the workers of a session."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError
from tvm_ipc.hf.called import called
from tvm_ipc.hf.compiling import Compiled, compiled
from tvm_ipc.hf.folder import DTYPES, Folder, read_folder
from tvm_ipc.hf.plans import plan_of
from tvm_ipc.hf.sampling import Sampler
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.session import Session
from tvm_ipc.weights.folder import stored_in
from tvm_ipc.weights.joined import leaves
from tvm_ipc.weights.load import load_weights

#: Tokens of a prompt that are looked at together; scores are this times the length.
_AT_ONCE: Final = 512
#: Caches have room for a multiple of so many tokens.
_ROOM: Final = 64


def load(
    folder: str | os.PathLike[str],
    session: Session,
    *,
    plan: Any = None,
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Model:
    """Return the language model of a folder, on the workers of a session.

    What it is compiled to is kept in a cache folder (see `TVM_IPC_CACHE`). Each worker reads its
    parts of the weights, and only these.

    Parameters
    ----------
    folder : with config.json and *.safetensors, as `save_pretrained` of transformers writes it.
    session : of as many workers as are to share the model.
    plan : which weights are divided, and how: a mapping from patterns of their names to styles or
        placements, as `parallelize` takes it, "auto" to find one, or None for that of transformers,
        which is found too where transformers has none.
    dtype : what to compute in: "float32", "bfloat16" or "float16"; by default the type of the
        weights.
    progress : hears what is done.

    Raises
    ------
    ModelError
        The folder has no model that is known; the message says what it has.
    ValueError
        The plan names what there is not, or divides what cannot be divided.
    WeightsError
        The weights are others than the configuration says, or damaged.
    """
    arguments.instance("load: session", session, Session, "a tvm_ipc.Session")
    planned = plan_of("load: plan", plan)
    if dtype is not None:
        arguments.one_of("load: dtype", dtype, DTYPES)
    arguments.function("load: progress", progress)
    found = read_folder(folder)
    made = compiled(found, session.num_workers, computed_in(found, dtype), progress, planned)
    progress("loading weights")
    return Model(session, found, made)


def computed_in(folder: Folder, dtype: str | None) -> str:
    """Return the type that a model computes in, which is that of its weights if None is given."""
    chosen = dtype or folder.dtype
    if chosen not in DTYPES:
        raise ModelError(
            f"{folder.path}: its weights are {chosen}, and a model computes in one of "
            f"{', '.join(DTYPES)}; choose a dtype"
        )
    return chosen


class Model:
    """A language model on the workers of a session; `load` makes one.

    Attributes
    ----------
    session : whose workers have it.
    folder : that it comes from.
    compiled : what the workers run.
    """

    def __init__(self, session: Session, folder: Folder, made: Compiled) -> None:
        self.session, self.folder, self.compiled = session, folder, made
        functions = session.load_vm_module(str(made.library))
        self._prefill, self._decode = functions["prefill"], functions["decode"]
        self._pack = session.get_global_func("vm.builtin.make_tuple")
        self._weights = self._pack(*_weights(session, folder, made))
        session.sync()

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.compiled.vocabulary

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
    ) -> Iterator[int]:
        """Yield the tokens that continue a text, each as soon as it is known.

        Parameters
        ----------
        ids : the tokens of the text, at least one.
        max_new_tokens : how many to yield, at most.
        temperature : 0 takes the likeliest token each time; otherwise they are drawn.
        top_k : draw from so many of the likeliest tokens; from all of them if None.
        top_p : draw from the fewest of these that together are at least so likely.
        seed : of the draws; with None they differ each time.
        stop : tokens after which there is nothing more to say; those of the model if None. They
            are yielded too.
        """
        prompt = self._prompt(ids)
        wanted = "a number of tokens, 1 or more"
        count = arguments.integer("generate: max_new_tokens", max_new_tokens, wanted, 1)
        context = self.folder.context
        if context is not None and len(prompt) + count > context:
            raise ValueError(
                f"generate: {len(prompt)} tokens and {count} new ones are more than the "
                f"{context} that the model was made for; give fewer, or a smaller max_new_tokens"
            )
        sampler = Sampler(temperature, top_k, top_p, seed)
        if stop is None:
            ends = self.folder.ends()
        else:
            ends = frozenset(arguments.integers("generate: stop", stop, "numbers of tokens"))
        return self._generate(prompt, count, sampler, ends)

    def _generate(
        self, prompt: list[int], count: int, sampler: Sampler, ends: frozenset[int]
    ) -> Iterator[int]:
        caches = self._caches(len(prompt) + count)
        for seen in range(0, len(prompt), _AT_ONCE):
            logits = self._step(self._prefill, prompt[seen : seen + _AT_ONCE], seen, caches)
        seen = len(prompt)
        for number in range(1, count + 1):
            token = sampler(self.session.get(logits)[0])
            yield token
            if token in ends or number == count:
                return
            logits = self._step(self._decode, [token], seen, caches)
            seen += 1

    def _step(self, function: Any, tokens: list[int], seen: int, caches: DRef) -> DRef:
        ids = np.array([tokens], "int64")
        places = np.arange(seen, seen + len(tokens), dtype="int64")[None]
        result: DRef = function(ids, places, tvm_ffi.Shape([seen]), caches, self._weights)
        return result

    def _caches(self, tokens: int) -> DRef:
        room = -(-tokens // _ROOM) * _ROOM
        parts = [
            self.session.empty((room, one.heads, one.dim), one.dtype)
            for one in self.compiled.caches
        ]
        caches: DRef = self._pack(*parts)
        return caches

    def _prompt(self, ids: object) -> list[int]:
        wanted = f"a sequence of tokens, each 0 to {self.vocabulary - 1}"
        found = list(arguments.integers("generate: ids", ids, wanted, 0, self.vocabulary - 1))
        if not found:
            raise arguments.wrong_value("generate: ids", f"{wanted}, at least one", ids)
        return found


def _weights(session: Session, folder: Folder, made: Compiled) -> list[DRef]:
    """Load weights under the names that the folder has for them."""
    stored = stored_in(folder.path)
    names = {name: one for name, one in called(folder, stored, made).items() if one != name}
    wanted = {leaf for name in made.cut for leaf in leaves(names.get(name, name))}
    ignored = [
        name
        for name in stored
        if name not in wanted and any(re.search(one, name) for one in made.ignored)
    ]
    loaded = load_weights(session, folder.path, made.cut, names=names, ignore=ignored)
    return list(loaded.values())
