# SPDX-License-Identifier: Apache-2.0
"""Load a language model onto the workers of a session, and generate tokens with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, overload

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.batch import (
    MAX_REQUESTS,
    Batch,
    CheckedPrompt,
    RequestTokens,
    add_and_iterate,
    several_prompts,
)
from tvm_ipc.models.hf.compile_cache import CompiledModel, load_or_compile
from tvm_ipc.models.hf.model_folder import DTYPES, ModelFolder, read_folder
from tvm_ipc.models.hf.model_steps import PREFILL_CHUNK, ModelSteps
from tvm_ipc.models.hf.prompts import TextPrompt, as_text_prompt, check_vocabulary, encode
from tvm_ipc.models.hf.read_config_and_tokenizer import tokenizer as read_tokenizer
from tvm_ipc.models.hf.sampling import Sampler
from tvm_ipc.models.hf.text_stream import TextStream
from tvm_ipc.models.hf.user_sharding_plan import parse_plan
from tvm_ipc.runtime.session import Session


def load(
    folder: str | os.PathLike[str],
    session: Session,
    *,
    plan: Any = None,
    dtype: str | None = None,
    reproducible: bool = False,
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
        or placements, as `parallelize` takes it; "auto" for automatic sharding; "experts" for the
        plan of transformers with the experts of a mixture sharded; or None for the plan of
        transformers. If transformers has no plan, None means automatic sharding.
    dtype : the type to compute in: "float32", "bfloat16" or "float16"; by default the type of the
        weights.
    reproducible : whether the bits of all logits must not depend on the number of workers, on
        threads, on batches, or on how a prompt is split. Then the number of workers is 1, 2, 4, 8
        or 16, and the dtype is float32 or bfloat16. See `docs/determinism.md`.
    progress : called with a short text before each step.

    Returns
    -------
    Model
        The model; it can be used as long as the session is open.

    Raises
    ------
    ModelError
        The folder has no supported model; the message names what it has instead.
    TransformError
        The model is to be reproducible, and has an operator for which that is not possible.
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
    reproducible = arguments.flag("load: reproducible", reproducible)
    arguments.function("load: progress", progress)
    model_folder = read_folder(folder)
    dtype = compute_dtype(model_folder, dtype)
    workers = session.num_workers
    compiled = load_or_compile(
        model_folder, workers, dtype, progress, plan, reproducible=reproducible
    )
    progress("loading weights")
    return Model(session, model_folder, compiled, progress=progress)


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
    progress : called with a short text before each step of a compilation.

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
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.session, self.folder, self.compiled = session, folder, compiled
        self.progress = progress
        self._tokenizer = tokenizer
        self._steps = ModelSteps(session, folder, compiled)

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

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[dict[str, str]]],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Iterable[int | str] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[TextStream]: ...

    @overload
    def generate(
        self,
        prompt: list[list[int]],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Iterator[int]]: ...

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Iterable[int | str] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[int] | TextStream | Sequence[Iterator[int] | TextStream]:
        """Continue a prompt: yield text for a text or a chat, and tokens for tokens.

        Each piece of text and each token is yielded as soon as it is computed. All text without
        streaming is `"".join(model.generate(prompt))`.

        Of a list of prompts, up to 16, the result is a list with the texts or tokens of each. They
        are generated together, so that each read of the weights serves all of them, and they are
        the same as for each prompt alone. `batch()` lets prompts join and leave meanwhile.

        Parameters
        ----------
        prompt : a text; or the messages of a chat, such as `[{"role": "user", "content": "Hi"}]`,
            which the chat template of the model converts to a prompt for the next answer; or
            tokens, at least one; or a list of these.
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
            The next piece of the text, from a `TextStream`; or the next token, for tokens. For a
            list of prompts, a list of iterators with these is returned.

        Raises
        ------
        ModelError
            The folder has no tokenizer, or no chat template, and the prompt needs one; or the chat
            template refuses the messages. Or there are several prompts, and batches of the model
            are not supported.
        ValueError
            The prompt is empty, or prompt and `max_new_tokens` exceed the context of the model; or
            there are more than 16 prompts.
        """
        options = (temperature, top_k, top_p, seed)
        prompts = several_prompts(prompt)
        if prompts is not None and len(prompts) > MAX_REQUESTS:
            raise ValueError(
                f"generate: prompt is {arguments.quote(prompt)}, which has {len(prompts)} prompts; "
                f"expected {MAX_REQUESTS} or fewer; pass fewer, or add them to a batch() as others "
                "end"
            )
        if cancelled is not None:
            arguments.function("generate: cancelled", cancelled)
        checked = [
            self._check_prompt("generate", item, max_new_tokens, options, stop)
            for item in ([prompt] if prompts is None else prompts)
        ]
        if prompts is None:
            return self._as_result(checked[0], self._generate(checked[0], cancelled))
        batch = self.batch(len(checked))
        iterators = add_and_iterate(batch, checked, cancelled)
        return [self._as_result(*pair) for pair in zip(checked, iterators, strict=True)]

    def batch(self, size: int = 8) -> Batch:
        """Return a batch without requests, to which requests are added, also while others run.

        The function that runs several requests is compiled when the first batch of more than one
        request is made, and cached like the model. Memory for keys and values is allocated for each
        request, not for the batch.

        Parameters
        ----------
        size : the most requests at the same time, 1 to 16.

        Returns
        -------
        Batch
            The batch.

        Raises
        ------
        ModelError
            Batches of this model are not supported; the message explains why.

        Examples
        --------
        >>> import tvm_ipc
        >>> with tvm_ipc.Session(2) as session:
        ...     model = tvm_ipc.models.load("model", session)  # a folder of save_pretrained
        ...     batch = model.batch(size=2)
        ...     requests = [batch.add(prompt, max_new_tokens=4) for prompt in ([1, 15], [33])]
        ...     while batch.requests:
        ...         tokens = batch.step()  # the next token of each request
        >>> [len(request.tokens) for request in requests]
        [4, 4]
        """
        wanted = f"a number of requests, 1 to {MAX_REQUESTS}"
        size = arguments.integer("batch: size", size, wanted, 1, MAX_REQUESTS)
        if size > 1 and not self._steps.has_batch:
            workers, dtype = self.session.num_workers, self.compiled.dtype
            compiled = load_or_compile(
                self.folder, workers, dtype, self.progress, batch_of=self.compiled
            )
            self._steps.load_batch(compiled)
        return Batch(self._steps, size, self._check_prompt, lambda: self.tokenizer)

    def _check_prompt(
        self,
        where: str,
        prompt: object,
        max_new_tokens: int,
        options: tuple[float, int | None, float, int | None],
        stop: object,
    ) -> CheckedPrompt:
        """Check a prompt and the options of its generation; `where` begins error messages.

        `options` are the temperature, top_k, top_p and the seed.
        """
        tokens = self._tokenize(where, prompt)
        wanted = "a number of tokens, 1 or more"
        count = arguments.integer(f"{where}: max_new_tokens", max_new_tokens, wanted, 1)
        context = self.folder.context
        if context is not None and len(tokens) + count > context:
            raise ValueError(
                f"{where}: {len(tokens)} tokens and {count} new ones are more than the "
                f"{context} that the model supports; pass fewer tokens, or a smaller max_new_tokens"
            )
        sampler = Sampler(*options, where)
        is_text = as_text_prompt(prompt) is not None
        ends, stop_strings = self._check_stop(where, stop, is_text)
        return CheckedPrompt(tokens, count, sampler, ends, stop_strings, is_text)

    def _as_result(
        self, prompt: CheckedPrompt, tokens: Generator[int, None, None] | RequestTokens
    ) -> Iterator[int] | TextStream:
        """Return tokens, or for a text the text of them."""
        if not prompt.is_text:
            return tokens
        ends, stop_strings = prompt.ends, prompt.stop_strings
        return TextStream(self.tokenizer, tokens, prompt.max_new_tokens, ends, stop_strings)

    def _generate(
        self, checked: CheckedPrompt, cancelled: Callable[[], bool] | None
    ) -> Generator[int, None, None]:
        prompt, count = checked.tokens, checked.max_new_tokens
        caches = self._steps.allocate_caches(len(prompt) + count)
        for seen in range(0, len(prompt), PREFILL_CHUNK):
            logits = self._steps.prefill(prompt[seen : seen + PREFILL_CHUNK], seen, caches)
            if cancelled is not None:
                self.session.sync()  # commands are asynchronous: those already sent would run
                if cancelled():
                    return
        seen = len(prompt)
        for number in range(1, count + 1):
            token = checked.sampler(self.session.get(logits)[0])
            yield token
            if token in checked.ends or number == count or (cancelled is not None and cancelled()):
                return
            logits = self._steps.decode(token, seen, caches)
            seen += 1

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

    def _check_stop(
        self, where: str, stop: object, is_text: bool
    ) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return the end tokens and the stop strings."""
        name, wanted = f"{where}: stop", "numbers of tokens, or strings that are not empty"
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
