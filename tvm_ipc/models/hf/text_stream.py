# SPDX-License-Identifier: Apache-2.0
"""Convert generated tokens to text as they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self


class TokenSource(Protocol):
    """An iterator of tokens that can be closed, such as a generator."""

    def __iter__(self) -> Iterator[int]:
        """Return the iterator."""

    def close(self) -> None:
        """End the generation, and free its keys and values."""


#: Decoders return this character for bytes that are not, or not yet, a whole character.
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class TextStream(Iterator[str]):
    """Yields the text of generated tokens in pieces, each as soon as it is certain.

    The pieces joined are the generated text, without special tokens and without the stop string.
    Bytes that may be the beginning of a character, and text that may be the beginning of a stop
    string, are held back until the next tokens decide. Bytes that never become a character are
    U+FFFD in the text. `Model.generate` returns a stream for a text and for chat messages.

    Parameters
    ----------
    tokenizer : a tokenizer of transformers.
    tokens : the tokens as they are generated.
    max_new_tokens : the most tokens that `tokens` yields.
    ends : tokens that end the text; they are not part of it.
    stop_strings : strings that end the text; one that is the name of a special token stands for
        that token.

    Attributes
    ----------
    tokens : the tokens generated so far, with the end token if there is one.
    finish_reason : "stop" if an end token or a stop string ended the text, "length" if
        `max_new_tokens` were generated, "cancelled" if the caller cancelled the generation, and
        None until the text has ended.

    Examples
    --------
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(2) as session:
    ...     model = tvm_ipc.models.load("model", session)  # a folder with a tokenizer
    ...     stream = model.generate("ab", max_new_tokens=4)
    ...     text = "".join(stream)
    >>> len(stream.tokens), stream.finish_reason
    (4, 'length')
    """

    def __init__(
        self,
        tokenizer: Any,
        tokens: TokenSource,
        max_new_tokens: int,
        ends: frozenset[int] = frozenset(),
        stop_strings: Sequence[str] = (),
    ) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._source = tokens
        self._limit = max_new_tokens
        self._text = PartialText(tokenizer, ends, stop_strings)
        self._pieces = self._generate()

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> str:
        """Return the next piece of the text, never empty."""
        return next(self._pieces)

    def close(self) -> None:
        """End the generation, and free its keys and values."""
        self._pieces.close()
        self._source.close()

    def _generate(self) -> Generator[str, None, None]:
        for token in self._source:
            self.tokens.append(token)
            if piece := self._text.push(token):
                yield piece
            if self._text.ended:
                break
        self._source.close()
        if rest := self._text.flush():
            yield rest
        if self._text.ended:
            self.finish_reason = "stop"
        else:
            self.finish_reason = "length" if len(self.tokens) >= self._limit else "cancelled"


class PartialText:
    """Returns the text of tokens as far as it is certain, up to an end token or a stop string.

    Parameters
    ----------
    tokenizer : a tokenizer of transformers.
    ends : tokens that end the text.
    stop_strings : strings that end the text.

    Attributes
    ----------
    ended : whether an end token or a stop string has ended the text.
    """

    def __init__(
        self, tokenizer: Any, ends: frozenset[int] = frozenset(), stop_strings: Sequence[str] = ()
    ) -> None:
        # The text has no special tokens, so a stop string that is one would never be found in it.
        special = tokenizer.get_added_vocab()
        self.ended = False
        self._ends = ends | {special[stop] for stop in stop_strings if stop in special}
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stop_strings)

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now."""
        if token in self._ends:
            self.ended = True
            return ""
        piece = self._stops.push(self._decoder.push(token))
        self.ended = self._stops.found
        return piece

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        if self._stops.found:
            return ""
        rest = self._stops.push(self._decoder.flush())
        rest += self._stops.flush()
        self.ended = self.ended or self._stops.found
        return rest


class IncrementalDecoder:
    """Returns the text that each token adds, without half characters.

    The text of a token depends on the token before it: a tokenizer may put a space between them, or
    remove the space at the beginning of a text. So the last tokens are decoded again with each new
    one. `tokenizers.decoders.DecodeStream` never returns what it holds back at the end, and does
    not support every tokenizer of transformers.

    Parameters
    ----------
    tokenizer : a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._num_context = 0  # how many of the tokens have been returned as text
        self._num_returned = 0  # characters of the tokens' text that have been returned

    def push(self, token: int) -> str:
        """Return the text that a token adds, up to bytes that may begin a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._num_returned :]
        self._num_returned += len(piece)
        # A token without text, such as a special one, is no context for the next one.
        if certain == text and piece:
            del self._tokens[: self._num_context]
            self._num_context = len(self._tokens)
            self._num_returned = len(self._decode(self._tokens))
        return piece

    def flush(self) -> str:
        """Return the text that was held back."""
        piece = self._decode(self._tokens)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        # The clean-up would change text that has been returned: " ." becomes ".".
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class StopStrings:
    """Ends a text before the first stop string that is complete.

    Attributes
    ----------
    found : whether a stop string has ended the text.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.found = False
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Add text, and return what certainly comes before a stop string."""
        text = self._held + text
        starts = [(text.find(stop), stop) for stop in self._stop_strings]
        # The one that ends first, and the longest of those: this does not depend on the pieces.
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        longest = max(map(len, self._stop_strings), default=0)
        size = min(len(text), longest - 1) if longest else 0
        while size and not any(stop.startswith(text[-size:]) for stop in self._stop_strings):
            size -= 1
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def flush(self) -> str:
        """Return the text that was held back; it is no stop string."""
        rest, self._held = self._held, ""
        return rest
