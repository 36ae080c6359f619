# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of a Llama on tvm_ipc and on other engines for CPUs.

    python benchmarks/engines.py                  # all that is installed; over an hour
    python benchmarks/engines.py --quick          # a tiny model, to see that all engines work
    python benchmarks/engines.py --parts speed --types bfloat16 --threads 2 --prompts 512

The same model, with 316 million random weights, for tvm_ipc (with one worker, and with one worker
per thread), PyTorch (eager and compiled), OpenVINO GenAI, ONNX Runtime GenAI, CTranslate2 and
llama.cpp. Each engine runs in a process of its own, of this environment, of one below
benchmarks/out/ that `--install` makes, or of the one that `--python ENGINE=PATH` specifies. An
engine that is not installed is listed with the command that installs it.

    start    conversion, seconds from the start of the process to the first token, without and with
             caches, memory (PSS), and greedy tokens in float32 compared with PyTorch's
    speed    prefill and decode, by type, threads and prompt
    beside   the same with one core kept busy by a plain, a niced or short-lived processes, on all
             cores and pinned to the other ones
    batch    several prompts of equal length at once

All contestants of a table stay open and take turns within each round; who begins changes from round
to round. A turn is a whole generation from a new random prompt, after a pause, in which threads of
the one before go to sleep, and three tokens that are not timed. Prefill is the time to the first
token, decode that of the others. Figures are medians over rounds, a ratio is the median of the
ratios within rounds. Decode reads all weights but the embedding, and keys and values, for each
token: the share of the read limit compares that with what `read_limit.c` reads in the same run.

The exit code is 1 if greedy tokens of tvm_ipc differ from PyTorch's, or, without --quick, if a goal
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import engine_models
import engine_processes
import engine_report
import numpy as np
from engine_processes import LABELS, Contestant, EngineError, EngineProcess, Neighbour, contestants
from engine_report import BATCH, BESIDE, NOBODY, SPEED, Case, Key, Results, Start
from peers import read_limit
from report import machine

START = "start"
PARTS = (START, SPEED, BESIDE, BATCH)
DTYPES = ("float32", "bfloat16")
#: Seconds after which threads that spin have gone to sleep: PyTorch's do so for 0.2.
PAUSE = 0.5
WARM_PROMPT, WARM_TOKENS = 16, 3
#: Prompts that are not timed have numbers from here on, so that no timed one was seen before.
UNTIMED = 1 << 20


class Setup:
    """The engines that were found, and the model in the format of each."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.sizes = engine_models.SMALL if options.quick else engine_models.FULL
        self.results = Results(self.sizes, options.tokens)
        self._converted: dict[tuple[str, str], tuple[Path, float]] = {}
        self._pythons: dict[str, str] = {}
        for engine in dict.fromkeys(["torch", *options.engines]):
            python = engine_processes.find_python(engine, options.python, options.install)
            if python is not None:
                self._pythons[engine] = python
            else:
                self.results.missing[LABELS[engine]] = engine_processes.pip_command(engine)
        if "torch" not in self._pythons:
            wanted = engine_processes.pip_command("torch")
            sys.exit(
                f"engines.py: no interpreter has transformers, which makes the model: {wanted}"
            )
        self.engines = [
            engine for engine in LABELS if engine in {*options.engines} & {*self._pythons}
        ]

    def prompts(self, number: int, length: int, count: int = 1) -> list[list[int]]:
        """Return random prompts, new ones for each number, so that no engine has cached them."""
        draw = np.random.default_rng((number, length, count))
        first, size = engine_models.FIRST_ORDINARY, self.sizes["vocab_size"]
        found: list[list[int]] = draw.integers(first, size, (count, length)).tolist()
        return found

    def model(self, engine: str, dtype: str) -> tuple[Path, float]:
        """Return the model in the format of an engine, and the seconds of its conversion."""
        if (engine, dtype) not in self._converted:
            self._converted[engine, dtype] = self._convert(engine, dtype)
        return self._converted[engine, dtype]

    def _convert(self, engine: str, dtype: str) -> tuple[Path, float]:
        source = self.source(dtype)
        target = self.folder / f"{engine}-{dtype}"
        command = engine_models.conversion(engine, self._pythons[engine], source, target, dtype)
        return (target, self._made(target, command)) if command else (source, 0.0)

    def source(self, dtype: str) -> Path:
        """Return the model in the format of transformers."""
        target = self.folder / f"model-{dtype}"
        program = [self._pythons["torch"], str(Path(engine_models.__file__).resolve())]
        try:
            self._made(target, [*program, "make", str(target), dtype, json.dumps(self.sizes)])
        except EngineError as error:
            sys.exit(f"engines.py: the model cannot be made with {program[0]}: {error}")
        return target

    def _made(self, target: Path, command: list[str]) -> float:
        """Make a model, unless it exists; return the seconds that this took."""
        stamp = Path(f"{target}.seconds")
        if not stamp.exists():
            print(f"making {target.name}", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)
            log = Path(f"{target}.log")
            seconds = engine_processes.run_logged(command, log, self.options.limit)
            stamp.write_text(str(seconds))
        return float(stamp.read_text())

    def open(self, contestant: Contestant, dtype: str, cold: bool = False) -> EngineProcess:
        """Start a process, and load the model; with empty caches if cold."""
        path, _ = self.model(contestant.engine, dtype)
        context = max(512, max(self.options.prompts) + self.options.tokens)
        task = {"path": str(path), "dtype": dtype, "context": context}
        name = f"{contestant.engine}-{contestant.workers}-{contestant.threads}-{dtype}"
        folder = self.folder / "processes" / name
        if cold:
            shutil.rmtree(folder, ignore_errors=True)
        python = self._pythons[contestant.engine]
        process = EngineProcess(contestant, python, task, folder, self.options.limit)
        self.results.versions[LABELS[contestant.engine]] = process.version
        return process

    @contextlib.contextmanager
    def noted(self, contestant: Contestant, dtype: str, batch: int = 1) -> Iterator[None]:
        """Note the reason if a contestant fails, and go on without it."""
        try:
            yield
        except EngineError as error:
            case = _case(contestant, dtype, batch)
            self.results.notes[case] = str(error)
            print(f"{case}: {error}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def all_open(
        self,
        those: Sequence[Contestant],
        dtype: str,
        warm: Callable[[EngineProcess], object],
        batch: int = 1,
    ) -> Iterator[dict[Contestant, EngineProcess]]:
        """Open the processes of all that can take part, and warm each of them."""
        processes: dict[Contestant, EngineProcess] = {}
        with contextlib.ExitStack() as stack:
            for contestant in those:
                if _case(contestant, dtype)._replace(pinned=False) in self.results.notes:
                    continue
                with self.noted(contestant, dtype, batch):
                    process = self.open(contestant, dtype)
                    stack.callback(process.close)
                    warm(process)
                    processes[contestant] = process
            yield processes

    def take_turns(
        self, processes: dict[Contestant, EngineProcess], like: Key, rounds: range
    ) -> None:
        """Let all take turns in each round; `like` is their case without a label."""
        order = list(processes)
        for number in rounds:
            prompts = self.prompts(number, like.prompt, like.batch)
            start = number % max(1, len(order))
            for contestant in order[start:] + order[:start]:
                if contestant in processes:
                    with self.noted(contestant, like.dtype, like.batch):
                        process = processes.pop(contestant)
                        self._turn(process, like, number, prompts)
                        processes[contestant] = process

    def _turn(
        self, process: EngineProcess, like: Key, number: int, prompts: list[list[int]]
    ) -> None:
        its = process.contestant
        time.sleep(0 if self.options.quick else PAUSE)
        process.generate(self.prompts(UNTIMED + number, WARM_PROMPT), WARM_TOKENS)
        _, first, rest = process.generate(prompts, self.options.tokens)
        pinned = its.cores is not None
        key = like._replace(label=its.label, threads=its.threads, pinned=pinned)
        self.results.add(key, number, first, rest)


def _case(contestant: Contestant, dtype: str, batch: int = 1) -> Case:
    pinned = contestant.cores is not None
    return Case(contestant.label, contestant.threads, dtype, batch, pinned)


def measure_starts(setup: Setup) -> None:
    """Start each contestant twice, alone: with empty caches, and again."""
    options = setup.options
    expected: dict[int, list[int]] = {}

    def tokens_after(process: EngineProcess, length: int) -> list[int]:
        return process.generate(setup.prompts(UNTIMED, length), options.tokens)[0][0]

    if "float32" in options.types:
        reference = Contestant("torch", max(options.threads))
        with (
            setup.noted(reference, "float32"),
            contextlib.closing(setup.open(reference, "float32")) as process,
        ):
            expected = {length: tokens_after(process, length) for length in options.prompts}
    shortest, longest = min(options.prompts), max(options.prompts)
    for dtype in options.types:
        for contestant in [c for n in options.threads for c in contestants(setup.engines, n)]:
            with setup.noted(contestant, dtype):
                seconds = []
                for number, cold in enumerate((True, False)):
                    with contextlib.closing(setup.open(contestant, dtype, cold)) as process:
                        process.generate(setup.prompts(UNTIMED + 1 + number, shortest), 1)
                        seconds.append(time.perf_counter() - process.start)
                        if cold:
                            continue
                        equal = None
                        if dtype == "float32" and expected:
                            own = {
                                length: tokens_after(process, length) for length in options.prompts
                            }
                            equal = sum(_equal(own[n], expected[n]) for n in options.prompts)
                        else:
                            tokens_after(process, longest)
                        memory = process.memory()
                _, conversion = setup.model(contestant.engine, dtype)
                compared = len(options.prompts) * options.tokens
                start = Start(conversion, seconds[0], seconds[1], memory, equal, compared)
                setup.results.starts[_case(contestant, dtype)] = start


def _equal(tokens: list[int], expected: list[int]) -> int:
    """Return the number of tokens before the first that is not the expected one."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((n for n, (a, b) in pairs if a != b), len(expected))


def measure_speed(setup: Setup) -> None:
    """Measure all contestants with a type and a number of threads, for each prompt."""
    options = setup.options
    for dtype in options.types:
        for threads in options.threads:

            def warm(process: EngineProcess) -> None:
                for length in options.prompts:
                    process.generate(setup.prompts(UNTIMED + 3, length), WARM_TOKENS)

            with setup.all_open(contestants(setup.engines, threads), dtype, warm) as processes:
                for length in options.prompts:
                    like = Key("", threads, dtype, length)
                    setup.take_turns(processes, like, range(options.rounds))


def measure_beside_neighbours(setup: Setup) -> None:
    """Measure each engine beside neighbours, one after another: each has several processes."""
    options, length = setup.options, min(setup.options.prompts)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("beside: skipped; a neighbour takes one core, and this is the only one")
        return

    def warm(process: EngineProcess) -> None:
        process.generate(setup.prompts(UNTIMED + 3, length), WARM_TOKENS)

    for dtype in options.types:
        for engine in setup.engines:
            those = [c for threads in options.threads for c in contestants([engine], threads)]
            those.append(Contestant(engine, 1, cores=tuple(cores[1:])))
            with setup.all_open(those, dtype, warm) as processes:
                for kind in (NOBODY, *options.neighbours):
                    like = Key("", 1, dtype, length, BESIDE, kind)
                    with Neighbour(kind, cores[0]) if kind != NOBODY else contextlib.nullcontext():
                        setup.take_turns(processes, like, range(options.rounds))


def measure_batches(setup: Setup) -> None:
    """Measure one prompt and several of equal length at once."""
    options, length = setup.options, min(setup.options.prompts)
    for dtype in options.types:
        for threads in options.threads:

            def warm(process: EngineProcess) -> None:
                prompts = setup.prompts(UNTIMED + 3, length, options.batch)
                process.generate(prompts, WARM_TOKENS)

            those = contestants(setup.engines, threads)
            with setup.all_open(those, dtype, warm, options.batch) as processes:
                for number in range(options.rounds):
                    for batch in (1, options.batch):
                        like = Key("", threads, dtype, length, BATCH, batch=batch)
                        setup.take_turns(processes, like, range(number, number + 1))


MEASURE = {
    START: measure_starts,
    SPEED: measure_speed,
    BESIDE: measure_beside_neighbours,
    BATCH: measure_batches,
}


def measure_read_limits(setup: Setup) -> None:
    """Measure the read limit over as much memory as the weights take; keep the highest."""
    results = setup.results
    weights = engine_models.weights_read(setup.sizes) * min(
        engine_report.WIDTH[dtype] for dtype in setup.options.types
    )
    for threads in setup.options.threads:
        mebibytes = max(1, weights // threads >> 20)
        results.limits[threads] = max(
            results.limits.get(threads, 0.0), read_limit(threads, mebibytes)
        )


def _chosen_python(text: str) -> tuple[str, str]:
    engine, separator, python = text.partition("=")
    if not separator or engine not in LABELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not ENGINE=PATH, with an engine of {', '.join(LABELS)}"
        )
    return engine, python


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    quick = "a tiny model, two rounds and few tokens, and no goals"
    add("--quick", action="store_true", help=quick)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts")
    add("--engines", nargs="+", choices=LABELS, default=list(LABELS), help="which engines")
    add("--types", nargs="+", choices=DTYPES, default=list(DTYPES), help="which types")
    add("--threads", nargs="+", type=_count, default=[1, 2], help="numbers of threads (1 2)")
    add("--prompts", nargs="+", type=_count, help="tokens of prompts (128 512 2048)")
    add("--tokens", type=_count, help="tokens to generate, 2 or more (32)")
    kinds = list(engine_processes.NEIGHBOURS)
    add("--neighbours", nargs="+", choices=kinds, default=kinds, help="of the part `beside`")
    add("--batch", type=_count, default=8, help="prompts at once (8)")
    add("--rounds", type=_count, help="how often each is measured (7)")
    add("--limit", type=float, default=1800, help="seconds of one step of an engine (1800)")
    add("--install", action="store_true", help="install engines that are missing, below out/")
    python = "the interpreter of an engine, ENGINE=PATH; may be repeated"
    add("--python", type=_chosen_python, action="append", default=[], help=python)
    add("--folder", type=Path, help="keep the models and caches there, for later runs")
    add("--json", type=Path, help="a file for all times")
    options = parser.parse_args(arguments)
    options.python = dict(options.python)
    options.prompts = options.prompts or ([16, 40] if options.quick else [128, 512, 2048])
    options.tokens = options.tokens or (4 if options.quick else 32)
    options.rounds = options.rounds or (2 if options.quick else 7)
    most = engine_models.CONTEXT - options.tokens
    if options.tokens < 2 or max(options.prompts) > most:
        parser.error(f"--tokens must be 2 or more, and --prompts at most {most} with these tokens")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-")))
        folder = (folder / ("quick" if options.quick else "full")).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(options, folder)
        measure_read_limits(setup)
        try:
            for part in options.parts:
                print(f"measuring: {part}", file=sys.stderr, flush=True)
                MEASURE[part](setup)
                write_json(setup)
            measure_read_limits(setup)
        except (KeyboardInterrupt, SystemExit) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "interrupted" if interrupted else error
            print(f"{why}; these are the results so far", file=sys.stderr, flush=True)
            finish(setup)
            return 130 if interrupted else 1
    return finish(setup)


def write_json(setup: Setup) -> None:
    """Write what was measured so far to the file of `--json`."""
    options = setup.options
    if options.json is not None:
        shown = {name: str(value) for name, value in vars(options).items()}
        document: dict[str, Any] = {"machine": machine(), "options": shown}
        document["goals"] = engine_report.goals(setup.results)
        document |= engine_report.as_json(setup.results)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def finish(setup: Setup) -> int:
    """Print the tables and goals, write the file, and return the exit code."""
    options, results = setup.options, setup.results
    limits = ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in results.limits.items())
    print(
        f"{machine()['cpu']}, {len(os.sched_getaffinity(0))} cores; read limit by cores: {limits}"
    )
    print(f"medians of {options.rounds} rounds, {options.tokens} tokens after each prompt\n")
    print(engine_report.report(results), end="\n\n")
    goals = {} if options.quick else engine_report.goals(results)
    for goal, holds in goals.items():
        print(f"{'met' if holds else 'MISSED'}: {goal}")
    write_json(setup)
    wrong = engine_report.other_tokens(results)
    for case in wrong:
        print(f"{case}: other greedy tokens than PyTorch's", file=sys.stderr)
    return 1 if wrong or not all(goals.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
