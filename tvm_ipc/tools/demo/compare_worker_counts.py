# SPDX-License-Identifier: Apache-2.0
"""Run the steps of the demo, and compare the results of all numbers of workers."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import ml_dtypes
import numpy as np
import tvm_ffi

import tvm_ipc
from tvm_ipc import this_machine
from tvm_ipc.arguments import counted
from tvm_ipc.errors import IPCError
from tvm_ipc.examples.tensor_parallel_decoder import random_weights
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.examples.tensor_parallel_decoder.generate import Generation, Generator, Weight
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.tools import gpu_assignment
from tvm_ipc.tools.demo import format_speed_table
from tvm_ipc.tools.demo.compile_model import Decisions, compile_model, decisions, target_name
from tvm_ipc.tools.demo.options import Build, Options
from tvm_ipc.tools.demo.step_printer import Report
from tvm_ipc.tools.format import bytes_text, list_text

#: Maximum number of timed generations, and seconds after which no further one starts.
_ROUNDS: Final = 7
_TIMING_SECONDS: Final = 1.0
#: Number of tokens that are printed.
_PRINTED_TOKENS: Final = 12
_REMEDY: Final = "run the demo again on an idle machine"
#: Tolerance of logits in units of float32 precision, whatever the type.
_ROUNDINGS: Final = 64


def run_demo(options: Options, report: Report) -> int:
    """Run the demo and return its exit code: 0 if all workers generate the same tokens."""
    config = options.config
    if options.on_gpus:
        gpu_assignment.require_gpus("demo", options.workers[-1] if options.threads else 0)
    if options.hosts is not None:  # fail before compilation
        cli_hosts.require(options.hosts)
    _check_memory(options)
    report.step("load", f"apache-tvm {version('apache-tvm')}, tvm-ipc {version('tvm-ipc')}")
    _describe(report, config)
    executables = {}
    build, variants = options.build, _variants(options)
    programs = [(n, build) for n in options.workers]
    programs += [(variant.workers, variant.build) for variant in variants]
    for index, (n, program_build) in enumerate(programs):

        def on_pass(name: str, done: float = index / len(programs), n: int = n) -> None:
            report.progress(done, f"compiling for {counted(n, 'worker')}: {name}")

        executables[n, program_build] = compile_model(config, n, program_build, on_pass)
    report.step("compile", f"for {list_text(options.workers)}: {target_name(build.device)}")
    most = options.workers[-1]
    decided = decisions(
        config,
        most,
        build,
        lambda name: report.progress(1, f"counting the decisions of the passes: {name}"),
    )
    report.line("", f"matmuls: {'OpenBLAS' if decided.blas else 'kernels of TVM'}")
    if most == 1:
        report.line("", "no all-reduces, because there is one worker")
    else:
        _print_decisions(report, options, most, decided)
    report.progress(0, "making weights")
    model_weights = list(random_weights.make(config, options.seed))
    total = sum(value.nbytes for _, value, _ in model_weights)
    report.step("weights", f"{bytes_text(total)} from seed {options.seed}")
    random = np.random.default_rng(options.seed)
    prompt = random.integers(config.vocabulary, size=options.prompt_length).tolist()
    others = this_machine.OtherPrograms()
    runs = {
        n: _run(report, options, n, executables[n, build], model_weights, prompt)
        for n in options.workers
    }
    arena = runs[most].arena
    of_variants = []
    for variant in variants:
        executable = executables[variant.workers, variant.build]
        run = _run(
            report, options, variant.workers, executable, model_weights, prompt, variant.label
        )
        of_variants.append(run.generation)
    report.gap()
    generations = {n: run.generation for n, run in runs.items()}
    correct = _compare(report, config, generations)
    busy = others.warning(this_machine.available_cores(), _REMEDY)
    if busy is not None and not options.on_gpus:
        report.line("note", busy)
    _print_speed(report, options, _rows(options, runs, variants, of_variants))
    on_all_cores = runs[1].on_all_cores
    if on_all_cores is not None and not _is_same(options, generations[1], on_all_cores):
        text = format_speed_table.label(options, 1, this_machine.available_cores())
        report.line("", f"WRONG: {text} differs from {format_speed_table.label(options, 1)}")
        correct = False
    for variant, generation in zip(variants, of_variants, strict=True):
        reference = generations[variant.workers]
        correct = _compare_variant(report, options, variant, reference, generation) and correct
    if most > 1:
        peak = bytes_text(arena["peak_in_use"])
        report.line("memory", f"each of {most} workers used {peak} of ipc_memory")
    report.line("total", f"{report.seconds:.1f} s")
    report.gap()
    _suggest(report, options, correct)
    return 0 if correct else 1


@dataclass(frozen=True)
class _Variant:
    """Another way to compile the model, which must generate the same tokens.

    Attributes
    ----------
    label : label of its lines in the report.
    description : description of the variant in the report.
    """

    workers: int
    build: Build
    label: str
    description: str


@dataclass(frozen=True)
class _Run:
    """The results of a session.

    Attributes
    ----------
    generation : the result with one thread per worker.
    on_all_cores : the result of a single worker with a thread for each core; None if it was not
        measured.
    arena : statistics of the arena of worker 0.
    """

    generation: Generation
    on_all_cores: Generation | None
    arena: dict[str, int]


def _variants(options: Options) -> list[_Variant]:
    """Return the variants that the options are compared with."""
    build, most = options.build, options.workers[-1]
    variants = []
    if build.blas:
        without_blas = replace(build, blas=False)
        variants.append(_Variant(1, without_blas, "TVM alone", "1 worker without OpenBLAS"))
    if build.overlap is not None and most > 1:
        no_overlap = replace(build, overlap=None)
        text = f"{most} workers without overlap"
        variants.append(_Variant(most, no_overlap, "no overlap", text))
    return variants


def _describe(report: Report, config: Config) -> None:
    report.line(
        "model",
        f"a decoder with {config.weights / 1e6:.1f}M {config.dtype} weights: "
        f"{counted(config.layers, 'layer')} of width {config.hidden},",
    )
    report.line(
        "",
        f"{counted(config.heads, 'head')} of width {config.head_dim} "
        f"({config.kv_heads} for keys), MLP of width {config.inner}, "
        f"{config.vocabulary} tokens, context {config.context}",
    )


def _check_memory(options: Options) -> None:
    """Raise if the model does not fit into the memory of the machine or of a GPU."""
    config = options.config
    width = random_weights.numpy_dtype(config.dtype).itemsize
    # Weights: here, as shards in transit, and in the workers. Each has the embedding.
    most = options.workers[-1]
    need = 3 * config.weights * width + most * config.vocabulary * config.hidden * width
    need += config.context * (config.layers * 2 * config.hidden + 4 * config.inner) * width
    available = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())["physical_memory"]
    if need > available:
        raise IPCError(
            f"the model needs about {bytes_text(need)} of memory, but the machine has "
            f"{bytes_text(available)}; reduce --layers, --hidden or --context"
        )
    if options.on_gpus:
        one_worker = (
            config.weights * width + config.context * config.layers * 2 * config.hidden * width
        )
        gpu_assignment.check_memory(one_worker, "the model")


def _print_decisions(report: Report, options: Options, workers: int, decided: Decisions) -> None:
    """Print the decisions of the pipeline for the largest number of workers."""
    allreduces = counted(decided.allreduces, "all-reduce")
    rewritten = f"{decided.rewritten} rewritten ({options.build.strategy.name.lower()})"
    with_norm = f"{decided.with_norm} fused with the norm that follows"
    without = f"{decided.without_barrier} without exit barrier"
    if options.build.sequence_parallel:
        gathers, scatters = decided.gathers, decided.scatters
        moved = f"{counted(gathers, 'all-gather')} and {counted(scatters, 'reduce-scatter')}"
        if options.build.overlap is not None:
            moved += f", {decided.overlapped} of them overlapped with matmuls,"
        text = f"{workers} workers: {moved} of the prompt's rows; {allreduces} per decoding step, "
        text += f"{rewritten}, {with_norm}; of all collectives {without}"
    else:
        text = f"{workers} workers: {allreduces} in two functions, "
        text += f"{rewritten}, {with_norm}, {without}"
    report.line("", text)
    ours, upstream = decided.memory.ours, decided.memory.upstream
    report.line(
        "",
        f"planned: {bytes_text(sum(ours.values()))}, of which "
        f"{bytes_text(ours.get(IPC_MEMORY, 0))} in ipc_memory",
    )
    caveat = "" if not decided.overlapped else "; it is invalid with overlap"
    report.line(
        "",
        f"TVM's plan: {bytes_text(sum(upstream.values()))}, of which "
        f"{bytes_text(upstream.get(IPC_MEMORY, 0))}{caveat}",
    )


def _run(
    report: Report,
    options: Options,
    workers: int,
    executable: Any,
    model_weights: Sequence[Weight],
    prompt: list[int],
    label: str = "",
) -> _Run:
    """Continue the prompt on `workers` workers, each with one thread.

    A single worker also runs with a thread for each core, unless it is a variant with a `label`.
    """
    compare_cores = not label
    label = label or counted(workers, "worker")
    steps = len(model_weights) + options.tokens
    loaded = 0

    def on_weight() -> None:
        nonlocal loaded
        loaded += 1
        report.progress(loaded / steps, f"{label}: loading weights")

    def on_token(tokens: int) -> None:
        report.progress((loaded + tokens) / steps, f"{label}: {tokens} of {options.tokens} tokens")

    report.progress(0, f"{label}: starting")
    session_options: dict[str, Any] = {"device": options.build.device}
    if options.on_gpus:
        session_options["device_ids"] = gpu_assignment.gpu_of_workers(workers)
    if options.hosts is not None and workers >= cli_hosts.count(options.hosts):
        session_options["hosts"] = options.hosts
    cores = this_machine.available_cores()
    with tvm_ipc.Session(workers, threads=options.threads, **session_options) as session:
        generator = Generator(session, executable, options.config, model_weights, on_weight)

        def measure(threads: int) -> Generation:
            if not options.on_gpus:
                generator.use_threads(threads)
            return _measure(generator, prompt, options.tokens, label, on_token)

        generation, on_all_cores = measure(1), None
        if workers == 1 and cores > 1 and compare_cores and not options.on_gpus:
            on_all_cores = measure(cores)
        arena = session.get_global_func("tvm_ipc.arena_stats")().debug_get_from_remote(0)
    rows = " and of the prompt's rows" if options.build.sequence_parallel else ""
    split = "all weights" if workers == 1 else f"1/{workers} of the weights{rows} each"
    if options.threads and workers > 1:
        split = f"threads, {split}"
    if "hosts" in session_options:
        split = f"on {cli_hosts.count(session_options['hosts'])} nodes, {split}"
    report.step(label, f"{split}: {options.prompt_length} tokens read, {options.tokens} generated")
    return _Run(generation, on_all_cores, json.loads(arena))


def _measure(
    generator: Generator,
    prompt: list[int],
    tokens: int,
    label: str,
    on_token: Callable[[int], None],
) -> Generation:
    """Generate the tokens several times; return the first result with the median times."""
    generator.generate(prompt, min(2, tokens))  # warm up: touch all memory
    rounds: list[Generation] = []
    end = time.monotonic() + _TIMING_SECONDS
    while not rounds or (len(rounds) < _ROUNDS and time.monotonic() < end):
        rounds.append(generator.generate(prompt, tokens, on_token))
    first = rounds[0]
    if any(generation.logits.tobytes() != first.logits.tobytes() for generation in rounds):
        raise IPCError(f"{label}: repeated generations of the same prompt have different logits")
    return replace(
        first,
        prefill=statistics.median(generation.prefill for generation in rounds),
        decode=statistics.median(generation.decode for generation in rounds),
    )


def _compare(report: Report, config: Config, generations: dict[int, Generation]) -> bool:
    """Print the tokens, and return whether all numbers of workers generated the same ones."""
    reference = generations[1]
    tokens = reference.tokens[0]
    text = " ".join(map(str, tokens[:_PRINTED_TOKENS])) + (
        " ..." if len(tokens) > _PRINTED_TOKENS else ""
    )
    report.line("tokens", text)
    correct = True
    for n, generation in generations.items():
        if any(row != generation.tokens[0] for row in generation.tokens):
            report.line("result", f"WRONG: the {n} workers disagree with each other")
            correct = False
        elif generation.tokens[0] != tokens:
            explanation = _explain_rounding(config, reference, generation)
            position = next(i for i, t in enumerate(tokens) if t != generation.tokens[0][i])
            report.line(
                "result",
                f"{'' if explanation else 'WRONG: '}{n} workers differ from 1 worker from token "
                f"{position + 1} on{explanation}",
            )
            correct = correct and bool(explanation)
        elif not _max_difference(generation, reference) <= allowed_difference(
            config, reference.logits
        ):
            report.line(
                "result", f"WRONG: {n} workers generated the right tokens, but wrong logits"
            )
            correct = False
    if correct:
        worst = max(_max_difference(reference, generation) for generation in generations.values())
        if len(generations) == 1:
            report.line("result", f"{counted(len(tokens), 'token')}")
        elif all(generation.tokens[0] == tokens for generation in generations.values()):
            report.line(
                "result",
                f"the same {counted(len(tokens), 'token')} on {list_text(generations)} workers; "
                f"logits differ by at most {worst:.1e}",
            )
    return correct


def _max_difference(left: Generation, right: Generation) -> float:
    """Return the largest difference of logits, up to the first token that differs."""
    same = [a == b for a, b in zip(left.tokens[0], right.tokens[0], strict=True)]
    comparable = next((i for i, equal in enumerate(same) if not equal), len(same) - 1) + 1
    return float(np.abs(left.logits[:comparable] - right.logits[:comparable]).max())


def _explain_rounding(config: Config, reference: Generation, generation: Generation) -> str:
    """Return how rounding explains different tokens; an empty text if it does not.

    The number of workers changes where sums are rounded. With a 16-bit type this may decide
    between two tokens with almost equal logits. float32 is precise enough to avoid it.
    """
    allowed = allowed_difference(config, reference.logits)
    if config.dtype == "float32" or _max_difference(reference, generation) > allowed:
        return ""
    tokens, other_tokens = reference.tokens[0], generation.tokens[0]
    position = next(i for i, token in enumerate(tokens) if token != other_tokens[i])
    row = reference.logits[position]
    gap = float(row[tokens[position]] - row[other_tokens[position]])
    if gap > 2 * allowed:
        return ""
    return (
        f": the logits of both tokens are {gap:.1e} apart, within the precision of {config.dtype}"
    )


def allowed_difference(config: Config, logits: Any) -> float:
    """Return the largest difference of logits that rounding can cause."""
    limits: Any = ml_dtypes.finfo
    epsilon = float(limits(random_weights.numpy_dtype(config.dtype)).eps)
    rounding: float = epsilon * (2 * config.layers) ** 0.5
    largest = float(np.abs(logits).max())
    return largest * max(4 * rounding, _ROUNDINGS * 2.0**-23)


def _rows(
    options: Options,
    runs: dict[int, _Run],
    variants: Sequence[_Variant],
    of_variants: Sequence[Generation],
) -> list[format_speed_table.Row]:
    """Return the rows of the table of speeds."""
    rows = []
    for n, run in runs.items():
        rows.append(format_speed_table.Row(format_speed_table.label(options, n), run.generation))
        if run.on_all_cores is not None:
            text = format_speed_table.label(options, n, this_machine.available_cores())
            rows.append(format_speed_table.Row(text, run.on_all_cores))
    for variant, generation in zip(variants, of_variants, strict=True):
        text = f"{format_speed_table.label(options, variant.workers)}, {variant.label}"
        rows.append(format_speed_table.Row(text, generation))
    return rows


def _print_speed(report: Report, options: Options, rows: Sequence[format_speed_table.Row]) -> None:
    report.table("speed", format_speed_table.lines(options, rows))
    most, cores = options.workers[-1], this_machine.available_cores()
    if options.on_gpus:
        names = gpu_assignment.names()
        sharing = f"; {most} workers share {'it' if len(names) == 1 else 'them'}"
        sharing = sharing if most > len(names) else ""
        report.line("", f"{counted(len(names), 'GPU')}: {', '.join(sorted(set(names)))}{sharing}")
        return
    reference = f"speedup: over {rows[0].label}"
    if most > 1:
        reference += "; several workers compute with one thread each"
    report.line("", reference)
    if most > cores and (options.hosts is None or isinstance(options.hosts, int)):
        report.line("", f"this machine has {counted(cores, 'core')}, which {most} workers share")


def _compare_variant(
    report: Report,
    options: Options,
    variant: _Variant,
    reference: Generation,
    generation: Generation,
) -> bool:
    """Print how far a variant's logits differ; return whether it generated the same tokens."""
    same = _is_same(options, reference, generation)
    report.line(
        "",
        f"{variant.description}; logits differ by at most "
        f"{_max_difference(reference, generation):.1e}" + ("" if same else ": WRONG"),
    )
    return same


def _is_same(options: Options, reference: Generation, generation: Generation) -> bool:
    """Return whether two results are the same up to rounding."""
    difference = _max_difference(reference, generation)
    same = difference <= allowed_difference(options.config, reference.logits)
    if same and reference.tokens != generation.tokens:
        same = bool(_explain_rounding(options.config, reference, generation))
    return same


def _suggest(report: Report, options: Options, correct: bool) -> None:
    """Print commands that lead on from this run."""
    if not correct:
        report.line("try next", "tvm-ipc doctor -v   to check this machine")
        return
    cores, most, on_gpus = this_machine.available_cores(), options.workers[-1], options.on_gpus
    model = options.config
    ideas = [
        (
            "demo --device cuda",
            "the same on GPUs",
            not on_gpus and options.hosts is None and shared_libraries.has_nvidia_driver(),
        ),
        (f"demo --workers {cores}", "a worker on each core", most < cores and not on_gpus),
        (
            "demo --layers 12 --hidden 768",
            "a larger model",
            model.layers < 12 and model.hidden < 768,
        ),
        ("explain --demo --open", "memory plan and collectives", True),
        (
            f"run FOLDER --workers {max(2, min(most, cores))}",
            "a Hugging Face model",
            not on_gpus,
        ),
        ("bench", "times of collectives", not on_gpus),
        ("bench --device cuda", "times of collectives", on_gpus),
    ]
    fitting = [(command, purpose) for command, purpose, fits in ideas if fits][:4]
    width = max(len(command) for command, _ in fitting)
    label = "try next"
    for command, purpose in fitting:
        report.table(label, [f"tvm-ipc {command:<{width}}  {purpose}"])
        label = ""
