# SPDX-License-Identifier: Apache-2.0
"""How fast is a Llama on two workers, next to PyTorch with two threads and to one worker?

    python benchmarks/models.py            # some minutes
    python benchmarks/models.py --quick    # few rounds

The same model, of 111 million weights that are drawn at random, for all three:

    PyTorch     transformers' own model and cache, two threads
    1 worker    tvm_ipc.models.load on a session of one worker with one thread
    2 workers   the same on two, a thread to each

All stay open and take turns within each round; whoever begins changes from round to round. A turn
is a whole generation, from a prompt of 128 tokens to the last token, after one token that is not
timed and wakes everybody; prefill is the time to the first token, decode the mean of the others.
Before each turn there is a pause, in which threads of the one before go to sleep. Figures are
medians over rounds, a ratio is the median of the ratios within rounds. In float32 all must say the
same tokens.

Decode reads all weights but the embedding for each token, so beside the ratios stand the rate at
which they were read, and what `read_limit.c` finds, in the same run, that one core and two at once
can read: two workers cannot gain more over one than these two do.

Memory is the most that was resident (VmHWM, pages that processes share counted in each) while the
weights were loaded: of the controller, in which the first worker is a thread, and of the worker
that has most. The controller has TVM's runtime alone, as `tvm-ipc run` has, and every program that
begins with `tvm_ipc.runtime_only()`. Beside it stand what the loading added to both, and the whole
life of a `tvm-ipc run`.

The exit code is 1 where somebody says something else, or, without --quick, a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import torch
import transformers
from end_to_end import take_the_cores
from peers import read_limit
from report import layout, machine

import tvm_ipc
from tvm_ipc import models
from tvm_ipc.tools.run.pytorch_baseline import greedy_decode

RIVAL, ONE, TWO = "PyTorch", "1 worker", "2 workers"
CONTESTANTS = (RIVAL, ONE, TWO)
DTYPES = ("float32", "bfloat16")
PHASES = ("prefill", "decode")
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
#: Two workers against PyTorch in each phase and type, and in decode over types; and against one.
NOT_SLOWER, DECODE, ONE_WORKER = 1.0, 1.2, 1.6
#: The controller's memory against that of another worker, at most, on so many workers.
MEMORY, OF_WORKERS = 1.2, (2, 4)
#: Seconds after which threads that spin have gone to sleep: PyTorch's do so for 0.2.
PAUSE = 0.5

#: Given a prompt and a number of tokens: the tokens, seconds to the first, and to the others.
Generate = Callable[[list[int], int], tuple[list[int], float, float]]


@dataclass
class Results:
    """Seconds by round, of every contestant, for one type.

    Attributes
    ----------
    read : bytes of weights that are read for each token.
    memory : MiB of each process, by the number of workers: the most, and what loading added.
    command : how many times a worker's `tvm-ipc run` has at most, by the number of workers.
    """

    prefill: dict[str, list[float]] = field(default_factory=dict)
    decode: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    read: int = 0
    memory: dict[int, list[list[float]]] = field(default_factory=dict)
    command: dict[int, float] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """Bytes of weights that are read in a second of decode."""
        return self.read / median(self.decode[name])

    def ratio(self, phase: str, slow: str, fast: str) -> float:
        times: dict[str, list[float]] = getattr(self, phase)
        return median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def ours(model: Any) -> Generate:
    def generate(prompt: list[int], count: int) -> tuple[list[int], float, float]:
        tokens: list[int] = []
        start = first = time.perf_counter()
        for token in model.generate(prompt, count, stop=()):
            tokens.append(token)
            if len(tokens) == 1:
                first = time.perf_counter()
        return tokens, first - start, time.perf_counter() - first

    return generate


@contextlib.contextmanager
def contestants(dtype: str) -> Iterator[tuple[dict[str, Generate], int, str]]:
    """Open all of them, with the same weights; and say how many these are, and where."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    weights = sum(prod(parameter.shape) for parameter in model.parameters())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model.save_pretrained(folder)
        seats: dict[str, Generate] = {RIVAL: partial(greedy_decode, torch, model)}
        for name, workers in ((ONE, 1), (TWO, 2)):
            session = stack.enter_context(tvm_ipc.Session(workers))
            session.get_global_func("tvm_ipc.worker.set_threads")(1)
            seats[name] = ours(models.load(folder, session))
        yield seats, weights, folder


def most_memory(folder: str, workers: int) -> list[list[float]]:
    """What `peaks` says in a process that has TVM's runtime alone."""
    program = (
        "import json, tvm_ipc; tvm_ipc.runtime_only(); import load_weights; "
        f"print(json.dumps(load_weights.peaks({folder!r}, {workers})))"
    )
    found: list[list[float]] = json.loads(_last_line(["-c", program]))
    return found


def memory_of_command(folder: str, workers: int) -> float:
    """How many times the memory of a worker `tvm-ipc run` has at most, from begin to end."""
    options = ["--tokens", "1,2,3", "--max-new-tokens", "8", "--json", "--workers", str(workers)]
    facts = json.loads(_last_line(["-m", "tvm_ipc", "run", folder, *options]))
    controller, *others = facts["memory"]["peak_of_processes"]
    return float(controller / max(others))


def _last_line(arguments: list[str]) -> str:
    command, here = [sys.executable, *arguments], Path(__file__).parent
    said = subprocess.run(command, cwd=here, check=True, stdout=subprocess.PIPE, text=True)
    return said.stdout.splitlines()[-1]


def run(dtype: str, options: argparse.Namespace) -> tuple[Results, int]:
    results = Results()
    prompt = np.random.default_rng(0).integers(SIZES["vocab_size"], size=options.prompt).tolist()
    with contestants(dtype) as (seats, weights, folder):
        embedding = SIZES["vocab_size"] * SIZES["hidden_size"]
        results.read = (weights - embedding) * (4 if dtype == "float32" else 2)
        said = {name: generate(prompt, options.tokens)[0] for name, generate in seats.items()}
        for name in (ONE, TWO) if dtype == "float32" else ():
            if said[name] != said[RIVAL]:
                results.wrong.append(f"{dtype}, {name}: other tokens than {RIVAL}")
        for number in range(options.rounds):
            for place in range(len(CONTESTANTS)):
                name = CONTESTANTS[(place + number) % len(CONTESTANTS)]
                time.sleep(PAUSE)
                seats[name](prompt, 1)
                tokens, first, rest = seats[name](prompt, options.tokens)
                if tokens != said[name]:
                    results.wrong.append(f"{dtype}, {name}: other tokens than the first time")
                results.prefill.setdefault(name, []).append(first)
                results.decode.setdefault(name, []).append(rest / (options.tokens - 1))
        for workers in OF_WORKERS:
            results.memory[workers] = most_memory(folder, workers)
            results.command[workers] = memory_of_command(folder, workers)
    return results, weights


def table(found: dict[str, Results]) -> str:
    rows = [["", "", *(f"{name} ms" for name in CONTESTANTS), "against PyTorch", "1 worker"]]
    for dtype, results in found.items():
        for phase in PHASES:
            times = [f"{median(getattr(results, phase)[name]) * 1e3:.2f}" for name in CONTESTANTS]
            gains = [f"{results.ratio(phase, name, TWO):.2f}x" for name in (RIVAL, ONE)]
            rows.append([phase, dtype, *times, *gains])
    return layout(rows)


def limits(found: dict[str, Results], one: float, two: float) -> str:
    """How fast weights are read, and could be."""
    lines = [
        f"One core reads {one / 1e9:.1f} GB/s of memory here, two at once {two / 1e9:.1f}: where "
        f"memory limits decode, two workers are {two / one:.2f} times as fast as one at most"
    ]
    for dtype, results in found.items():
        rates = [results.rate(name) for name in (ONE, TWO)]
        lines.append(
            f"decode, {dtype}: {rates[0] / 1e9:.1f} GB/s of weights on one worker "
            f"({rates[0] / one:.0%} of that), {rates[1] / 1e9:.1f} on two ({rates[1] / two:.0%})"
        )
    return "\n".join(lines)


def goals(found: dict[str, Results]) -> dict[str, bool]:
    made = {}
    for dtype, results in found.items():
        for phase in PHASES:
            for name, goal in ((RIVAL, NOT_SLOWER), (ONE, ONE_WORKER)):
                ratio = results.ratio(phase, name, TWO)
                text = f"{phase}, {dtype}: {ratio:.2f} times as fast as {name}, {goal} at least"
                made[text] = ratio >= goal
        for workers, processes in results.memory.items():
            (most, added), *others = processes
            ratio, grown = most / max(o[0] for o in others), added / max(o[1] for o in others)
            text = (
                f"memory, {dtype}, {workers} workers: the controller has {most:.0f} MiB, "
                f"{ratio:.2f} times what a worker has, below {MEMORY} wanted; "
                f"loading added {added:.0f} MiB to it, {grown:.2f} times what it added to that; "
                f"`tvm-ipc run` from begin to end {results.command[workers]:.2f} times"
            )
            made[text] = ratio < MEMORY
    mean = geometric_mean(results.ratio("decode", RIVAL, TWO) for results in found.values())
    text = f"decode: {mean:.2f} times as fast as {RIVAL} over the types, {DECODE} at least"
    return {**made, text: mean >= DECODE}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds, and no goals")
    add("--only", nargs="+", choices=DTYPES, default=list(DTYPES), help="which types")
    add("--rounds", type=int, help="how often each is measured (15; quick: 3)")
    add("--prompt", type=int, default=128, help="tokens of the prompt (128)")
    add("--tokens", type=int, default=32, help="tokens to generate (32)")
    add("--json", type=Path, help="a file for all times")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 15)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    cores = len(os.sched_getaffinity(0))
    print(f"scheduled {take_the_cores()}, on {cores} cores", flush=True)
    found = {}
    one, two = (read_limit(count) for count in (1, 2))
    for dtype in options.only:
        found[dtype], weights = run(dtype, options)
    head = f"{weights / 1e6:.0f}M weights, {options.prompt} tokens read, {options.tokens} written"
    print(f"\n{head}; {options.rounds} rounds\n\n{table(found)}\n")
    one, two = (max(x, read_limit(count)) for x, count in ((one, 1), (two, 2)))
    print(f"{limits(found, one, two)}\n")
    held = goals(found)
    for goal, holds in held.items():
        print(f"{'met' if holds else 'MISSED'}: {goal}")
    wrong = [message for results in found.values() for message in results.wrong]
    for message in wrong:
        print(message, file=sys.stderr)
    if options.json is not None:
        results = {dtype: asdict(one) for dtype, one in found.items()}
        document = {"machine": machine(), "sizes": SIZES, "results": results, "goals": held}
        document["read_limit"] = {"one core": one, "two cores": two}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong or not (options.quick or all(held.values())) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
