# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tvm_ipc.models.hf.model_folder import DTYPES
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.tools.options import (
    OptionError,
    Parser,
    amount,
    at_least,
    not_empty,
    number,
    option,
    switch,
)

#: The plans that have a name: those of `tvm_ipc.models.hf.user_sharding_plan`, which imports TVM.
NAMED_PLANS: Final = ("auto", "experts")
_NEW_TOKENS: Final = 64
#: The default in a chat, whose answers should not end in the middle.
_NEW_TOKENS_OF_CHAT: Final = 512
#: Maximum number of digits of a token; Python limits the digits that it converts.
_MAX_DIGITS: Final = 18


def _check_top_p(flag: str, value: float) -> None:
    if not 0 < value <= 1:
        raise OptionError(f"{flag} is {value}; it must be above 0 and at most 1")


def _check_plan(flag: str, value: str) -> None:
    if value not in NAMED_PLANS and not Path(value).is_file():
        raise OptionError(
            f"{flag} {value}: there is no such file; specify {' or '.join(NAMED_PLANS)}, or a file "
            'with a JSON object such as {"q_proj": "colwise", "o_proj": "rowwise"}'
        )


def _tokens(text: str) -> tuple[int, ...]:
    numbers = text.replace(",", " ").split()
    valid = all(n.isascii() and n.isdigit() and len(n) <= _MAX_DIGITS for n in numbers)
    if not numbers or not valid:
        raise OptionError(f"--tokens is {text!r}; it must be a list of token ids such as 1,2,3")
    return tuple(map(int, numbers))


def _check_folder(_flag: str, folder: str) -> None:
    if not folder:
        raise OptionError("the folder of the model is ''; specify a folder with config.json")


@dataclass(frozen=True)
class Options:
    """The options of the command; without a prompt, tokens and a chat it is a benchmark."""

    folder: str = option(
        "folder with config.json and *.safetensors, in the layout of the hub",
        group="model",
        flag="folder",
        check=_check_folder,
    )
    #: None for the type of the weights.
    dtype: str | None = option(
        "type to compute in (default: the type of the weights)", choices=DTYPES
    )
    #: None for the plan of the model.
    plan: str | None = option(
        "sharding plan: a file with a JSON object from patterns of weight names to styles, auto to "
        "search for one, or experts for the plan of transformers with sharded experts (default: "
        "the plan of transformers)",
        metavar="FILE",
        check=_check_plan,
    )
    reproducible: bool = switch(
        "compute logits whose bits do not depend on the number of workers, which is then 1, 2, 4, "
        "8 or 16"
    )
    workers: int = number(
        f"number of workers that share the model, 1 to {MAX_WORKERS}",
        2,
        group="workers",
        most=MAX_WORKERS,
    )
    threads: bool = switch("run the workers as threads of this process (default: as processes)")
    hosts: cli_hosts.HostsArgument | None = option(
        f"nodes of the workers: {cli_hosts.HELP}; the folder is read on this machine",
        type=cli_hosts.hosts,
        metavar=cli_hosts.METAVAR,
    )
    prompt: str | None = option(
        "text to continue",
        group="generation",
        metavar="TEXT",
        check=not_empty("specify a text to continue"),
    )
    tokens: tuple[int, ...] | None = option(
        "token ids of the prompt, for folders without a tokenizer", type=_tokens, metavar="N,N,..."
    )
    chat: bool = switch(
        "chat: each line of the standard input is a message, and the model answers it; Ctrl-C "
        "ends an answer, and Ctrl-D ends the chat"
    )
    system: str | None = option(
        "system message, at the start of a chat",
        metavar="TEXT",
        check=not_empty("specify a text, or leave it out"),
    )
    max_new_tokens: int = number(
        "maximum number of tokens to generate for the prompt, or for each answer of a chat "
        f"(default: {_NEW_TOKENS}, in a chat {_NEW_TOKENS_OF_CHAT})",
        _NEW_TOKENS,
    )
    stop: Sequence[str] = option(
        "end the generation before this text; may be repeated",
        (),
        action="append",
        metavar="TEXT",
        check=not_empty("specify a text that ends the generation"),
    )
    temperature: float = option(
        "temperature of sampling; 0 means greedy decoding (default: 0)",
        0.0,
        type=float,
        metavar="T",
        check=amount,
    )
    top_k: int | None = option(
        "sample from the K most probable tokens (default: all)",
        type=int,
        metavar="K",
        check=at_least(1),
    )
    top_p: float = option(
        "sample from the smallest set of tokens whose total probability is at least P (default: 1)",
        1.0,
        type=float,
        metavar="P",
        check=_check_top_p,
    )
    seed: int | None = number("seed of sampling (default: random)", least=0)
    bench: bool = switch(
        "compare the speed with PyTorch on the same cores after a warm-up; without a prompt, "
        "use 128 random tokens",
        group="output",
    )
    json: bool = switch("print one JSON object instead of the text and notes")


def parser() -> Parser[Options]:
    """Return the parser of the command line."""
    return Parser(
        Options,
        "tvm-ipc run",
        description="Continue a text with a Hugging Face language model on several workers, or "
        "chat with it. The compiled program is cached.",
        epilog="Exit code: 0 success, 1 failure, 2 invalid options.",
    )


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    values = parser().specified(argv)
    options = Options(**values)
    if options.chat and "max_new_tokens" not in values:
        options = replace(options, max_new_tokens=_NEW_TOKENS_OF_CHAT)
    for flag, is_specified in {
        "--top-k": options.top_k is not None,
        "--seed": options.seed is not None,
        "--top-p": options.top_p != 1,
    }.items():
        if is_specified and options.temperature == 0:
            raise OptionError(
                f"{flag} needs --temperature above 0, because greedy decoding does not sample"
            )
    if options.bench and options.temperature != 0:
        raise OptionError("--bench needs greedy decoding; leave --temperature out")
    if options.hosts is not None:
        problem = cli_hosts.refusal(options.hosts, options.workers, threads=options.threads)
        if options.bench:
            problem = "--bench compares with PyTorch on this machine; leave --hosts out"
        if problem is not None:
            raise OptionError(problem)
    if options.prompt is not None and options.tokens is not None:
        raise OptionError("--prompt conflicts with --tokens; specify one of them")
    if options.chat:
        for flag, is_specified in {
            "--prompt": options.prompt is not None,
            "--tokens": options.tokens is not None,
            "--bench": options.bench,
            "--json": options.json,
        }.items():
            if is_specified:
                raise OptionError(
                    f"--chat conflicts with {flag}; a chat reads messages from the standard input "
                    "and prints the answers"
                )
    elif options.system is not None:
        raise OptionError("--system needs --chat, because only a chat has a system message")
    if options.stop and options.bench:
        raise OptionError("--bench generates a fixed number of tokens; leave --stop out")
    if options.stop and options.tokens is not None:
        raise OptionError("--stop needs a text: specify --prompt or --chat instead of --tokens")
    no_prompt = options.prompt is None and options.tokens is None
    if no_prompt and not options.chat and not options.bench:
        raise OptionError('there is no prompt; specify --prompt "...", --tokens 1,2,3 or --chat')
    return options
