# SPDX-License-Identifier: Apache-2.0
"""The command line of `tvm-ipc demo`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from tvm_ipc import terminal
from tvm_ipc.contract import MAX_SHOWN, MAX_WORKERS, AllReduceStrategy
from tvm_ipc.demo.config import DEVICES, DTYPES, Build, Config
from tvm_ipc.nodes import option

_WORKERS: Final = (1, 2, 4)
_HIDDEN: Final = 512
_HEAD: Final = 64
_VOCABULARY: Final = 4096
#: A size of the model with its value in a message.
_SIZE: Final = re.compile(
    r"\b(layers|hidden|heads|kv_heads|inner|vocabulary|context)\b(?= (is )?-?\d)"
)


class OptionError(Exception):
    """The options make no sense; the message is one line."""


@dataclass(frozen=True)
class Options:
    """What to compile and where to run it."""

    config: Config = field(default_factory=Config)
    workers: tuple[int, ...] = _WORKERS  #: in rising order, 1 among them
    prompt_length: int = 128
    tokens: int = 32
    build: Build = field(default_factory=Build)
    threads: bool = False
    seed: int = 0
    #: Over which nodes workers are divided where there are as many; None: all are on one.
    hosts: option.Given | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether the workers compute on GPUs."""
        return self.build.device == "cuda"


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    given = _parser().parse_args(argv)
    # Everything is compared with one worker.
    workers = tuple(sorted({1, *given.workers}))
    for name in ("prompt_length", "tokens"):
        if getattr(given, name) < 1:
            raise OptionError(f"{_option(name)} is {getattr(given, name)}; it must be at least 1")
    if given.seed < 0:
        raise OptionError(f"--seed is {given.seed}; it must be at least 0")
    for number in given.workers:
        if not 1 <= number <= MAX_WORKERS:
            raise OptionError(f"--workers has {number}; it must be 1 to {MAX_WORKERS}")
    if given.overlap is not None and not 1 <= given.overlap <= MAX_SHOWN:
        raise OptionError(f"--overlap is {given.overlap}; it must be 1 to {MAX_SHOWN}")
    if given.overlap is not None and not given.sequence_parallel:
        raise OptionError(
            "--overlap goes with --sequence-parallel: the sums of whole rows go on beside nothing"
        )
    if given.device == "cuda" and given.blas:
        raise OptionError("--blas is for CPUs: TVM schedules the matrix products of GPUs")
    if given.hosts is not None:
        _check_hosts(given)
    need = given.prompt_length + given.tokens - 1
    if given.context is not None and given.context < need:
        raise OptionError(
            f"--context {given.context} is too short for a prompt of {given.prompt_length} tokens "
            f"and {given.tokens} new ones: --context {need} is enough"
        )
    try:
        config = _config(given, math.lcm(*workers), need)
        for number in workers:
            config.check_workers(number)
    except ValueError as error:
        raise OptionError(_SIZE.sub(lambda size: _option(size[0]), str(error))) from error
    return Options(
        config=config,
        workers=workers,
        prompt_length=given.prompt_length,
        tokens=given.tokens,
        build=Build(
            strategy=AllReduceStrategy[given.strategy.upper()],
            blas=given.blas,
            sequence_parallel=given.sequence_parallel,
            overlap=given.overlap,
            device=given.device,
        ),
        threads=given.threads,
        seed=given.seed,
        hosts=given.hosts,
    )


def _check_hosts(given: argparse.Namespace) -> None:
    """Refuse what cannot be with several nodes."""
    threads = given.threads
    problem = option.refusal(given.hosts, max(given.workers), threads=threads)
    if problem is None and given.device == "cuda":
        problem = (
            "--hosts is for workers on CPUs here: the demo's programs for GPUs have norms in their "
            "sums, which NCCL, the backend of GPUs of several machines, has not"
        )
    if problem is not None:
        raise OptionError(problem)


def _config(given: argparse.Namespace, parts: int, need: int) -> Config:
    """Fill in what was not given with sizes that can be divided into so many parts."""
    for name in ("hidden", "heads", "kv_heads", "inner", "vocabulary"):
        size = getattr(given, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    heads = given.heads
    if heads is None:
        heads = _next_multiple((given.hidden or _HIDDEN) // _HEAD or 1, parts)
    hidden = given.hidden
    if hidden is None:
        hidden = _next_multiple(_HIDDEN, heads * 2)
    kv_heads = given.kv_heads
    if kv_heads is None:
        kv_heads = heads // 2 if heads % 2 == 0 and heads // 2 % parts == 0 else heads
    return Config(
        layers=given.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        # Some room for vectors: the part of each worker is a multiple of 16.
        inner=given.inner or _next_multiple(hidden * 11 // 4, 16 * parts),
        vocabulary=given.vocabulary or _next_multiple(_VOCABULARY, 16 * parts),
        context=given.context or max(need, Config.context),
        dtype=given.dtype,
    )


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing all options and exiting."""
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = _Parser(
        "tvm-ipc demo",
        description="Compile a tensor-parallel decoder for several numbers of workers, let them "
        "continue a prompt, and compare what they say.",
        epilog="Exit code: 0 the same tokens, 1 other ones or a failure, 2 wrong options.",
        allow_abbrev=False,
    )

    def number(name: str, value: int | None, text: str) -> None:
        parser.add_argument(_option(name), type=int, default=value, metavar="N", help=text)

    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=list(_WORKERS),
        metavar="N",
        help="how many, each 1 to 64; 1 is always among them (default 1 2 4)",
    )
    number("layers", default.config.layers, f"(default {default.config.layers})")
    number("hidden", None, f"width (default {_HIDDEN} or a bit more)")
    number("heads", None, f"of the queries (default one for each {_HEAD} of the width)")
    number("kv_heads", None, "of keys and values (default half of the heads)")
    number("inner", None, "width of the MLP (default about 11/4 of the width)")
    number("vocabulary", None, f"number of tokens (default {_VOCABULARY} or a bit more)")
    number("context", None, "room of the KV cache (default what is needed)")
    number("prompt_length", default.prompt_length, f"(default {default.prompt_length})")
    number("tokens", default.tokens, f"how many to generate (default {default.tokens})")
    number("seed", default.seed, "of the random weights and prompt (default 0)")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=default.build.device,
        help="what the workers compute on: a core each, or NVIDIA GPUs, which workers share if "
        "there are fewer (default cpu)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")
    parser.add_argument(
        "--strategy",
        choices=[strategy.name.lower() for strategy in AllReduceStrategy],
        default=default.build.strategy.name.lower(),
        help="of the all-reduces (default auto); the result has the same bits",
    )
    parser.add_argument(
        "--blas",
        action=argparse.BooleanOptionalAction,
        help="multiply with OpenBLAS (scipy-openblas64), or with kernels of TVM (default: with "
        "OpenBLAS if it is installed); --blas compares the two",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="workers divide the rows of the prompt's residual stream too: all-gathers before "
        "each attention and MLP, reduce-scatters after it",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="with --sequence-parallel: divide the rows of a worker into N chunks, and multiply "
        "some while others are on their way; compares with waiting for all",
    )
    parser.add_argument(
        "--threads", action="store_true", help="workers are threads of this process"
    )
    parser.add_argument(
        "--hosts",
        type=option.hosts,
        metavar=option.METAVAR,
        help=f"divide workers, wherever there are as many, over nodes: {option.HELP}",
    )
    return parser


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _next_multiple(number: int, of: int) -> int:
    return (number + of - 1) // of * of
