# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run`: continue a text with a Hugging Face model, or chat with it.

The generated text is printed on the standard output as it is generated, and notes on the error
output, so the text can be redirected. `--json` prints one object with all results instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tvm_ipc.arguments import counted
from tvm_ipc.errors import ModelError, WeightsError
from tvm_ipc.models.hf.prompts import check_vocabulary, encode
from tvm_ipc.models.hf.text_stream import TextStream
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.tools import terminal
from tvm_ipc.tools.format import bytes_text
from tvm_ipc.tools.options import OptionError, refuse
from tvm_ipc.tools.run.chat import check_template, run_chat
from tvm_ipc.tools.run.options import NAMED_PLANS, Options, parse
from tvm_ipc.tools.run.pytorch_baseline import TimedTokens, run_baseline

if TYPE_CHECKING:
    from tvm_ipc.models.hf.load_and_generate import Model
    from tvm_ipc.models.hf.model_folder import ModelFolder
    from tvm_ipc.runtime.session import Session

#: Width of the label of a note, in characters.
_LABEL: Final = 9
#: Length of the random prompt of --bench.
_RANDOM_PROMPT: Final = 128


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        return refuse("tvm-ipc run", error)
    try:
        return _run(options)
    except WeightsError as error:
        head, *problems = [line.strip() for line in str(error).splitlines()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelError(" ".join([head, *problems[:1]]) + more) from error


@dataclass(frozen=True)
class Generation(TimedTokens):
    """The generated tokens, and their text; None without a tokenizer."""

    text: str | None = None


def _run(options: Options) -> int:
    start = time.perf_counter()
    if options.hosts is not None:
        cli_hosts.require(options.hosts)
    terminal.progress("reading the folder")
    from tvm_ipc.models.hf.model_folder import read_folder

    folder = read_folder(options.folder)
    tokenizer = None
    if options.prompt is not None or options.chat:
        from tvm_ipc.models.hf.read_config_and_tokenizer import tokenizer as read_tokenizer

        terminal.progress("reading the tokenizer")
        tokenizer = read_tokenizer(folder)
    if options.chat:
        check_template(options, tokenizer, folder)
    terminal.load_tvm(compiler=False)
    from tvm_ipc.models.hf.compile_cache import load_or_compile
    from tvm_ipc.models.hf.load_and_generate import Model, compute_dtype
    from tvm_ipc.models.hf.user_sharding_plan import read_plan
    from tvm_ipc.runtime.session import Session

    is_name = options.plan is None or options.plan in NAMED_PLANS
    plan = options.plan if is_name else read_plan(str(options.plan))
    dtype = compute_dtype(folder, options.dtype)
    try:
        program = load_or_compile(
            folder,
            options.workers,
            dtype,
            terminal.progress,
            plan,
            reproducible=options.reproducible,
        )
    except ValueError as error:
        if plan is None:
            raise
        raise ModelError(f"--plan {options.plan}: {error}") from error
    compiled_at = time.perf_counter()
    prompt: list[int] = []
    if not options.chat:
        prompt = _prompt(options, tokenizer, program.vocabulary, folder)
    terminal.progress(f"starting {options.workers} workers")
    with Session(options.workers, threads=options.threads, hosts=options.hosts) as session:
        session_at = time.perf_counter()
        terminal.progress("loading weights")
        model = Model(session, folder, program, tokenizer)
        loaded_at = time.perf_counter()
        facts: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "workers": options.workers,
            "nodes": [node["host"] for node in session.nodes] or None,
            "seconds": {
                "compile": compiled_at - start,
                "start": session_at - compiled_at,
                "load": loaded_at - session_at,
            },
            "compiled_before": program.cached,
            "why_not_kept": program.why_not_cached,
            "plan": list(program.notes),
        }
        if options.chat:
            _report_start(facts)
            run_chat(options, model, lambda text: _note("chat", text))
            return 0
        generation = _generate(options, model, prompt, tokenizer)
        facts["tokens"] = generation.tokens
        if generation.text is not None:
            facts["text"] = generation.text
        facts["seconds"] |= {"first_token": generation.first, "other_tokens": generation.rest}
        facts["tokens_per_second"] = generation.per_second
        facts["memory"] = _memory_facts(model, len(prompt) + options.max_new_tokens)
    if options.bench:
        terminal.progress("running the model in PyTorch")
        baseline = run_baseline(folder, options, prompt, len(generation.tokens))
        facts["pytorch"] = {**asdict(baseline), "tokens_per_second": baseline.per_second}
    _report(options, facts, generation)
    return 0


def _prompt(options: Options, tokenizer: Any, vocabulary: int, folder: ModelFolder) -> list[int]:
    """Return the tokens of the prompt: specified, from the tokenizer, or random."""
    if options.prompt is not None:
        try:
            tokens = encode("--prompt", tokenizer, folder, options.prompt)
        except ValueError as error:
            raise ModelError(str(error)) from error
        check_vocabulary("--prompt", tokens, vocabulary)
        return tokens
    if options.tokens is not None:
        invalid = next((token for token in options.tokens if token >= vocabulary), None)
        if invalid is not None:
            raise ModelError(
                f"--tokens has {invalid}, but the model's tokens are 0 to {vocabulary - 1}"
            )
        return list(options.tokens)
    import numpy as np

    room = _RANDOM_PROMPT if folder.context is None else folder.context - options.max_new_tokens
    size = max(1, min(_RANDOM_PROMPT, room))
    random_prompt: list[int] = np.random.default_rng(0).integers(vocabulary, size=size).tolist()
    return random_prompt


def _generate(options: Options, model: Model, prompt: list[int], tokenizer: Any) -> Generation:
    """Generate tokens, and print each one as it is generated."""
    ends = frozenset() if options.bench else model.folder.ends()
    try:
        generated = model.generate(
            prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop=ends,
        )
    except ValueError as error:
        raise ModelError(str(error).removeprefix("generate: ")) from error
    if options.bench:
        terminal.progress("warming up")
        for _ in model.generate(prompt, min(2, options.max_new_tokens), stop=[]):
            pass  # the baseline warms up, too
    terminal.progress(f"prefilling {counted(len(prompt), 'token')}")
    tokens: list[int] = []
    start = first = time.perf_counter()

    def timed() -> Generator[int, None, None]:
        nonlocal first
        for token in generated:
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
            yield token

    if tokenizer is None:
        pieces: Iterator[str] = (f"{',' if k else ''}{token}" for k, token in enumerate(timed()))
    else:
        pieces = TextStream(tokenizer, timed(), options.max_new_tokens, ends, options.stop)
    prints = not options.json and not (options.bench and options.prompt is None)
    text = ""
    for piece in pieces:
        text += piece
        if prints:
            terminal.write(piece)
    end = time.perf_counter()
    if prints:
        terminal.print_out()
    return Generation(tokens, first - start, end - first, None if tokenizer is None else text)


def _memory_facts(model: Model, tokens: int) -> dict[str, Any]:
    shards, caches = model.compiled.shards.values(), model.compiled.caches
    return {
        "weights_of_a_worker": sum(shard.bytes_per_rank or 0 for shard in shards),
        "keys_and_values_of_a_worker": tokens * sum(cache.bytes_per_token for cache in caches),
        "peak_of_processes": _peak_memory(model.session),
    }


def _peak_memory(session: Session) -> list[int]:
    """Return the peak memory of each worker process, in bytes."""
    from tvm_ipc.models.weights.worker import PEAK_RSS

    peak = session.get_global_func(PEAK_RSS)()
    pids = session.pids  # processes of two nodes may have the same id
    ranks = range(len(pids)) if session.nodes else [pids.index(pid) for pid in dict.fromkeys(pids)]
    return [int(peak.debug_get_from_remote(rank)) for rank in ranks]


def _report_start(facts: dict[str, Any]) -> None:
    """Print how the model was compiled and loaded."""
    seconds = facts["seconds"]
    compiled = f"compiled in {seconds['compile']:.1f} s"
    if facts["compiled_before"]:
        compiled = "compiled program loaded from the cache"
    elif facts["why_not_kept"]:
        compiled += f" but not cached: {facts['why_not_kept']}"
    _note("model", f"{compiled}; weights loaded in {seconds['load']:.1f} s")
    for note in facts["plan"]:
        _note("plan", note)


def _report(options: Options, facts: dict[str, Any], generation: Generation) -> None:
    if options.json:
        terminal.print_out(json.dumps(facts))
        return
    _report_start(facts)
    memory = facts["memory"]
    _note("time", _speed_text(facts["prompt_tokens"], generation))
    nodes = f" on {len(facts['nodes'])} nodes" if facts["nodes"] else ""
    caches = bytes_text(memory["keys_and_values_of_a_worker"])
    _note(
        "memory",
        f"each of {counted(options.workers, 'worker')}{nodes}: "
        f"{bytes_text(memory['weights_of_a_worker'])} of weights, {caches} of keys and values; "
        f"peak of the processes {', '.join(map(bytes_text, memory['peak_of_processes']))}",
    )
    if "pytorch" in facts:
        baseline = facts["pytorch"]
        pytorch = TimedTokens(baseline["tokens"], baseline["first"], baseline["rest"])
        speed = _speed_text(facts["prompt_tokens"], pytorch)
        _note("PyTorch", f"{counted(baseline['threads'], 'thread')}: {speed}")
        same = sum(a == b for a, b in zip(generation.tokens, pytorch.tokens, strict=False))
        speedup = f"speedup over PyTorch: first token {pytorch.first / generation.first:.2f}x"
        if generation.per_second and pytorch.per_second:
            speedup += f", other tokens {generation.per_second / pytorch.per_second:.2f}x"
        _note("", f"{speedup}; {same} of {counted(len(generation.tokens), 'token')} are the same")


def _speed_text(prompt: int, generation: TimedTokens) -> str:
    rate = prompt / generation.first
    text = f"first token after {generation.first:.2f} s (prefill {rate:.1f} tokens/s)"
    if generation.per_second is not None:
        text += f", then {generation.per_second:.1f} tokens/s"
    return text


def _note(label: str, text: str) -> None:
    terminal.print_err(f"{label:<{_LABEL}}{text}")
