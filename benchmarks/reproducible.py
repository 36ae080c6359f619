# SPDX-License-Identifier: Apache-2.0
"""Measure what reproducible models cost: their speed, divided by that of the default.

    python benchmarks/reproducible.py            # some minutes
    python benchmarks/reproducible.py --quick    # few rounds, and a small model

The Llama of `engines.py`, with random weights, is loaded twice into one session: as the default,
and with `reproducible=True`. Both take turns within each round; a turn is a pause, three tokens
that are not timed, and one generation from a random prompt. Figures are medians over rounds, and
ratios are medians of the ratios within rounds.

The exit code is 1 if, without --quick, a goal is missed: at most 1.25 times the time of the default
for the prompt, and 1.05 times for each token after it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import engine_models
import numpy as np
import torch
import transformers
from models import PAUSE
from report import layout

import tvm_ipc
from tvm_ipc import models

PREFILL_GOAL, DECODE_GOAL = 1.25, 1.05


def times_of(model: models.Model, prompt: list[int], count: int) -> tuple[float, float]:
    """Return the seconds to the first token, and those of each token after it."""
    tokens = model.generate(prompt, count, stop=[])
    start = time.perf_counter()
    next(tokens)
    first = time.perf_counter()
    others = sum(1 for _ in tokens)
    return first - start, (time.perf_counter() - first) / others


def run(
    pair: Sequence[models.Model], options: argparse.Namespace
) -> list[list[tuple[float, float]]]:
    """Return the times of the default and of the reproducible model, for each round."""
    random = np.random.default_rng(0)
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(options.rounds):
        prompt = random.integers(pair[0].vocabulary, size=options.prompt).tolist()
        for index in (0, 1) if number % 2 else (1, 0):
            time.sleep(PAUSE)
            times_of(pair[index], prompt[:8], 3)
            times[index].append(times_of(pair[index], prompt, options.tokens))
    return times


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, a small model, and no goal")
    add("--types", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--workers", nargs="+", type=int, default=[1, 2], help="which numbers of workers (1 2)")
    add("--rounds", type=int, help="how often each is measured (11; quick: 2)")
    add("--prompt", type=int, default=512, help="tokens of the prompt (512)")
    add("--tokens", type=int, default=32, help="tokens to generate (32)")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 11)
    transformers.utils.logging.disable_progress_bar()
    rows = [["", "prefill", "reproducible", "time", "decode", "reproducible", "time"]]
    missed = []
    for dtype in options.types:
        torch.manual_seed(0)
        sizes = engine_models.SMALL if options.quick else engine_models.FULL
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        with tempfile.TemporaryDirectory() as folder:
            transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
            for workers in options.workers:
                with tvm_ipc.Session(workers) as session:
                    pair = [
                        models.load(Path(folder), session, reproducible=reproducible)
                        for reproducible in (False, True)
                    ]
                    default, fixed = run(pair, options)
                row = [f"{dtype}, {workers} workers"]
                for index, goal in ((0, PREFILL_GOAL), (1, DECODE_GOAL)):
                    count = options.prompt if index == 0 else 1
                    rates = [count / median(t[index] for t in side) for side in (default, fixed)]
                    ratio = median(b[index] / a[index] for a, b in zip(default, fixed, strict=True))
                    row += [*(f"{rate:.1f}" for rate in rates), f"{ratio:.2f}x"]
                    if workers == 2 and ratio > goal:
                        missed.append(f"{row[0]}: {ratio:.2f}x the time, {goal} at most")
                rows.append(row)
                print(f"\n{layout(rows)}\n", flush=True)
    for message in missed:
        print(f"MISSED: {message}")
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
