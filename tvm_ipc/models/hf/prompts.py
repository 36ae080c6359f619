# SPDX-License-Identifier: Apache-2.0
"""Convert texts and chat messages to tokens, with the tokenizer and chat template of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.optional_deps import require

#: A text, or the messages of a chat.
TextPrompt: TypeAlias = str | Sequence[Mapping[str, str]]

_MESSAGE: Final = '{"role": "user", "content": "Hello"}'


def as_text_prompt(prompt: object) -> TextPrompt | None:
    """Return a prompt that is a text or a list of messages; None if it must be token ids."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt):
        return prompt
    return None


def encode(where: str, tokenizer: Any, folder: ModelFolder, prompt: TextPrompt) -> list[int]:
    """Return the tokens of a text or of the messages of a chat.

    A text gets the special tokens that the tokenizer adds, such as a beginning of sequence. In a
    chat, the chat template writes all special tokens, and the prompt ends where the answer begins.

    Parameters
    ----------
    where : begins the error messages, such as "generate: prompt".
    tokenizer : the tokenizer of the folder.
    folder : the folder of the model.
    prompt : a text, or messages with the keys "role" and "content".

    Raises
    ------
    ModelError
        The tokenizer has no chat template, or the template refuses the messages.
    TypeError, ValueError
        The prompt is empty, or is neither a text nor messages.
    """
    if isinstance(prompt, str):
        tokens = _tokens(where, tokenizer, prompt, add_special_tokens=True)
        start = tokenizer.bos_token_id
        if start is not None and tokens[:2] == [start, start]:
            del tokens[0]  # the text begins with that token, as the result of a chat template does
    else:
        text = apply_chat_template(where, tokenizer, folder, prompt)
        tokens = _tokens(where, tokenizer, text, add_special_tokens=False)
    if not tokens:
        raise ValueError(
            f"{where}: the tokenizer returns no tokens for {arguments.quote(prompt)}; pass a text "
            "that is not empty"
        )
    return tokens


def _tokens(where: str, tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where}: {arguments.quote(text)} has lone surrogates, which are not characters; "
            "pass valid Unicode text"
        ) from None
    # verbose=False: the model's context is checked by the caller, which raises an error.
    encoding = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(map(int, encoding["input_ids"]))


def apply_chat_template(
    where: str, tokenizer: Any, folder: ModelFolder, messages: Iterable[object]
) -> str:
    """Return the text of a chat's messages, up to where the next answer begins."""
    if not tokenizer.chat_template:
        raise ModelError(
            f"{folder.path}: the tokenizer has no chat template, so chat messages cannot be "
            "converted to a prompt; pass a text, or use a model that was trained for chats"
        )
    require("to apply a chat template", "jinja2")
    checked = [_check_message(where, message) for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(checked, tokenize=False, add_generation_prompt=True)
        )
    except Exception as error:  # of jinja2, of transformers, or of a function in the template
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{folder.path}: the chat template refuses the messages: {line}"
        ) from error


def _check_message(where: str, message: object) -> dict[str, Any]:
    expected = f"a list of messages such as {_MESSAGE}"
    if not isinstance(message, Mapping):
        raise arguments.wrong_type(f"{where}: each message", f"such as {_MESSAGE}", message)
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise TypeError(
                f"{where} is {expected}; {arguments.quote(message)} has no text for {key!r}"
            )
    return dict(message)


def check_vocabulary(where: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise a `ModelError` if the tokenizer returned a token that the model does not have."""
    invalid = next((token for token in tokens if token >= vocabulary), None)
    if invalid is not None:
        raise ModelError(
            f"{where}: the tokenizer returns token {invalid}, but the model has {vocabulary} "
            "tokens; use the tokenizer of the model"
        )
