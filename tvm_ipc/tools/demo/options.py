# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc demo`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from tvm_ipc.nodes import cli_hosts
from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS, AllReduceStrategy
from tvm_ipc.tools import terminal
from tvm_ipc.tools.demo.decoder_and_build_config import DEVICES, DTYPES, Build, Config

_WORKERS: Final = (1, 2, 4)
_HIDDEN: Final = 512
_HEAD_WIDTH: Final = 64
_VOCABULARY: Final = 4096
#: The name of a size of the model in front of its value, in a message.
_SIZE: Final = re.compile(
    r"\b(layers|hidden|heads|kv_heads|inner|vocabulary|context)\b(?= (is )?-?\d)"
)


class OptionError(Exception):
    """Raised for invalid options, with a message of one line."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    config: Config = field(default_factory=Config)
    workers: tuple[int, ...] = _WORKERS  #: in ascending order, always with 1
    prompt_length: int = 128
    tokens: int = 32
    build: Build = field(default_factory=Build)
    threads: bool = False
    seed: int = 0
    #: Nodes for sessions with at least as many workers; None: all workers are on this machine.
    hosts: cli_hosts.HostsArgument | None = None

    @property
    def on_gpus(self) -> bool:
        """Return whether the workers compute on GPUs."""
        return self.build.device == "cuda"


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    arguments = _parser().parse_args(argv)
    # One worker is the reference of all comparisons.
    workers = tuple(sorted({1, *arguments.workers}))
    for name in ("prompt_length", "tokens"):
        if getattr(arguments, name) < 1:
            raise OptionError(
                f"{_option(name)} is {getattr(arguments, name)}; it must be at least 1"
            )
    if arguments.seed < 0:
        raise OptionError(f"--seed is {arguments.seed}; it must be at least 0")
    for number in arguments.workers:
        if not 1 <= number <= MAX_WORKERS:
            raise OptionError(f"--workers has {number}; it must be 1 to {MAX_WORKERS}")
    if arguments.overlap is not None and not 1 <= arguments.overlap <= MAX_EXPOSED:
        raise OptionError(f"--overlap is {arguments.overlap}; it must be 1 to {MAX_EXPOSED}")
    if arguments.overlap is not None and not arguments.sequence_parallel:
        raise OptionError(
            "--overlap needs --sequence-parallel, which adds the collectives that it overlaps"
        )
    if arguments.device == "cuda" and arguments.blas:
        raise OptionError("--blas needs --device cpu; on GPUs, matmuls run in kernels of TVM")
    if arguments.hosts is not None:
        _check_hosts(arguments)
    need = arguments.prompt_length + arguments.tokens - 1
    if arguments.context is not None and arguments.context < need:
        raise OptionError(
            f"--context {arguments.context} is too short for a prompt of "
            f"{arguments.prompt_length} tokens and {arguments.tokens} new ones; "
            f"use at least --context {need}"
        )
    try:
        config = _config(arguments, math.lcm(*workers), need)
        for number in workers:
            config.check_workers(number)
    except ValueError as error:
        raise OptionError(_SIZE.sub(lambda size: _option(size[0]), str(error))) from error
    return Options(
        config=config,
        workers=workers,
        prompt_length=arguments.prompt_length,
        tokens=arguments.tokens,
        build=Build(
            strategy=AllReduceStrategy[arguments.strategy.upper()],
            blas=arguments.blas,
            sequence_parallel=arguments.sequence_parallel,
            overlap=arguments.overlap,
            device=arguments.device,
        ),
        threads=arguments.threads,
        seed=arguments.seed,
        hosts=arguments.hosts,
    )


def _check_hosts(arguments: argparse.Namespace) -> None:
    """Raise if other options conflict with several nodes."""
    threads = arguments.threads
    problem = cli_hosts.refusal(arguments.hosts, max(arguments.workers), threads=threads)
    if problem is None and arguments.device == "cuda":
        problem = (
            "--hosts needs --device cpu; the demo fuses norms into all-reduces on GPUs, which "
            "NCCL, the GPU backend for several nodes, does not support"
        )
    if problem is not None:
        raise OptionError(problem)


def _config(arguments: argparse.Namespace, shards: int, need: int) -> Config:
    """Return the sizes of the model; unspecified ones can be split into `shards` shards."""
    for name in ("hidden", "heads", "kv_heads", "inner", "vocabulary"):
        size = getattr(arguments, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    heads = arguments.heads
    if heads is None:
        heads = _next_multiple((arguments.hidden or _HIDDEN) // _HEAD_WIDTH or 1, shards)
    hidden = arguments.hidden
    if hidden is None:
        hidden = _next_multiple(_HIDDEN, heads * 2)
    kv_heads = arguments.kv_heads
    if kv_heads is None:
        kv_heads = heads // 2 if heads % 2 == 0 and heads // 2 % shards == 0 else heads
    return Config(
        layers=arguments.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        # The shard of each worker is a multiple of 16, for vector instructions.
        inner=arguments.inner or _next_multiple(hidden * 11 // 4, 16 * shards),
        vocabulary=arguments.vocabulary or _next_multiple(_VOCABULARY, 16 * shards),
        context=arguments.context or max(need, Config.context),
        dtype=arguments.dtype,
    )


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError` instead of exiting."""
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "tvm-ipc demo",
        description="Compile a tensor-parallel decoder for several numbers of workers, continue a "
        "prompt with each, and compare the tokens and the speed. On CPUs, each worker uses one "
        "core; one worker is also timed on all cores.",
        epilog="Exit code: 0 all generated the same tokens, 1 different tokens or a failure, "
        "2 invalid options.",
        allow_abbrev=False,
    )
    _add_workers(parser.add_argument_group("workers"))
    _add_model(parser.add_argument_group("model"))
    _add_compilation(parser.add_argument_group("compilation"))
    return parser


def _add_workers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=list(_WORKERS),
        metavar="N",
        help=f"numbers of workers, each 1 to {MAX_WORKERS}; 1 is always included (default: 1 2 4)",
    )
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="device that the workers compute on: a CPU core each, or NVIDIA GPUs, which workers "
        "share if there are fewer (default: cpu)",
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
        help=f"nodes for sessions with at least as many workers: {cli_hosts.HELP}",
    )


def _add_model(group: argparse._ActionsContainer) -> None:
    default = Options()

    def number(name: str, value: int | None, text: str) -> None:
        group.add_argument(_option(name), type=int, default=value, metavar="N", help=text)

    layers, length, tokens = default.config.layers, default.prompt_length, default.tokens
    number("layers", layers, f"number of decoder layers (default: {layers})")
    number("hidden", None, f"width of the residual stream (default: {_HIDDEN} or a bit more)")
    number("heads", None, f"number of query heads (default: one per {_HEAD_WIDTH} of the width)")
    number("kv_heads", None, "number of heads of keys and values (default: half of the heads)")
    number("inner", None, "width of the MLP (default: about 11/4 of the residual stream)")
    number("vocabulary", None, f"size of the vocabulary (default: {_VOCABULARY} or a bit more)")
    number("context", None, "number of positions in the KV cache (default: as needed)")
    number("prompt_length", length, f"number of tokens in the prompt (default: {length})")
    number("tokens", tokens, f"number of tokens to generate (default: {tokens})")
    number("seed", default.seed, "seed of the random weights and prompt (default: 0)")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of weights and activations (default: float32)",
    )


def _add_compilation(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--strategy",
        choices=[strategy.name.lower() for strategy in AllReduceStrategy],
        default="auto",
        help="algorithm of the all-reduces; all give the same bits (default: auto)",
    )
    group.add_argument(
        "--blas",
        action=argparse.BooleanOptionalAction,
        help="run matmuls with OpenBLAS (scipy-openblas64), or with kernels of TVM; --blas also "
        "compares the two (default: OpenBLAS if it is installed)",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split the rows of the prompt's residual stream over the workers, with an all-gather "
        "before each attention and MLP and a reduce-scatter after it",
    )
    group.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="with --sequence-parallel: split the rows of each worker into N chunks, so that "
        "matmuls overlap with communication, and compare with no overlap",
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _next_multiple(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor * divisor
