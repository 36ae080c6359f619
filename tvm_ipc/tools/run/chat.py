# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run --chat`: read messages from the standard input, and print the model's answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tvm_ipc.arguments import counted
from tvm_ipc.models.hf.prompts import apply_chat_template
from tvm_ipc.tools import terminal
from tvm_ipc.tools.run.options import Options

if TYPE_CHECKING:
    from tvm_ipc.models.hf.load_and_generate import Model
    from tvm_ipc.models.hf.model_folder import ModelFolder

#: Messages of a chat, as chat templates take them.
Messages = list[dict[str, str]]
#: Shown where a message can be typed.
_PROMPT: Final = ">>> "


def check_template(options: Options, tokenizer: Any, folder: ModelFolder) -> None:
    """Raise a `ModelError` if the model cannot chat, before its weights are loaded."""
    messages = [*_system(options), _message("user", "Hello")]
    apply_chat_template("--chat", tokenizer, folder, messages)


def run_chat(options: Options, model: Model, note: Callable[[str], None]) -> None:
    """Answer the messages of the standard input until it ends.

    Parameters
    ----------
    options : the options of the command.
    model : the model that answers.
    note : prints a sentence for the user that is not part of an answer.
    """
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused below, with a sentence
    if sys.stdin.isatty():
        note("Ctrl-C ends an answer, Ctrl-D ends the chat")
    history = _system(options)
    with terminal.InterruptibleCommand() as interrupts:
        while (text := _next_message(interrupts, note)) is not None:
            history = _answer(options, model, note, interrupts, history, text)


def _next_message(
    interrupts: terminal.InterruptibleCommand, note: Callable[[str], None]
) -> str | None:
    """Return the next line that is not empty, or None at the end of the input.

    The first Ctrl-C discards what was typed. A second one in a row ends the program.
    """
    warned = False
    interrupts.clear()  # a Ctrl-C that ended the last answer
    while True:
        try:
            line = interrupts.wait_for_line(_PROMPT)
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            if sys.stdin.isatty():
                terminal.print_err("")  # the terminal has printed ^C
            note("Ctrl-D ends the chat, and so does another Ctrl-C")
            continue
        if line is None:
            if sys.stdin.isatty():
                terminal.print_err("")
            return None
        text = line.rstrip("\r\n")
        if any("\ud800" <= character <= "\udfff" for character in text):
            note(f"a line is not text in {sys.stdin.encoding}; it was not sent to the model")
        elif text.strip():
            return text


def _answer(
    options: Options,
    model: Model,
    note: Callable[[str], None],
    interrupts: terminal.InterruptibleCommand,
    history: Messages,
    text: str,
) -> Messages:
    """Print the answer to a message, and return the history with both."""
    messages = [*history, _message("user", text)]
    tokens, dropped = drop_old_messages(messages, model, options.max_new_tokens)
    context = model.folder.context
    room = options.max_new_tokens if context is None else context - tokens
    if room < 1:
        note(
            f"the message has {counted(tokens, 'token')} with the chat template, and the model "
            f"supports {context} with the answer; it was not sent, send a shorter one"
        )
        return history
    if dropped:
        note(
            f"the chat is longer than the {context} tokens that the model supports; the oldest "
            f"{counted(dropped, 'message')} were dropped"
        )
    limit = min(options.max_new_tokens, room)
    stream = model.generate(
        messages,
        limit,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop or None,
        cancelled=lambda: interrupts.pressed,
    )
    terminal.progress(f"prefilling {counted(tokens, 'token')}")
    pieces = []
    for piece in stream:
        terminal.write(piece)
        pieces.append(piece)
    terminal.print_out()
    answer = "".join(pieces)
    if stream.finish_reason == "length":
        reason = (
            f"--max-new-tokens {limit}"
            if limit == options.max_new_tokens
            else f"the {context} tokens that the model supports"
        )
        note(f"the answer was cut after {counted(limit, 'token')} because of {reason}")
    if stream.finish_reason == "cancelled" and not answer:
        note("the message was not answered, and is not part of the chat")
        return messages[:-1]
    return [*messages, _message("assistant", answer)]


def drop_old_messages(messages: Messages, model: Model, max_new_tokens: int) -> tuple[int, int]:
    """Remove the oldest messages of a chat until it leaves room for an answer.

    A message and its answer are removed together. The system message and the last message stay,
    even if they are too long.

    Parameters
    ----------
    messages : the messages, which this changes.
    model : the model, which has the tokenizer and the length of the context.
    max_new_tokens : room for the answer; half the context is enough.

    Returns
    -------
    The number of tokens of the messages that are left, and the number of messages removed.
    """
    tokens, dropped = len(model.tokenize(messages)), 0
    context = model.folder.context
    if context is None:
        return tokens, 0
    room = context - min(max_new_tokens, context // 2)
    first = int(messages[0]["role"] == "system")
    while tokens > room and len(messages) > first + 2:
        del messages[first : first + 2]
        dropped += 2
        tokens = len(model.tokenize(messages))
    return tokens, dropped


def _system(options: Options) -> Messages:
    return [] if options.system is None else [_message("system", options.system)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
