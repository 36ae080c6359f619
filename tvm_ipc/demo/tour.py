# SPDX-License-Identifier: Apache-2.0
"""Compiles, runs, compares, and prints what happens while it happens."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import ml_dtypes
import numpy as np
import tvm_ffi

import tvm_ipc
from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.demo import gpu, weights
from tvm_ipc.demo.compiling import Decisions, compile_model, compiles_for, decisions
from tvm_ipc.demo.config import Build, Config
from tvm_ipc.demo.generating import Generation, Generator, Weight
from tvm_ipc.demo.options import Options
from tvm_ipc.demo.report import Report, count, listing, size
from tvm_ipc.errors import IPCError
from tvm_ipc.machine import available_cores
from tvm_ipc.nodes import option

#: How often a generation is timed, if it is short, and seconds after which it is not again.
_ROUNDS: Final = 7
_TIMING: Final = 1.0
#: How many tokens are shown.
_SHOWN: Final = 12
#: Logits are about one; what a rounding of every layer may change them by, in units of the type.
_ROUNDINGS: Final = 64


def lead(options: Options, report: Report) -> int:
    """Run the demo and return its exit code: 0 if all workers say the same."""
    config, load = options.config, os.getloadavg()[0]
    if options.on_gpus:
        gpu.require(options.workers[-1], threads=options.threads)
    if options.hosts is not None:  # a session would refuse it too, when all is compiled
        option.require(options.hosts)
    _check_memory(options)
    report.step("load", f"apache-tvm {version('apache-tvm')}, tvm-ipc {version('tvm-ipc')}")
    _describe(report, config)
    executables = {}
    build, rivals = options.build, _rivals(options)
    contestants = [(n, build) for n in options.workers]
    contestants += [(rival.workers, rival.build) for rival in rivals]
    for done, (n, how) in enumerate(contestants):

        def passing(name: str, done: float = done / len(contestants), n: int = n) -> None:
            report.progress(done, f"compiling for {count(n, 'worker')}: {name}")

        executables[n, how] = compile_model(config, n, how, passing)
    report.step("compile", f"for {listing(list(options.workers))}: {compiles_for(build.device)}")
    several = options.workers[-1] if options.workers[-1] > 1 else None
    found = decisions(
        config,
        several or 1,
        build,
        lambda name: report.progress(1, f"looking at what the passes decided: {name}"),
    )
    report.line("", f"matrix products: {'OpenBLAS' if found.blas else 'kernels of TVM'}")
    if several is None:
        report.line("", "no all-reduces: there is nobody to share the work with")
    else:
        _explain_passes(report, options, several, found)
    report.progress(0, "making weights")
    model_weights = list(weights.make(config, options.seed))
    total = sum(value.nbytes for _, value, _ in model_weights)
    report.step("weights", f"{size(total)} from seed {options.seed}")
    random = np.random.default_rng(options.seed)
    prompt = random.integers(config.vocabulary, size=options.prompt_length).tolist()
    said: dict[int, Generation] = {}
    arena: dict[str, int] = {}
    for n in options.workers:
        said[n], arena = _run(report, options, n, executables[n, build], model_weights, prompt)
    theirs = []
    for rival in rivals:
        program = executables[rival.workers, rival.build]
        label = rival.label
        other, _ = _run(report, options, rival.workers, program, model_weights, prompt, label)
        theirs.append(other)
    report.gap()
    right = _compare(report, config, said)
    _explain_time(report, options, said)
    for rival, other in zip(rivals, theirs, strict=True):
        right = _compare_rival(report, options, rival, said[rival.workers], other) and right
    if load > available_cores() and not options.on_gpus:
        report.line(
            "", f"other programs kept the cores busy (load {load:.1f}): quiet, it is faster"
        )
    if several is not None:
        report.line(
            "memory", f"each of {several} workers used {size(arena['peak_in_use'])} of ipc_memory"
        )
    report.line("total", f"{report.seconds:.1f} s")
    report.gap()
    _suggest(report, options)
    return 0 if right else 1


@dataclass(frozen=True)
class _Rival:
    """Another way to compile the model, which must say the same.

    Attributes
    ----------
    label : of its line.
    what : it is.
    """

    workers: int
    build: Build
    label: str
    what: str


def _rivals(options: Options) -> list[_Rival]:
    """Return what options are compared with that change how the same is done."""
    build, most = options.build, options.workers[-1]
    found = []
    if build.blas:
        plain = replace(build, blas=False)
        found.append(_Rival(1, plain, "TVM alone", "1 worker without OpenBLAS"))
    if build.overlap is not None and most > 1:
        apart = replace(build, overlap=None)
        found.append(_Rival(most, apart, "no overlap", f"{most} workers that wait for all rows"))
    return found


def _describe(report: Report, config: Config) -> None:
    report.line(
        "model",
        f"a decoder with {config.weights / 1e6:.1f}M {config.dtype} weights: "
        f"{count(config.layers, 'layer')} of {config.hidden},",
    )
    report.line(
        "",
        f"{count(config.heads, 'head')} of {config.head_dim} ({config.kv_heads} of keys), "
        f"MLP {config.inner}, {config.vocabulary} tokens, context {config.context}",
    )


def _check_memory(options: Options) -> None:
    """Refuse what cannot fit, before it is tried."""
    config = options.config
    width = weights.numpy_dtype(config.dtype).itemsize
    # The weights here, in parts on the way, and in the workers, which all have the embedding.
    most = options.workers[-1]
    need = 3 * config.weights * width + most * config.vocabulary * config.hidden * width
    need += config.context * (config.layers * 2 * config.hidden + 4 * config.inner) * width
    have = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())["physical_memory"]
    if need > have:
        raise IPCError(
            f"the model would need about {size(need)} of memory and the machine has {size(have)}; "
            "take less --layers, --hidden or --context"
        )
    if options.on_gpus:
        alone = config.weights * width + config.context * config.layers * 2 * config.hidden * width
        gpu.check_memory(alone, "the model")


def _explain_passes(report: Report, options: Options, workers: int, found: Decisions) -> None:
    """Say what the pipeline did, for the largest number of workers."""
    allreduces = count(found.allreduces, "all-reduce")
    rewritten = f"{found.rewritten} rewritten ({options.build.strategy.name.lower()})"
    with_norm = f"{found.with_norm} with the norm that follows"
    without = f"{found.without_barrier} without exit barrier"
    if options.build.sequence_parallel:
        gathers, scatters = found.gathers, found.scatters
        moved = f"{count(gathers, 'all-gather')} and {count(scatters, 'reduce-scatter')}"
        if options.build.overlap is not None:
            moved += f", {found.overlapped} of them beside matrix products,"
        text = f"{workers} workers: {moved} of a prompt's rows; {allreduces} in a step, "
        text += f"{rewritten}, {with_norm}; of all collectives {without}"
    else:
        text = f"{workers} workers: {allreduces} in two functions, "
        text += f"{rewritten}, {with_norm}, {without}"
    report.line("", text)
    ours, theirs = found.memory.ours, found.memory.upstream
    report.line(
        "",
        f"planned: {size(sum(ours.values()))}, of it {size(ours.get(IPC_MEMORY, 0))} in ipc_memory",
    )
    early = "" if not found.overlapped else ", which peers would find overwritten"
    report.line(
        "",
        f"TVM's plan: {size(sum(theirs.values()))}, of it {size(theirs.get(IPC_MEMORY, 0))}{early}",
    )


def _run(
    report: Report,
    options: Options,
    workers: int,
    executable: Any,
    model_weights: Sequence[Weight],
    prompt: list[int],
    label: str = "",
) -> tuple[Generation, dict[str, int]]:
    """Let so many workers continue the prompt; return also what their shared memory saw."""
    label = label or count(workers, "worker")
    steps = len(model_weights) + options.tokens
    put = 0

    def another() -> None:
        nonlocal put
        put += 1
        report.progress(put / steps, f"{label}: loading weights")

    def generated(tokens: int) -> None:
        report.progress((put + tokens) / steps, f"{label}: {tokens} of {options.tokens} tokens")

    report.progress(0, f"{label}: starting")
    where: dict[str, Any] = {"device": options.build.device}
    if options.on_gpus:
        where["device_ids"] = gpu.shared(workers)
    if options.hosts is not None and workers >= option.count(options.hosts):
        where["hosts"] = options.hosts
    with tvm_ipc.Session(workers, threads=options.threads, **where) as session:
        generator = Generator(session, executable, options.config, model_weights, another)
        generator.generate(prompt, min(2, options.tokens))  # touches all memory once
        rounds: list[Generation] = []
        end = time.monotonic() + _TIMING
        while not rounds or (len(rounds) < _ROUNDS and time.monotonic() < end):
            rounds.append(generator.generate(prompt, options.tokens, generated))
        arena = session.get_global_func("tvm_ipc.arena_stats")().debug_get_from_remote(0)
    said = rounds[0]
    if any(again.logits.tobytes() != said.logits.tobytes() for again in rounds):
        raise IPCError(f"{label} computed other logits when asked the same again")
    said = replace(
        said,
        prefill=statistics.median(again.prefill for again in rounds),
        decode=statistics.median(again.decode for again in rounds),
    )
    rows = " and of the prompt's rows" if options.build.sequence_parallel else ""
    what = "all weights" if workers == 1 else f"1/{workers} of the weights{rows} each"
    if options.threads and workers > 1:
        what = f"threads, {what}"
    if "hosts" in where:
        what = f"on {option.count(where['hosts'])} nodes, {what}"
    report.step(
        label, f"{what}: {count(options.prompt_length, 'token')} read, {options.tokens} written"
    )
    return said, json.loads(arena)


def _compare(report: Report, config: Config, said: dict[int, Generation]) -> bool:
    """Print what was said, and return whether everybody said the same."""
    one = said[1]
    tokens = one.tokens[0]
    shown = " ".join(map(str, tokens[:_SHOWN])) + (" ..." if len(tokens) > _SHOWN else "")
    report.line("tokens", shown)
    right = True
    for n, other in said.items():
        if any(mine != other.tokens[0] for mine in other.tokens):
            report.line("result", f"WRONG: {n} workers said different tokens among themselves")
            right = False
        elif other.tokens[0] != tokens:
            excuse = _excuse(config, one, other)
            place = next(i for i, t in enumerate(tokens) if t != other.tokens[0][i])
            report.line(
                "result",
                f"{'other' if excuse else 'WRONG:'} tokens of {n} workers from the "
                f"{place + 1}. on{excuse}",
            )
            right = right and bool(excuse)
        elif not np.abs(other.logits - one.logits).max() <= allowed_difference(config, one.logits):
            report.line("result", f"WRONG: the tokens of {n} workers are right, but not the logits")
            right = False
    if right:
        worst = max(_distance(one, other) for other in said.values())
        if len(said) == 1:
            report.line("result", f"{count(len(tokens), 'token')}")
        elif all(other.tokens[0] == tokens for other in said.values()):
            report.line(
                "result",
                f"the same {count(len(tokens), 'token')} on {listing(list(said))} workers; "
                f"logits within {worst:.1e}",
            )
    return right


def _distance(one: Generation, other: Generation) -> float:
    """Return how far logits are apart, as long as both looked at the same tokens."""
    same = [a == b for a, b in zip(one.tokens[0], other.tokens[0], strict=True)]
    alike = next((i for i, equal in enumerate(same) if not equal), len(same) - 1) + 1
    return float(np.abs(one.logits[:alike] - other.logits[:alike]).max())


def _excuse(config: Config, one: Generation, other: Generation) -> str:
    """Return why other tokens are no mistake, or nothing.

    Sums over other numbers of workers are rounded elsewhere. In 16 bits that may decide between
    two tokens that are almost equally good; float32 is fine enough for that not to happen.
    """
    if config.dtype == "float32" or _distance(one, other) > allowed_difference(config, one.logits):
        return ""
    place = next(i for i, t in enumerate(one.tokens[0]) if t != other.tokens[0][i])
    row = one.logits[place]
    gap = float(row[one.tokens[0][place]] - row[other.tokens[0][place]])
    if gap > 2 * allowed_difference(config, one.logits):
        return ""
    return f": {config.dtype} cannot tell two that are {gap:.1e} apart"


def allowed_difference(config: Config, logits: Any) -> float:
    """Return how far two right results may be apart."""
    limits: Any = ml_dtypes.finfo
    epsilon = float(limits(weights.numpy_dtype(config.dtype)).eps)
    rounding: float = epsilon * (2 * config.layers) ** 0.5
    largest = float(np.abs(logits).max())
    return largest * max(4 * rounding, _ROUNDINGS * 2.0**-23)


def _explain_time(report: Report, options: Options, said: dict[int, Generation]) -> None:
    cores = available_cores()
    one = said[1]
    label = "speed"
    for n, other in said.items():
        text = f"{count(n, 'worker'):<11}prefill {options.prompt_length / other.prefill:8.0f} tok/s"
        if n > 1:
            text += f" {one.prefill / other.prefill:4.2f}x"
        if options.tokens > 1:
            rate = (options.tokens - 1) / other.decode
            text += f"{'' if n > 1 else '      '}   decode {rate:7.0f} tok/s"
            if n > 1:
                text += f" {one.decode / other.decode:4.2f}x"
        report.line(label, text)
        label = ""
    if options.on_gpus:
        there = gpu.names()
        most = options.workers[-1]
        more = f"; {most} workers share {'it' if len(there) == 1 else 'them'}"
        more = more if most > len(there) else ""
        report.line("", f"{count(len(there), 'GPU')}: {', '.join(sorted(set(there)))}{more}")
    elif options.workers[-1] > 1:
        more = "; more workers than that share them" if options.workers[-1] > cores else ""
        report.line("", f"a worker uses one core, and there are {cores}{more}")


def _compare_rival(
    report: Report, options: Options, rival: _Rival, ours: Generation, theirs: Generation
) -> bool:
    """Say how fast another way is, and return whether both say the same."""
    text = f"{rival.label:<11}prefill {options.prompt_length / theirs.prefill:8.0f} tok/s"
    text += f" {ours.prefill / theirs.prefill:4.2f}x"
    if options.tokens > 1:
        text += f"   decode {(options.tokens - 1) / theirs.decode:7.0f} tok/s"
        text += f" {ours.decode / theirs.decode:4.2f}x"
    report.line("", text)
    distance = _distance(ours, theirs)
    same = distance <= allowed_difference(options.config, ours.logits)
    if same and ours.tokens != theirs.tokens:
        same = bool(_excuse(options.config, ours, theirs))
    report.line(
        "",
        f"which is {rival.what}; the logits differ by up to {distance:.1e}"
        + ("" if same else ": WRONG"),
    )
    return same


def _suggest(report: Report, options: Options) -> None:
    """Name what the user has not tried yet."""
    ideas = [
        ("demo --layers 12 --hidden 768", options.config.layers < 12),
        ("demo --dtype bfloat16", options.config.dtype == "float32"),
        ("demo --blas", not options.build.blas and not options.on_gpus),
        (
            "demo --sequence-parallel",
            options.workers[-1] > 1 and not options.build.sequence_parallel,
        ),
        ("demo --threads", not options.threads),
        ("explain --demo --text", True),
    ]
    label = "try next"
    for text in [text for text, fits in ideas if fits][:5]:
        report.line(label, f"tvm-ipc {text}")
        label = ""
    report.line(label, "tvm-ipc doctor")
