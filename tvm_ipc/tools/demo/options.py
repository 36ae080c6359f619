# SPDX-License-Identifier: Apache-2.0
"""Declare and check the options of `tvm-ipc demo`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import DTYPES, Config
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS, AllReduceStrategy
from tvm_ipc.tools.options import STRATEGIES, OptionError, Parser, between, number, option, switch

DEVICES: Final = ("cpu", "cuda")
_HIDDEN: Final = 512
_HEAD_WIDTH: Final = 64
_VOCABULARY: Final = 4096
#: The name of a size of the model in front of its value, in a message.
_SIZE: Final = re.compile(
    r"\b(layers|hidden|heads|kv_heads|inner|vocabulary|context)\b(?= (is )?-?\d)"
)


@dataclass(frozen=True)
class Build:
    """The options that a decoder is compiled with.

    Attributes
    ----------
    strategy : algorithm of the all-reduces.
    blas : whether matmuls are offloaded to OpenBLAS or run in kernels of TVM with the schedules of
        `schedule_matmuls`. None: OpenBLAS if it is installed.
    sequence_parallel : whether each worker has a shard of the rows of the residual stream.
    overlap : number of chunks per worker for overlapping communication with matmuls. None: no
        overlap.
    device : device that the workers compute on, one of `DEVICES`.
    """

    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    blas: bool | None = None
    sequence_parallel: bool = False
    overlap: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Options:
    """The options of the command; after `parse`, `workers` ascend and have 1."""

    workers: tuple[int, ...] = option(
        f"numbers of workers, each 1 to {MAX_WORKERS}; 1 is always included",
        (1, 2, 4),
        group="workers",
        type=int,
        nargs="+",
        metavar="N",
        check=between(1, MAX_WORKERS),
    )
    device: str = option(
        "device that the workers compute on: a CPU core each, or NVIDIA GPUs, which workers share "
        "if there are fewer",
        "cpu",
        choices=DEVICES,
    )
    threads: bool = switch("run the workers as threads of this process (default: as processes)")
    #: Nodes for sessions with at least as many workers; None: all workers are on this machine.
    hosts: cli_hosts.HostsArgument | None = option(
        f"nodes for sessions with at least as many workers: {cli_hosts.HELP}",
        type=cli_hosts.hosts,
        metavar=cli_hosts.METAVAR,
    )
    layers: int = number("number of decoder layers", Config.layers, group="model")
    hidden: int | None = number(f"width of the residual stream (default: {_HIDDEN} or a bit more)")
    heads: int | None = number(
        f"number of query heads (default: one per {_HEAD_WIDTH} of the width)"
    )
    kv_heads: int | None = number("number of heads of keys and values (default: half of the heads)")
    inner: int | None = number("width of the MLP (default: about 11/4 of the residual stream)")
    vocabulary: int | None = number(
        f"size of the vocabulary (default: {_VOCABULARY} or a bit more)"
    )
    context: int | None = number("number of positions in the KV cache (default: as needed)")
    prompt_length: int = number("number of tokens in the prompt", 128)
    tokens: int = number("number of tokens to generate", 32)
    seed: int = number("seed of the random weights and prompt", 0, least=0)
    dtype: str = option("type of weights and activations", "float32", choices=DTYPES)
    strategy: str = option(
        "algorithm of the all-reduces; all give the same bits",
        "auto",
        group="compilation",
        choices=STRATEGIES,
    )
    blas: bool | None = option(
        "run matmuls with OpenBLAS (scipy-openblas64), or with kernels of TVM; --blas also "
        "compares the two (default: OpenBLAS if it is installed)",
        action=argparse.BooleanOptionalAction,
    )
    sequence_parallel: bool = switch(
        "split the rows of the prompt's residual stream over the workers, with an all-gather "
        "before each attention and MLP and a reduce-scatter after it"
    )
    overlap: int | None = number(
        "with --sequence-parallel: split the rows of each worker into N chunks, so that "
        "matmuls overlap with communication, and compare with no overlap",
        most=MAX_EXPOSED,
    )

    @property
    def on_gpus(self) -> bool:
        """Return whether the workers compute on GPUs."""
        return self.device == "cuda"

    @property
    def positions(self) -> int:
        """Return the number of positions that the prompt and the tokens need in the cache."""
        return self.prompt_length + self.tokens - 1

    @property
    def build(self) -> Build:
        """Return the options that the decoder is compiled with."""
        strategy = AllReduceStrategy[self.strategy.upper()]
        return Build(strategy, self.blas, self.sequence_parallel, self.overlap, self.device)

    @cached_property
    def config(self) -> Config:
        """Return the sizes of the model; unspecified ones can be split over the workers."""
        shards = math.lcm(*self.workers)
        heads = self.heads or _next_multiple((self.hidden or _HIDDEN) // _HEAD_WIDTH or 1, shards)
        hidden = self.hidden or _next_multiple(_HIDDEN, heads * 2)
        half = heads // 2 if heads % 2 == 0 and heads // 2 % shards == 0 else heads
        return Config(
            layers=self.layers,
            hidden=hidden,
            heads=heads,
            kv_heads=self.kv_heads or half,
            # The shard of each worker is a multiple of 16, for vector instructions.
            inner=self.inner or _next_multiple(hidden * 11 // 4, 16 * shards),
            vocabulary=self.vocabulary or _next_multiple(_VOCABULARY, 16 * shards),
            context=self.context or max(self.positions, Config.context),
            dtype=self.dtype,
        )


def parser() -> Parser[Options]:
    """Return the parser of the command line."""
    return Parser(
        Options,
        "tvm-ipc demo",
        description="Compile a tensor-parallel decoder for several numbers of workers, continue a "
        "prompt with each, and compare the tokens and the speed. On CPUs, each worker uses one "
        "core; one worker is also timed on all cores.",
        epilog="Exit code: 0 all generated the same tokens, 1 different tokens or a failure, "
        "2 invalid options.",
    )


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    options = parser().read(argv)
    if options.overlap is not None and not options.sequence_parallel:
        raise OptionError(
            "--overlap needs --sequence-parallel, which adds the collectives that it overlaps"
        )
    if options.on_gpus and options.blas:
        raise OptionError("--blas needs --device cpu; on GPUs, matmuls run in kernels of TVM")
    if options.hosts is not None:
        threads = options.threads
        problem = cli_hosts.refusal(options.hosts, max(options.workers), threads=threads)
        if problem is None and options.on_gpus:
            problem = (
                "--hosts needs --device cpu; the demo fuses norms into all-reduces on GPUs, which "
                "NCCL, the GPU backend for several nodes, does not support"
            )
        if problem is not None:
            raise OptionError(problem)
    if options.context is not None and options.context < options.positions:
        raise OptionError(
            f"--context {options.context} is too short for a prompt of {options.prompt_length} "
            f"tokens and {options.tokens} new ones; use at least --context {options.positions}"
        )
    # One worker is the reference of all comparisons.
    options = replace(options, workers=tuple(sorted({1, *options.workers})))
    try:
        for number in options.workers:
            options.config.check_workers(number)
    except ValueError as error:
        raise OptionError(_SIZE.sub(lambda size: _option(size[0]), str(error))) from error
    return options


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _next_multiple(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor * divisor
