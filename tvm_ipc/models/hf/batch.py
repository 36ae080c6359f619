# SPDX-License-Identifier: Apache-2.0
"""Generate for several requests at once, which join and leave between steps.

A step reads the weights once for all requests that are past their prompts. Each request has its own
KV caches, for as many tokens as it may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.models.hf.model_steps import PREFILL_CHUNK, ModelSteps
from tvm_ipc.models.hf.prompts import TextPrompt, as_text_prompt
from tvm_ipc.models.hf.sampling import Sampler
from tvm_ipc.models.hf.text_stream import PartialText
from tvm_ipc.runtime.references import DRef

if TYPE_CHECKING:
    from typing_extensions import Self

#: The most requests of a batch.
MAX_REQUESTS: Final = 16


@dataclass(frozen=True, eq=False)
class CheckedPrompt:
    """A prompt and the options of its generation, which have been checked.

    Attributes
    ----------
    tokens : the tokens of the prompt.
    max_new_tokens : the most tokens to generate.
    sampler : chooses the next token.
    ends : the tokens that end the generation.
    stop_strings : the strings that end the text.
    is_text : whether the prompt is a text or a chat, which text continues.
    """

    tokens: list[int]
    max_new_tokens: int
    sampler: Sampler
    ends: frozenset[int]
    stop_strings: tuple[str, ...]
    is_text: bool


class BatchRequest:
    """A prompt of a batch, and what was generated for it; `Batch.add` returns one.

    Parameters
    ----------
    prompt : the prompt and its options.
    text : converts tokens to text; None if the prompt is tokens.

    Attributes
    ----------
    tokens : the tokens generated so far, with the end token if there is one.
    text : the text generated so far, as far as it is certain, up to a stop string; "" if the prompt
        is tokens.
    finish_reason : "stop" if an end token or a stop string ended the request, "length" if
        `max_new_tokens` were generated, "cancelled" after `cancel()`, "error" if the model returned
        logits that are not finite, and None until the request has ended.

    Examples
    --------
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(2) as session:
    ...     model = tvm_ipc.models.load("model", session)  # a folder of save_pretrained
    ...     batch = model.batch(size=2)
    ...     request = batch.add([1, 15, 33], max_new_tokens=4)
    ...     while request.finish_reason is None:
    ...         _ = batch.step()
    >>> len(request.tokens), request.finish_reason
    (4, 'length')
    """

    def __init__(self, prompt: CheckedPrompt, text: PartialText | None) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._prompt, self._partial_text = prompt, text
        self._caches: DRef | None = None
        self._num_seen = 0  # tokens whose keys and values are in the caches

    def cancel(self) -> None:
        """End the request before the next step, and free its keys and values."""
        self._end("cancelled")

    @property
    def _max_tokens(self) -> int:
        return len(self._prompt.tokens) + self._prompt.max_new_tokens

    @property
    def _is_prefilled(self) -> bool:
        return self._num_seen >= len(self._prompt.tokens)

    def _take(self, logits: np.ndarray[Any, Any]) -> int:
        """Choose the next token, and end the request if it is the last one."""
        prompt = self._prompt
        try:
            token = prompt.sampler(logits)
        except ModelError:
            self._end("error")
            raise
        self.tokens.append(token)
        has_ended = token in prompt.ends
        if self._partial_text is not None:
            self.text += self._partial_text.push(token)
            has_ended = has_ended or self._partial_text.ended
        if has_ended:
            self._end("stop")
        elif len(self.tokens) == prompt.max_new_tokens:
            self._end("length")
        return token

    def _end(self, reason: str) -> None:
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self._caches = None
        if self._partial_text is not None:
            self.text += self._partial_text.flush()
            if self._partial_text.ended:
                self.finish_reason = "stop"


class Batch:
    """Requests that share each read of the weights; `Model.batch` returns one.

    Requests may join between any two steps, and free their place when they end. Each one has its
    own keys and values, for as many tokens as it may have, from the first step after it was added.

    Parameters
    ----------
    steps : the steps of the model.
    size : the most requests at the same time.
    check_prompt : checks a prompt and its options.
    read_tokenizer : returns the tokenizer of the model.

    Attributes
    ----------
    size : the most requests at the same time.

    Examples
    --------
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(2) as session:
    ...     model = tvm_ipc.models.load("model", session)  # a folder of save_pretrained
    ...     batch = model.batch(size=2)
    ...     first = batch.add([1, 15, 33], max_new_tokens=3)
    ...     joined = len(batch.step())
    ...     second = batch.add([7], max_new_tokens=2)
    ...     both = len(batch.step())
    ...     while batch.requests:
    ...         _ = batch.step()
    >>> joined, both, len(first.tokens), len(second.tokens)
    (1, 2, 3, 2)
    """

    def __init__(
        self,
        steps: ModelSteps,
        size: int,
        check_prompt: Callable[..., CheckedPrompt],
        read_tokenizer: Callable[[], Any],
    ) -> None:
        self.size = size
        self._steps, self._check_prompt = steps, check_prompt
        self._read_tokenizer = read_tokenizer
        self._requests: list[BatchRequest] = []
        #: The requests of the last step, and their caches.
        self._last: tuple[list[BatchRequest], DRef | None] = ([], None)

    @property
    def requests(self) -> tuple[BatchRequest, ...]:
        """The requests that have not ended, in the order in which they were added."""
        self._forget_ended()
        return tuple(self._requests)

    def _forget_ended(self) -> None:
        """Drop the references to requests that have ended, and to their caches."""
        requests = [request for request in self._requests if request.finish_reason is None]
        if len(requests) < len(self._requests):
            self._last = ([], None)
        self._requests = requests

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys and values that each worker holds for the requests."""
        return sum(self._steps.cache_bytes(request._max_tokens) for request in self.requests)

    def add(
        self,
        prompt: TextPrompt | Iterable[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Iterable[int | str] | None = None,
    ) -> BatchRequest:
        """Add a request, whose first token comes with the step that processes its prompt.

        Parameters
        ----------
        prompt : a text, the messages of a chat, or tokens, as in `Model.generate`.
        max_new_tokens : the most tokens to generate.
        temperature : 0 for greedy decoding; otherwise the temperature of sampling.
        top_k : sample from the `top_k` most probable tokens; from all of them if None.
        top_p : sample from the smallest set of most probable tokens whose probabilities sum to at
            least `top_p`.
        seed : the seed for sampling this request; with None the results differ each time.
        stop : what ends the request, as in `Model.generate`.

        Returns
        -------
        BatchRequest
            The request, to which each step adds a token.

        Raises
        ------
        IPCError
            The batch has as many requests as it may have.
        ModelError
            The folder has no tokenizer, or no chat template, and the prompt needs one.
        ValueError
            The prompt is empty, or prompt and `max_new_tokens` exceed the context of the model.
        """
        if len(self.requests) == self.size:
            raise IPCError(
                f"add: the batch has {arguments.counted(self.size, 'request')}, which is its size; "
                "call step() until one has ended, cancel one, or make a larger batch"
            )
        options = (temperature, top_k, top_p, seed)
        checked = self._check_prompt("add", prompt, max_new_tokens, options, stop)
        text = None
        if checked.is_text:
            text = PartialText(self._read_tokenizer(), checked.ends, checked.stop_strings)
        return self._append(checked, text)

    def _append(self, prompt: CheckedPrompt, text: PartialText | None) -> BatchRequest:
        request = BatchRequest(prompt, text)
        self._requests.append(request)
        return request

    def step(self) -> dict[BatchRequest, int]:
        """Compute the next token of each request.

        A request whose prompt is not processed yet gets the next 512 tokens of it processed, and
        its first token with the last of them.

        Returns
        -------
        dict
            The new token of each request, without those whose prompt takes further steps. It is
            empty if there are no requests.

        Raises
        ------
        ModelError
            The model returned logits of a request that are not finite. That request has ended; the
            others got their token.
        """
        requests = self.requests
        running = [request for request in requests if request._is_prefilled]
        results = {}
        if running:
            rows = self._steps.session.get(self._decode_all(running))
            results = dict(zip(running, rows, strict=True))
        for request in requests:
            if not request._is_prefilled:
                logits = self._prefill(request)
                if request._is_prefilled:
                    results[request] = self._steps.session.get(logits)[0]
        for request in running:
            request._num_seen += 1
        tokens, errors = {}, []
        for request in requests:
            if request in results:
                try:
                    tokens[request] = request._take(results[request])
                except ModelError as error:
                    errors.append(error)
        self._forget_ended()
        if errors:
            raise errors[0]
        return tokens

    def _prefill(self, request: BatchRequest) -> DRef:
        """Process the next tokens of a prompt."""
        if request._caches is None:
            request._caches = self._steps.allocate_caches(request._max_tokens)
        chunk = request._prompt.tokens[request._num_seen :][:PREFILL_CHUNK]
        logits = self._steps.prefill(chunk, request._num_seen, request._caches)
        request._num_seen += len(chunk)
        return logits

    def _decode_all(self, running: list[BatchRequest]) -> DRef:
        """Process the last token of each request."""
        tokens = [request.tokens[-1] for request in running]
        seen = [request._num_seen for request in running]
        if len(running) == 1:
            own = running[0]._caches
            assert own is not None
            return self._steps.decode(tokens[0], seen[0], own)
        last, caches = self._last
        if last != running or caches is None:
            caches = self._steps.session.tuple([request._caches for request in running])
            self._last = (running, caches)
        return self._steps.decode_batch(tokens, seen, caches)


class RequestTokens(Iterator[int]):
    """Yields the tokens of a request, and runs steps of its batch for those that are not there.

    Parameters
    ----------
    batch : the batch of the request.
    request : the request.
    cancelled : called before each step; all requests of the batch end if it returns True.
    """

    def __init__(
        self, batch: Batch, request: BatchRequest, cancelled: Callable[[], bool] | None
    ) -> None:
        self._batch, self._request, self._cancelled = batch, request, cancelled
        self._num_taken = 0

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> int:
        """Return the next token."""
        while self._num_taken == len(self._request.tokens):
            if self._request.finish_reason is not None:
                raise StopIteration
            if self._cancelled is not None and self._cancelled():
                for request in self._batch.requests:
                    request.cancel()
            else:
                self._batch.step()
        self._num_taken += 1
        return self._request.tokens[self._num_taken - 1]

    def close(self) -> None:
        """End the request, and free its keys and values."""
        self._request.cancel()

    def __del__(self) -> None:
        """End the request, as the others need not wait for it."""
        self.close()


def add_and_iterate(
    batch: Batch, prompts: Iterable[CheckedPrompt], cancelled: Callable[[], bool] | None
) -> list[RequestTokens]:
    """Add prompts to a batch, and return iterators of their tokens.

    Text is left to what iterates over the tokens, which closes the iterator at a stop string.
    """
    requests = [batch._append(prompt, None) for prompt in prompts]
    return [RequestTokens(batch, request, cancelled) for request in requests]


def several_prompts(prompt: object) -> list[Any] | None:
    """Return the prompts of a sequence of prompts; None if it is one prompt."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        return None
    if as_text_prompt(prompt) is not None:
        return None
    kinds = (str, Sequence, np.ndarray)
    return list(prompt) if any(isinstance(item, kinds) for item in prompt) else None
