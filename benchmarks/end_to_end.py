# SPDX-License-Identifier: Apache-2.0
"""How much faster do two workers run the demo's decoder than one, and what are our passes worth?

    python benchmarks/end_to_end.py            # a few minutes
    python benchmarks/end_to_end.py --quick    # under one, the demo's own sizes only

Contestants, a thread to each worker:

    1 worker            the whole model
    2 workers           half of it each, all that our pipeline does
    barriers kept       the same program, but every all-reduce waits at its end
    ordinary allreduce  2 workers without IPCAllReduceRewrite: every input is staged

All sessions stay open and asleep, and take turns within each round; whoever begins changes from
round to round. A turn is a whole generation, prompt to last token, after one token that is not
timed and wakes everybody; prefill is the time to the first token, decode the mean of the others.
Figures are medians over rounds, a ratio is the median of the ratios within rounds. A turn waits for
a moment when nothing else runs, and is taken again if something did, as long as --patience lasts.
All must say the same tokens, two workers with the same bits.

The exit code is 1 where somebody says something else, or, without --quick, a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tvm
from allreduce_cpu import Quiet
from report import layout, machine
from tvm import relax

import tvm_ipc
from tvm_ipc.analysis.collective_calls import match_collective
from tvm_ipc.analysis.walk_and_rewrite_bindings import change_functions, rewrite, with_value
from tvm_ipc.examples.tensor_parallel_decoder import decoder_model as model
from tvm_ipc.examples.tensor_parallel_decoder import random_weights as weights
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.generate import Generation, Generator
from tvm_ipc.examples.tensor_parallel_decoder.schedule_matmuls import schedule_matmuls
from tvm_ipc.packed_functions import CollectiveFlag

ONE, TWO, BARRIERS, ORDINARY = "1 worker", "2 workers", "barriers kept", "ordinary allreduce"
CONTESTANTS = (ONE, TWO, BARRIERS, ORDINARY)
#: How many times faster two workers must be than one, at the demo's sizes.
GOALS = {"prefill": 1.85, "decode": 1.6}
LARGE = Config(layers=8, hidden=1024, heads=16, kv_heads=8, inner=2816, vocabulary=8192)
MODELS = {
    "demo, float32": Config(),
    "demo, bfloat16": Config(dtype="bfloat16"),
    "large, float32": LARGE,
}
PROMPT, TOKENS = 128, 32


@dataclass
class Results:
    """Seconds by round, of every contestant of one model."""

    prefill: dict[str, list[float]] = field(default_factory=dict)
    decode: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    disturbed: tuple[int, int] = (0, 0)  #: turns while other programs ran, of all turns

    def ratio(self, phase: str, slow: str, fast: str) -> float:
        times: dict[str, list[float]] = getattr(self, phase)
        return median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def keep_barriers(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
    """Take back what the planner promised: every all-reduce waits until all have read."""

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        collective = match_collective(value)
        if collective is None or not collective.flags:
            return None
        return [with_value(binding, collective.with_flags(CollectiveFlag.NONE))]

    return change_functions(mod, lambda _, function: rewrite(function, change))


def compile_contestant(name: str, config: Config, blas: bool) -> Any:
    workers = 1 if name == ONE else 2
    target = tvm_ipc.cpu_target()
    passes = [tvm_ipc.get_pipeline(target, workers, blas=blas, schedule=schedule_matmuls)]
    if name == BARRIERS:
        passes.append(tvm.transform.module_pass(keep_barriers, opt_level=0, name="KeepBarriers"))
    left_out = ["IPCAllReduceRewrite"] if name == ORDINARY else []
    with tvm.transform.PassContext(disabled_pass=left_out):
        mod = model.build(config, workers)
        return relax.build(mod, target, relax_pipeline=tvm.transform.Sequential(passes))


@contextlib.contextmanager
def generators(config: Config, blas: bool) -> Iterator[dict[str, Generator]]:
    """Open a session for every contestant."""
    values = list(weights.make(config))
    with contextlib.ExitStack() as sessions:
        seats = {}
        for name in CONTESTANTS:
            executable = compile_contestant(name, config, blas)
            session = sessions.enter_context(tvm_ipc.Session(1 if name == ONE else 2))
            session.get_global_func("tvm_ipc.worker.set_threads")(1)
            seats[name] = Generator(session, executable, config, values)
        yield seats


def judge(said: dict[str, Generation], exact: bool) -> Iterator[str]:
    """Say who said something else."""
    one, two = said[ONE], said[TWO]
    for name, other in said.items():
        if any(tokens != other.tokens[0] for tokens in other.tokens):
            yield f"{name}: the workers disagree"
        elif name != ONE and (
            other.tokens != two.tokens or other.logits.tobytes() != two.logits.tobytes()
        ):
            yield f"{name}: other bits than {TWO}"
        elif exact and other.tokens[0] != one.tokens[0]:
            yield f"{name}: other tokens than {ONE}"
    # In 16 bits, rounding may choose between two tokens; before that the logits are alike.
    distance = float(np.abs(one.logits[0] - two.logits[0]).max())
    if not distance <= (1e-4 if exact else 0.1) * float(np.abs(one.logits[0]).max()):
        yield f"{TWO}: logits are {distance:.1e} from those of {ONE}"


def run(config: Config, options: argparse.Namespace, label: str) -> Results:
    results = Results()
    prompt = np.random.default_rng(0).integers(config.vocabulary, size=options.prompt).tolist()
    with generators(config, options.blas) as seats:
        said = {name: seat.generate(prompt, options.tokens) for name, seat in seats.items()}
        results.wrong += [f"{label}, {w}" for w in judge(said, config.dtype == "float32")]
        quiet = Quiet(options.patience)
        end = time.monotonic() + options.budget
        for number in range(options.rounds):
            if number >= 3 and time.monotonic() > end:
                break
            for place in range(len(CONTESTANTS)):
                name = CONTESTANTS[(place + number) % len(CONTESTANTS)]
                again = turn(seats[name], prompt, options.tokens, quiet)
                if again.logits.tobytes() != said[name].logits.tobytes():
                    results.wrong.append(f"{label}, {name}: other bits than the first time")
                results.prefill.setdefault(name, []).append(again.prefill)
                decode = again.decode / (options.tokens - 1)
                results.decode.setdefault(name, []).append(decode)
        results.disturbed = (quiet.disturbed, quiet.measurements)
    return results


def turn(seat: Generator, prompt: list[int], tokens: int, quiet: Quiet) -> Generation:
    while True:
        quiet.wait()
        seat.generate(prompt, 1)
        said = seat.generate(prompt, tokens)
        if quiet.held():
            return said


def table(results: Results, label: str, options: argparse.Namespace) -> str:
    rounds = len(results.prefill[ONE])
    rows = [["", "prefill ms", "x", "decode ms", "x", "tokens/s"]]
    for name in CONTESTANTS:
        row = [name]
        for phase in ("prefill", "decode"):
            seconds = median(getattr(results, phase)[name])
            row += [f"{seconds * 1e3:.2f}", f"{results.ratio(phase, ONE, name):.2f}"]
        rows.append([*row, f"{1 / seconds:.0f}"])
    gains = []
    for name in (BARRIERS, ORDINARY):
        gain = [results.ratio(phase, name, TWO) - 1 for phase in ("prefill", "decode")]
        gains.append(f"{name}: {gain[0]:+.1%} and {gain[1]:+.1%} of the time of {TWO}")
    kernels = ", OpenBLAS" if options.blas else ""
    disturbed, turns = results.disturbed
    head = (
        f"\n{label}{kernels}: {options.prompt} tokens read, {options.tokens} written; "
        f"{rounds} rounds; {disturbed} of {turns} turns disturbed by other programs\n"
    )
    return "\n".join([head, layout(rows), *gains])


def missed(results: Results, label: str) -> Iterator[str]:
    for phase, goal in GOALS.items():
        ratio = results.ratio(phase, ONE, TWO)
        if ratio < goal:
            yield f"{label}: {phase} is {ratio:.2f} times as fast with two workers, not {goal}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the first model only, fewer rounds")
    add("--only", nargs="+", choices=list(MODELS), help="which models")
    add("--rounds", type=int, help="how often each is measured (25; quick: 9)")
    add("--budget", type=float, default=90.0, help="seconds after which a model has no new round")
    add("--patience", type=float, help="seconds to wait for quiet moments (120; quick: 20)")
    add("--prompt", type=int, default=PROMPT, help=f"tokens of the prompt ({PROMPT})")
    add("--tokens", type=int, default=TOKENS, help=f"tokens to generate ({TOKENS})")
    add("--blas", action="store_true", help="multiply with OpenBLAS instead of TVM's kernels")
    add("--json", type=Path, help="a file for all times")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (9 if options.quick else 25)
    options.patience = options.patience or (20.0 if options.quick else 120.0)
    return options


def take_the_cores() -> str:
    """Run before other programs, where the system lets us; the workers do as this process does.

    Two workers that meet in every layer wait for each other whenever something else takes a core
    from one of them, which one worker beside an idle core never feels.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    except PermissionError:
        return "like every program; what else runs here makes two workers slower than one"
    return "at real-time priority"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    print(f"scheduled {take_the_cores()}", flush=True)
    names = options.only or (list(MODELS)[:1] if options.quick else list(MODELS))
    found = {}
    for name in names:
        found[name] = run(MODELS[name], options, name)
        print(table(found[name], name, options), flush=True)
    wrong = [message for results in found.values() for message in results.wrong]
    misses = [m for name, results in found.items() for m in missed(results, name)]
    for message in wrong + misses:
        print(message, file=sys.stderr)
    if options.json:
        document = {
            "machine": machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "models": {name: asdict(config) for name, config in MODELS.items()},
            "results": {name: asdict(results) for name, results in found.items()},
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong or (misses and not options.quick) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
