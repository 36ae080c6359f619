# SPDX-License-Identifier: Apache-2.0
"""Text is streamed without half characters and without stop strings, and is the whole text."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from tests.models.hf.tokenizers_of_tests import (
    CLOSE,
    END,
    of_bytes,
    of_word_pieces,
    of_words,
    with_byte_fallback,
)
from tvm_ipc.models.hf.text_stream import StopStrings, TextStream

TEXT = "naïve 漢字 \N{SLIGHTLY SMILING FACE}, e\N{COMBINING ACUTE ACCENT}nd"


def generated(tokens: Iterable[int]) -> Generator[int, None, None]:
    yield from tokens


def stream_of(tokenizer: Any, tokens: list[int], *stop: str, limit: int = 10**6) -> TextStream:
    return TextStream(tokenizer, generated(tokens), limit, frozenset([END]), stop)


def whole(tokenizer: Any, tokens: list[int]) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def test_characters_of_several_tokens_come_when_they_are_whole() -> None:
    pieces = list(stream_of(of_bytes(), list(TEXT.encode())))
    assert "".join(pieces) == TEXT
    assert pieces == list(TEXT), "each as soon as it is whole"


@pytest.mark.parametrize("cut", range(1, 5))
def test_text_that_ends_within_a_character(cut: int) -> None:
    """Bytes that are no character become U+FFFD, at the end only, as in transformers."""
    tokenizer, tokens = of_bytes(), list("é\N{SLIGHTLY SMILING FACE}".encode())[: 2 + cut]
    pieces = list(stream_of(tokenizer, tokens))
    assert pieces == ["é", "\N{SLIGHTLY SMILING FACE}" if cut == 4 else "\N{REPLACEMENT CHARACTER}"]
    assert "".join(pieces) == whole(tokenizer, tokens)


@pytest.mark.parametrize("seed", range(30))
def test_any_bytes(seed: int) -> None:
    """Also bytes that are no text, and special tokens between them."""
    draw, tokenizer = random.Random(seed), of_bytes()
    tokens = list(TEXT.encode()) * 2
    for _ in range(seed):
        tokens.insert(draw.randrange(len(tokens)), draw.randrange(256))
        tokens.insert(draw.randrange(len(tokens)), CLOSE)
    assert "".join(stream_of(tokenizer, tokens)) == whole(tokenizer, tokens)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", [with_byte_fallback, of_words, of_word_pieces])
def test_spaces_between_tokens(kind: Any, seed: int) -> None:
    """A tokenizer decides about a space from the tokens on both sides of it."""
    draw, tokenizer = random.Random(seed), kind()
    tokens: list[int] = []
    for _ in range(40):
        if kind is with_byte_fallback:
            some = draw.choice(["é", "漢", "\N{SLIGHTLY SMILING FACE}"]).encode()
            pieces = [2 + byte for byte in some] if draw.random() < 0.3 else None
            tokens += pieces or [draw.choice([1, *range(258, 267)])]
        else:
            tokens.append(draw.randrange(len(tokenizer)))
    pieces = list(stream_of(tokenizer, tokens))
    assert "".join(pieces) == whole(tokenizer, tokens)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert len(pieces) > 10


def test_spaces_are_not_cleaned_up() -> None:
    """The clean-up of transformers would change what has been printed."""
    tokenizer = of_bytes()
    tokenizer.clean_up_tokenization_spaces = True
    assert "".join(stream_of(tokenizer, list(b"a , b ."))) == "a , b ."


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first stop string that is complete, by hand."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", k=draw.randrange(30)))
    stops = tuple(
        "".join(draw.choices("ab", k=draw.randrange(1, 6))) for _ in range(draw.randrange(4))
    )
    before, found = expected(text, stops)
    filter_, printed, rest = StopStrings(stops), "", text
    while rest and not filter_.found:
        size = draw.randrange(1, 5)
        printed += filter_.push(rest[:size])
        rest = rest[size:]
        assert before.startswith(printed), "nothing that has to be taken back"
        if not filter_.found:
            held = text[len(printed) : len(text) - len(rest)]
            begins = [held[k:] for k in range(len(held))]
            held_for = [b for b in begins if any(stop.startswith(b) for stop in stops)]
            assert held == max(held_for, key=len, default=""), "no more is held than is needed"
    printed += filter_.flush()
    assert (printed, filter_.found) == (before, found)


def test_a_stream_ends() -> None:
    tokenizer = of_bytes()
    for tokens, stop, text, reason, taken in (
        (b"ab\n\ncd", ["\n\n"], "ab", "stop", 4),
        (b"ab\ncd", ["\n\n"], "ab\ncd", "length", 5),
        (b"ab\n", ["\n\n"], "ab\n", "length", 3),
        ([*b"ab", END, *b"cd"], [], "ab", "stop", 3),
        ([*b"ab", CLOSE, *b"cd"], [], "abcd", "length", 5),
        ([*b"ab", CLOSE, *b"cd"], ["<close>"], "ab", "stop", 3),
        ("a漢b".encode(), ["漢"], "a", "stop", 4),
        ("a漢b".encode()[:3], ["\N{REPLACEMENT CHARACTER}"], "a", "stop", 3),
        (b"", ["x"], "", "length", 0),
    ):
        stream = stream_of(tokenizer, list(tokens), *stop, limit=min(5, len(tokens)))
        assert stream.finish_reason is None
        assert ("".join(stream), stream.finish_reason) == (text, reason), tokens
        assert len(stream.tokens) == taken
        assert list(stream) == []


def test_a_stream_that_is_closed_ends_the_generation() -> None:
    ended = []

    def source() -> Generator[int, None, None]:
        try:
            while True:
                yield ord("a")
        finally:
            ended.append(True)

    stream = TextStream(of_bytes(), source(), 100)
    assert next(stream) == "a"
    stream.close()
    assert ended
    assert list(stream) == []
