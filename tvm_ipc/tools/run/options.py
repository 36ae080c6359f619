# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc run`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tvm_ipc.models.hf.model_folder import DTYPES
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.tools import terminal

_WORKERS: Final = 2
_NEW_TOKENS: Final = 64
#: The default in a chat, whose answers should not end in the middle.
_NEW_TOKENS_OF_CHAT: Final = 512
#: Maximum number of digits of a token; Python limits the digits that it converts.
_MAX_DIGITS: Final = 18


class OptionError(Exception):
    """Raised for invalid options, with a message of one line."""


@dataclass(frozen=True)
class Options:
    """The options of the command.

    Attributes
    ----------
    folder : folder of the model.
    prompt, tokens : the text to continue, or its tokens; both None for a benchmark or a chat.
    chat : read messages from the standard input, and print the answers.
    system : the system message of a chat.
    stop : texts that end the generation.
    max_new_tokens : the most tokens to generate for a prompt, or for an answer in a chat.
    dtype : type to compute in; None for that of the weights.
    plan : sharding plan: "auto", a file, or None for that of the model.
    hosts : nodes of the workers; None: all workers are on this machine.
    """

    folder: str
    workers: int
    prompt: str | None
    tokens: tuple[int, ...] | None
    chat: bool
    system: str | None
    stop: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    dtype: str | None
    plan: str | None
    threads: bool
    hosts: cli_hosts.HostsArgument | None
    bench: bool
    json: bool


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    arguments = _parser().parse_args(argv)
    if not arguments.folder:
        raise OptionError("the folder of the model is ''; specify a folder with config.json")
    if not 1 <= arguments.workers <= MAX_WORKERS:
        raise OptionError(f"--workers is {arguments.workers}; it must be 1 to {MAX_WORKERS}")
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = _NEW_TOKENS_OF_CHAT if arguments.chat else _NEW_TOKENS
    if arguments.max_new_tokens < 1:
        raise OptionError(f"--max-new-tokens is {arguments.max_new_tokens}; it must be at least 1")
    if not (0 <= arguments.temperature < math.inf):
        raise OptionError(
            f"--temperature is {arguments.temperature}; it must be a number, 0 or more"
        )
    if arguments.top_k is not None and arguments.top_k < 1:
        raise OptionError(f"--top-k is {arguments.top_k}; it must be at least 1")
    if not 0 < arguments.top_p <= 1:
        raise OptionError(f"--top-p is {arguments.top_p}; it must be above 0 and at most 1")
    if arguments.seed is not None and arguments.seed < 0:
        raise OptionError(f"--seed is {arguments.seed}; it must be at least 0")
    sampling = {"--top-k": arguments.top_k, "--seed": arguments.seed}
    sampling["--top-p"] = None if arguments.top_p == 1 else arguments.top_p
    for name, value in sampling.items():
        if arguments.temperature == 0 and value is not None:
            raise OptionError(
                f"{name} needs --temperature above 0, because greedy decoding does not sample"
            )
    if arguments.bench and arguments.temperature != 0:
        raise OptionError("--bench needs greedy decoding; leave --temperature out")
    if arguments.hosts is not None:
        problem = cli_hosts.refusal(arguments.hosts, arguments.workers, threads=arguments.threads)
        if arguments.bench:
            problem = "--bench compares with PyTorch on this machine; leave --hosts out"
        if problem is not None:
            raise OptionError(problem)
    if arguments.plan not in (None, "auto") and not Path(arguments.plan).is_file():
        raise OptionError(
            f"--plan {arguments.plan}: there is no such file; specify auto, or a file with a "
            'JSON object such as {"q_proj": "colwise", "o_proj": "rowwise"}'
        )
    if arguments.prompt == "":
        raise OptionError("--prompt is ''; specify a text to continue")
    if arguments.prompt is not None and arguments.tokens is not None:
        raise OptionError("--prompt conflicts with --tokens; specify one of them")
    _check_chat(arguments)
    no_prompt = arguments.prompt is None and arguments.tokens is None
    if no_prompt and not arguments.chat and not arguments.bench:
        raise OptionError('there is no prompt; specify --prompt "...", --tokens 1,2,3 or --chat')
    tokens = None if arguments.tokens is None else _tokens(arguments.tokens)
    return Options(**{**vars(arguments), "tokens": tokens, "stop": tuple(arguments.stop)})


def _check_chat(arguments: argparse.Namespace) -> None:
    if arguments.chat:
        others = {
            "--prompt": arguments.prompt is not None,
            "--tokens": arguments.tokens is not None,
            "--bench": arguments.bench,
            "--json": arguments.json,
        }
        for name, specified in others.items():
            if specified:
                raise OptionError(
                    f"--chat conflicts with {name}; a chat reads messages from the standard input "
                    "and prints the answers"
                )
    elif arguments.system is not None:
        raise OptionError("--system needs --chat, because only a chat has a system message")
    if arguments.system == "":
        raise OptionError("--system is ''; specify a text, or leave it out")
    if "" in arguments.stop:
        raise OptionError("--stop is ''; specify a text that ends the generation")
    if arguments.stop and arguments.bench:
        raise OptionError("--bench generates a fixed number of tokens; leave --stop out")
    if arguments.stop and arguments.tokens is not None:
        raise OptionError("--stop needs a text: specify --prompt or --chat instead of --tokens")


def _tokens(text: str) -> tuple[int, ...]:
    numbers = text.replace(",", " ").split()
    valid = all(n.isascii() and n.isdigit() and len(n) <= _MAX_DIGITS for n in numbers)
    if not numbers or not valid:
        raise OptionError(f"--tokens is {text!r}; it must be a list of token ids such as 1,2,3")
    return tuple(map(int, numbers))


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError` instead of exiting."""
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "tvm-ipc run",
        description="Continue a text with a Hugging Face language model on several workers, or "
        "chat with it. The compiled program is cached.",
        epilog="Exit code: 0 success, 1 failure, 2 invalid options.",
        allow_abbrev=False,
    )
    _add_model(parser.add_argument_group("model"))
    _add_workers(parser.add_argument_group("workers"))
    _add_generation(parser.add_argument_group("generation"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--bench",
        action="store_true",
        help="compare the speed with PyTorch on the same cores after a warm-up; without a prompt, "
        "use 128 random tokens",
    )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text and notes"
    )
    return parser


def _add_model(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "folder", help="folder with config.json and *.safetensors, in the layout of the hub"
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="type to compute in (default: the type of the weights)"
    )
    group.add_argument(
        "--plan",
        metavar="FILE",
        help="sharding plan: a file with a JSON object from patterns of weight names to styles, or "
        "auto to search for one (default: the plan of transformers)",
    )


def _add_workers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workers",
        type=int,
        default=_WORKERS,
        metavar="N",
        help=f"number of workers that share the model, 1 to {MAX_WORKERS} (default: {_WORKERS})",
    )
    group.add_argument(
        "--threads",
        action="store_true",
        help="run the workers as threads of this process (default: as processes)",
    )
    group.add_argument(
        "--hosts",
        type=cli_hosts.hosts,
        metavar=cli_hosts.METAVAR,
        help=f"nodes of the workers: {cli_hosts.HELP}; the folder is read on this machine",
    )


def _add_generation(group: argparse._ActionsContainer) -> None:
    group.add_argument("--prompt", metavar="TEXT", help="text to continue")
    group.add_argument(
        "--tokens",
        metavar="N,N,...",
        help="token ids of the prompt, for folders without a tokenizer",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="chat: each line of the standard input is a message, and the model answers it; Ctrl-C "
        "ends an answer, and Ctrl-D ends the chat",
    )
    group.add_argument("--system", metavar="TEXT", help="system message, at the start of a chat")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens to generate for the prompt, or for each answer of a chat "
        f"(default: {_NEW_TOKENS}, in a chat {_NEW_TOKENS_OF_CHAT})",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the generation before this text; may be repeated",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="temperature of sampling; 0 means greedy decoding (default: 0)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K most probable tokens (default: all)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the smallest set of tokens whose total probability is at least P "
        "(default: 1)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of sampling (default: random)")
