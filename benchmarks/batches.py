# SPDX-License-Identifier: Apache-2.0
"""Compare the tokens per second that a batch of requests decodes with those of one request.

    python benchmarks/batches.py            # some minutes
    python benchmarks/batches.py --quick    # few rounds, and a small model

The Llama of `models.py`, with random weights. Each size of a batch gets as many prompts, of random
tokens; the batches take turns within each round, after a pause in which threads go to sleep. The
time of the prompts is not counted: a figure is the tokens of all requests after their first ones,
divided by the time of those steps. Figures are medians over rounds, and a ratio is the median of
the ratios within rounds. In float32 each request must have the tokens that it has alone; in 16-bit
types near ties may be decided differently, and the share of equal tokens is printed.

The exit code is 1 where tokens differ in float32, or, without --quick, the goal is missed: in
bfloat16, eight requests at once have at least five times the tokens per second of one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from end_to_end import take_the_cores
from models import DTYPES, PAUSE, SIZES
from report import layout, machine

import tvm_ipc
from tvm_ipc import models

BATCHES = (1, 2, 4, 8, 16)
#: A batch of this many requests against one, in bfloat16.
GOAL_SIZE, GOAL = 8, 5.0
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}


def steps_of(
    model: models.Model, prompts: Sequence[list[int]], count: int
) -> tuple[list[list[int]], float]:
    """Return the tokens of a batch of prompts, and the seconds of the steps after the first."""
    batch = model.batch(size=len(prompts))
    requests = [batch.add(prompt, count, stop=()) for prompt in prompts]
    while len(batch.step()) < len(requests):
        pass
    counted = sum(len(request.tokens) for request in requests)
    start = time.perf_counter()
    while batch.requests:
        batch.step()
    seconds = time.perf_counter() - start
    generated = sum(len(request.tokens) for request in requests) - counted
    return [request.tokens for request in requests], seconds / generated


def run(model: models.Model, dtype: str, options: argparse.Namespace) -> dict[int, list[float]]:
    """Return the seconds per token by size of the batch, for each round."""
    random = np.random.default_rng(0)
    prompts = random.integers(model.vocabulary, size=(max(BATCHES), options.prompt)).tolist()
    alone = [steps_of(model, [prompt], options.tokens)[0][0] for prompt in prompts]
    seconds: dict[int, list[float]] = {size: [] for size in options.sizes}
    for size in options.sizes:
        together = steps_of(model, prompts[:size], options.tokens)[0]
        pairs = [
            pair
            for tokens in zip(together, alone, strict=False)
            for pair in zip(*tokens, strict=True)
        ]
        same = sum(a == b for a, b in pairs)
        print(f"{dtype}, batch {size}: {same} of {len(pairs)} tokens as alone", flush=True)
        if dtype == "float32" and same < len(pairs):
            options.wrong.append(f"{dtype}, batch {size}: other tokens than alone")
    for number in range(options.rounds):
        for place in range(len(options.sizes)):
            size = options.sizes[(place + number) % len(options.sizes)]
            time.sleep(PAUSE)
            steps_of(model, prompts[:size], 3)
            seconds[size].append(steps_of(model, prompts[:size], options.tokens)[1])
    return seconds


def ratio(seconds: dict[int, list[float]], size: int) -> float:
    """Return the tokens per second of a batch, divided by those of the smallest one."""
    return median(a / b for a, b in zip(seconds[min(seconds)], seconds[size], strict=True))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, a small model, and no goal")
    add("--only", nargs="+", choices=DTYPES, default=list(DTYPES), help="which types")
    add("--workers", nargs="+", type=int, default=[1, 2], help="which numbers of workers (1 2)")
    add("--sizes", nargs="+", type=int, choices=BATCHES, default=list(BATCHES[:4]))
    add("--rounds", type=int, help="how often each is measured (9; quick: 2)")
    add("--prompt", type=int, default=128, help="tokens of each prompt (128)")
    add("--tokens", type=int, default=32, help="tokens to generate for each (32)")
    add("--json", type=Path, help="a file for all times")
    options = parser.parse_args(arguments)
    options.rounds, options.wrong = options.rounds or (2 if options.quick else 9), []
    sizes = {**SIZES, **SMALL} if options.quick else SIZES
    transformers.utils.logging.disable_progress_bar()
    print(f"scheduled {take_the_cores()}", flush=True)
    found: dict[str, dict[int, list[float]]] = {}
    for dtype in options.only:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        with tempfile.TemporaryDirectory() as folder:
            transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
            for workers in options.workers:
                with tvm_ipc.Session(workers) as session:
                    session.get_global_func("tvm_ipc.worker.set_threads")(1)
                    model = models.load(folder, session)
                    found[f"{dtype}, {workers} workers"] = run(model, dtype, options)
    rows = [["tokens/s", *(f"batch {size}" for size in options.sizes)]]
    for name, seconds in found.items():
        cells = [
            f"{1 / median(seconds[size]):.1f} ({ratio(seconds, size):.2f}x)"
            for size in options.sizes
        ]
        rows.append([name, *cells])
    print(f"\n{layout(rows)}\n")
    missed = []
    for name, seconds in found.items():
        if "bfloat16" in name and GOAL_SIZE in seconds and 1 in seconds:
            times = ratio(seconds, GOAL_SIZE)
            missed += [name] if times < GOAL else []
            print(
                f"{'met' if times >= GOAL else 'MISSED'}: {name}, batch {GOAL_SIZE} has {times:.2f}"
                f" times the tokens per second of one request, {GOAL} at least"
            )
    for message in options.wrong:
        print(message, file=sys.stderr)
    if options.json is not None:
        document = {"machine": machine(), "sizes": sizes, "seconds_per_token": found}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.wrong or (missed and not options.quick) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
