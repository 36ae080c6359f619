# SPDX-License-Identifier: Apache-2.0
"""The command line of `tvm-ipc run`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tvm_ipc import terminal
from tvm_ipc.contract import MAX_WORKERS
from tvm_ipc.hf.folder import DTYPES
from tvm_ipc.nodes import option

_WORKERS: Final = 2
_NEW_TOKENS: Final = 64
#: Of the number of a token: what has more is none, and Python reads only so many.
_DIGITS: Final = 18


class OptionError(Exception):
    """The options make no sense; the message is one line."""


@dataclass(frozen=True)
class Options:
    """What to run, and how.

    Attributes
    ----------
    folder : of the model.
    prompt, tokens : the text to continue, or its tokens; both None to measure alone.
    dtype : None for that of the weights.
    plan : "auto", a file, or None for that of the model.
    hosts : over which nodes the workers are divided; None: all are on this machine.
    """

    folder: str
    workers: int
    prompt: str | None
    tokens: tuple[int, ...] | None
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    dtype: str | None
    plan: str | None
    threads: bool
    hosts: option.Given | None
    bench: bool
    json: bool


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    given = _parser().parse_args(argv)
    if not given.folder:
        raise OptionError("the folder of the model is ''; give one with config.json")
    if not 1 <= given.workers <= MAX_WORKERS:
        raise OptionError(f"--workers is {given.workers}; it must be 1 to {MAX_WORKERS}")
    if given.max_new_tokens < 1:
        raise OptionError(f"--max-new-tokens is {given.max_new_tokens}; it must be at least 1")
    if not (0 <= given.temperature < math.inf):
        raise OptionError(f"--temperature is {given.temperature}; it must be a number from 0 on")
    if given.top_k is not None and given.top_k < 1:
        raise OptionError(f"--top-k is {given.top_k}; it must be at least 1")
    if not 0 < given.top_p <= 1:
        raise OptionError(f"--top-p is {given.top_p}; it must be above 0, and 1 at most")
    if given.seed is not None and given.seed < 0:
        raise OptionError(f"--seed is {given.seed}; it must be at least 0")
    drawing = {"--top-k": given.top_k, "--seed": given.seed}
    drawing["--top-p"] = None if given.top_p == 1 else given.top_p
    for name, value in drawing.items():
        if given.temperature == 0 and value is not None:
            raise OptionError(
                f"{name} goes with --temperature above 0: without it nothing is drawn"
            )
    if given.bench and given.temperature != 0:
        raise OptionError("--bench compares the likeliest tokens; leave --temperature out")
    if given.hosts is not None:
        problem = option.refusal(given.hosts, given.workers, threads=given.threads)
        if given.bench:
            problem = (
                "--bench compares with PyTorch, which is on this machine alone; leave --hosts out"
            )
        if problem is not None:
            raise OptionError(problem)
    if given.plan not in (None, "auto") and not Path(given.plan).is_file():
        raise OptionError(
            f"--plan {given.plan}: there is no such file; it is auto, or a file with a JSON object "
            'such as {"q_proj": "colwise", "o_proj": "rowwise"}'
        )
    if given.prompt == "":
        raise OptionError("--prompt is ''; there must be something to continue")
    if given.prompt is not None and given.tokens is not None:
        raise OptionError("--prompt and --tokens are two ways to say the same; give one of them")
    if given.prompt is None and given.tokens is None and not given.bench:
        raise OptionError('there is nothing to continue; give --prompt "..." or --tokens 1,2,3')
    tokens = None if given.tokens is None else _tokens(given.tokens)
    return Options(**{**vars(given), "tokens": tokens})


def _tokens(text: str) -> tuple[int, ...]:
    numbers = text.replace(",", " ").split()
    known = all(one.isascii() and one.isdigit() and len(one) <= _DIGITS for one in numbers)
    if not numbers or not known:
        raise OptionError(f"--tokens is {text!r}; it must be numbers of tokens, such as 1,2,3")
    return tuple(map(int, numbers))


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing all options and exiting."""
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "tvm-ipc run",
        description="Continue a text with a language model of transformers on several workers. "
        "The model is compiled once and kept.",
        epilog="Exit code: 0 done, 1 a failure, 2 wrong options.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="with config.json and *.safetensors, as the hub has it")
    parser.add_argument(
        "--workers",
        type=int,
        default=_WORKERS,
        metavar="N",
        help=f"that share the model, 1 to {MAX_WORKERS} (default {_WORKERS})",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--tokens", metavar="N,N,...", help="its tokens instead, for folders without a tokenizer"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=_NEW_TOKENS,
        metavar="N",
        help=f"how many to add, at most (default {_NEW_TOKENS})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="draw tokens, the higher the wilder; 0 takes the likeliest (default 0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="draw from so many of the likeliest tokens (default all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest of these that together are at least so likely (default 1)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (default by chance)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="to compute in (default the type of the weights)"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="which weights are divided, and how: a JSON object of patterns of their names and "
        "styles, or auto to find a plan (default that of transformers)",
    )
    parser.add_argument(
        "--threads", action="store_true", help="workers are threads of this process"
    )
    parser.add_argument(
        "--hosts",
        type=option.hosts,
        metavar=option.METAVAR,
        help=f"divide the workers over nodes: {option.HELP}; the folder is read here",
    )
    parser.add_argument(
        "--bench",
        action="store_true",
        help="compare with PyTorch on the same cores, both warm; without a prompt, 128 tokens by "
        "chance",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text and lines"
    )
    return parser
