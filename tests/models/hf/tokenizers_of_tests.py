# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that models have, built here."""

from __future__ import annotations

from typing import Any, Final

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: Tokens of the byte tokenizer: 256 bytes, then these.
START, END, ROLE, CLOSE = range(256, 260)
#: A template like ChatML's, which begins with the token that the tokenizer adds to texts.
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<role>{{ message['role'] }}:{{ message['content'] }}<close>{% endfor %}"
    "{% if add_generation_prompt %}<role>assistant:{% endif %}"
)


def of_bytes(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer with a token for each byte, as those of GPT-2, Llama 3 and Qwen."""
    alphabet = byte_alphabet()
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({alphabet[byte]: byte for byte in range(256)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<role>", "<close>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", START)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + k) for k, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def with_byte_fallback() -> Any:
    """Return a tokenizer that marks spaces, and has bytes for rare characters, as Llama 2's."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "the", "▁a", "a", "b", ".", "▁.", "▁▁"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: k for k, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<unk>", "</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def of_words() -> Any:
    """Return a tokenizer of whole words, which are joined with spaces."""
    words = tokenizers.models.WordLevel({f"word{k}": k for k in range(67)}, "word0")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def of_word_pieces() -> Any:
    """Return a tokenizer whose tokens continue words with `##`, as BERT's."""
    pieces = ["[UNK]", "play", "##ing", "##ed", "the", ".", "don", "'", "t"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({piece: k for k, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    inner.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
