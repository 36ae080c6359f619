# SPDX-License-Identifier: Apache-2.0
"""Load a language model onto the workers of a session, and generate tokens with it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final, overload

import numpy as np
import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.compile_cache import CompiledModel, load_or_compile
from tvm_ipc.models.hf.model_folder import DTYPES, ModelFolder, read_folder
from tvm_ipc.models.hf.prompts import TextPrompt, as_text_prompt, check_vocabulary, encode
from tvm_ipc.models.hf.read_config_and_tokenizer import tokenizer as read_tokenizer
from tvm_ipc.models.hf.sampling import Sampler
from tvm_ipc.models.hf.text_stream import TextStream
from tvm_ipc.models.hf.user_sharding_plan import parse_plan
from tvm_ipc.models.hf.weight_to_stored_name_cache import weight_names
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint
from tvm_ipc.models.weights.load import load_weights
from tvm_ipc.models.weights.stack_or_concat_source_tensors import leaf_names
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.session import Session

#: Tokens of a prompt that one call processes. The attention scores of a head have this many rows.
_PREFILL_CHUNK: Final = 512
#: The capacity of a KV cache, in tokens, is a multiple of this.
_CAPACITY_STEP: Final = 64


def load(
    folder: str | os.PathLike[str],
    session: Session,
    *,
    plan: Any = None,
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Model:
    """Load the language model of a folder onto the workers of a session.

    The compiled model is cached in a folder (see `TVM_IPC_CACHE`). Each worker reads only its
    shards of the weights.

    Parameters
    ----------
    folder : a folder with config.json and *.safetensors, as `save_pretrained` of transformers
        writes it.
    session : the session whose workers share the model.
    plan : which weights to shard, and how. It is a mapping from patterns of weight names to styles
        or placements, as `parallelize` takes it; "auto" for automatic sharding; or None for the
        plan of transformers. If transformers has no plan, None means automatic sharding.
    dtype : the type to compute in: "float32", "bfloat16" or "float16"; by default the type of the
        weights.
    progress : called with a short text before each step.

    Returns
    -------
    Model
        The model; it can be used as long as the session is open.

    Raises
    ------
    ModelError
        The folder has no supported model; the message names what it has instead.
    ValueError
        The plan names an unknown weight, or shards a weight that cannot be sharded.
    WeightsError
        The weights are damaged, or do not match the configuration.

    Examples
    --------
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(2) as session:
    ...     model = tvm_ipc.models.load("model", session)  # a folder of save_pretrained
    ...     tokens = list(model.generate([1, 15, 33], max_new_tokens=4))
    >>> len(tokens)
    4
    """
    arguments.instance("load: session", session, Session, "a tvm_ipc.Session")
    plan = parse_plan("load: plan", plan)
    if dtype is not None:
        arguments.one_of("load: dtype", dtype, DTYPES)
    arguments.function("load: progress", progress)
    model_folder = read_folder(folder)
    dtype = compute_dtype(model_folder, dtype)
    compiled = load_or_compile(model_folder, session.num_workers, dtype, progress, plan)
    progress("loading weights")
    return Model(session, model_folder, compiled)


def compute_dtype(folder: ModelFolder, dtype: str | None) -> str:
    """Return the type to compute in: `dtype`, or the type of the folder's weights if it is None."""
    chosen = dtype or folder.dtype
    if chosen not in DTYPES:
        raise ModelError(
            f"{folder.path}: its weights are {chosen}, and a model computes in one of "
            f"{', '.join(DTYPES)}; choose a dtype"
        )
    return chosen


class Model:
    """A language model on the workers of a session; call `load` to get one.

    Attributes
    ----------
    session : the session whose workers run the model.
    folder : the folder that the model was loaded from.
    compiled : the compiled model that the workers run.
    tokenizer : the tokenizer of the folder, read when it is first used.

    Examples
    --------
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(2) as session:
    ...     model = tvm_ipc.models.load("model", session)  # a folder of save_pretrained
    ...     tokens = list(model.generate([1, 15, 33], max_new_tokens=4))
    >>> len(tokens)
    4
    """

    def __init__(
        self,
        session: Session,
        folder: ModelFolder,
        compiled: CompiledModel,
        tokenizer: Any = None,
    ) -> None:
        self.session, self.folder, self.compiled = session, folder, compiled
        self._tokenizer = tokenizer
        functions = session.load_vm_module(str(compiled.library))
        self._prefill, self._decode = functions["prefill"], functions["decode"]
        self._make_tuple = session.get_global_func("vm.builtin.make_tuple")
        self._weights = self._make_tuple(*_load_weights(session, folder, compiled))
        session.sync()

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.compiled.vocabulary

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder, as transformers reads it; `ModelError` if it has none."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self.folder)
        return self._tokenizer

    def tokenize(self, prompt: TextPrompt | Iterable[int]) -> list[int]:
        """Return the tokens of a prompt, as `generate` passes them to the model.

        Parameters
        ----------
        prompt : a text, the messages of a chat, or tokens, as in `generate`.

        Returns
        -------
        list[int]
            The tokens, with those that the tokenizer or the chat template adds.
        """
        return self._tokenize("tokenize", prompt)

    @overload
    def generate(
        self,
        prompt: TextPrompt,
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Iterable[int | str] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> TextStream: ...

    @overload
    def generate(
        self,
        prompt: Iterable[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[int]: ...

    def generate(
        self,
        prompt: TextPrompt | Iterable[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Iterable[int | str] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[int] | TextStream:
        """Continue a prompt: yield text for a text or a chat, and tokens for tokens.

        Each piece of text and each token is yielded as soon as it is computed. All text without
        streaming is `"".join(model.generate(prompt))`.

        Parameters
        ----------
        prompt : a text; or the messages of a chat, such as `[{"role": "user", "content": "Hi"}]`,
            which the chat template of the model converts to a prompt for the next answer; or
            tokens, at least one.
        max_new_tokens : the most tokens to generate.
        temperature : 0 for greedy decoding; otherwise the logits are divided by it, and tokens are
            sampled.
        top_k : sample from the `top_k` most probable tokens; from all of them if None.
        top_p : sample from the smallest set of most probable tokens whose probabilities sum to at
            least `top_p`.
        seed : the seed for sampling; with None the results differ each time.
        stop : what ends the generation. Strings end a text, which then has all that comes before
            the first of them. Tokens replace the end-of-sequence tokens of the model. A token that
            ends the generation is yielded too, if tokens are yielded. An empty list means that only
            `max_new_tokens` ends it.
        cancelled : called after each 512 tokens of the prompt and before each new token; the
            generation ends if it returns True.

        Yields
        ------
        str or int
            The next piece of the text, from a `TextStream`; or the next token, for tokens.

        Raises
        ------
        ModelError
            The folder has no tokenizer, or no chat template, and the prompt needs one; or the chat
            template refuses the messages.
        ValueError
            The prompt is empty, or prompt and `max_new_tokens` exceed the context of the model.
        """
        tokens = self._tokenize("generate", prompt)
        is_text = as_text_prompt(prompt) is not None
        wanted = "a number of tokens, 1 or more"
        count = arguments.integer("generate: max_new_tokens", max_new_tokens, wanted, 1)
        context = self.folder.context
        if context is not None and len(tokens) + count > context:
            raise ValueError(
                f"generate: {len(tokens)} tokens and {count} new ones are more than the "
                f"{context} that the model supports; pass fewer tokens, or a smaller max_new_tokens"
            )
        sampler = Sampler(temperature, top_k, top_p, seed)
        ends, stop_strings = self._check_stop(stop, is_text)
        if cancelled is not None:
            arguments.function("generate: cancelled", cancelled)
        generated = self._generate(tokens, count, sampler, ends, cancelled)
        if not is_text:
            return generated
        return TextStream(self.tokenizer, generated, count, ends, stop_strings)

    def _generate(
        self,
        prompt: list[int],
        count: int,
        sampler: Sampler,
        ends: frozenset[int],
        cancelled: Callable[[], bool] | None,
    ) -> Generator[int, None, None]:
        caches = self._allocate_caches(len(prompt) + count)
        for seen in range(0, len(prompt), _PREFILL_CHUNK):
            chunk = prompt[seen : seen + _PREFILL_CHUNK]
            logits = self._step(self._prefill, chunk, seen, caches)
            if cancelled is not None:
                self.session.sync()  # commands are asynchronous: those already sent would run
                if cancelled():
                    return
        seen = len(prompt)
        for number in range(1, count + 1):
            token = sampler(self.session.get(logits)[0])
            yield token
            if token in ends or number == count or (cancelled is not None and cancelled()):
                return
            logits = self._step(self._decode, [token], seen, caches)
            seen += 1

    def _step(self, function: Any, tokens: list[int], seen: int, caches: DRef) -> DRef:
        ids = np.array([tokens], "int64")
        positions = np.arange(seen, seen + len(tokens), dtype="int64")[None]
        result: DRef = function(ids, positions, tvm_ffi.Shape([seen]), caches, self._weights)
        return result

    def _allocate_caches(self, tokens: int) -> DRef:
        capacity = -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        tensors = [
            self.session.empty((capacity, spec.heads, spec.dim), spec.dtype)
            for spec in self.compiled.caches
        ]
        caches: DRef = self._make_tuple(*tensors)
        return caches

    def _tokenize(self, where: str, prompt: object) -> list[int]:
        name = f"{where}: prompt"
        text = as_text_prompt(prompt)
        if text is not None:
            tokens = encode(name, self.tokenizer, self.folder, text)
            check_vocabulary(name, tokens, self.vocabulary)
            return tokens
        wanted = (
            f"a text, a list of chat messages, or a sequence of tokens, each 0 to "
            f"{self.vocabulary - 1}"
        )
        tokens = list(arguments.integers(name, prompt, wanted, 0, self.vocabulary - 1))
        if not tokens:
            raise arguments.wrong_value(name, f"{wanted}, at least one", prompt)
        return tokens

    def _check_stop(self, stop: object, is_text: bool) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return the end tokens and the stop strings."""
        name, wanted = "generate: stop", "numbers of tokens, or strings that are not empty"
        if stop is None:
            return self.folder.ends(), ()
        items = [stop] if isinstance(stop, str) else stop
        if isinstance(items, Iterable) and not isinstance(items, (bytes, dict)):
            items = list(items)
            strings = tuple(item for item in items if isinstance(item, str))
            numbers = [item for item in items if not isinstance(item, str)]
        else:
            raise arguments.wrong_type(name, wanted, stop)
        tokens = frozenset(arguments.integers(name, numbers, wanted))
        if not strings:
            return tokens, ()
        if "" in strings:
            raise arguments.wrong_value(name, wanted, stop)
        if not is_text:
            raise ValueError(
                f"{name} is {stop!r} and has strings, but tokens are continued with tokens; pass "
                "the prompt as a text, or the numbers of tokens as stop"
            )
        return tokens or self.folder.ends(), strings


def _load_weights(session: Session, folder: ModelFolder, compiled: CompiledModel) -> list[DRef]:
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
    loaded = load_weights(session, folder.path, compiled.shards, names=names, ignore=ignored)
    return list(loaded.values())
