# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run`: a folder and a prompt in, text out.

The text goes to the standard output as it comes, and what is said about it to the error output, so
that the text alone can be redirected. With `--json` there is one object, with all of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from tvm_ipc import terminal
from tvm_ipc.errors import ModelError, WeightsError
from tvm_ipc.hf.options import OptionError, Options, parse
from tvm_ipc.nodes import option

if TYPE_CHECKING:
    from tvm_ipc.hf.model import Model
    from tvm_ipc.runtime.session import Session

_LABEL: Final = 9
#: Tokens of a prompt that is made up.
_MADE_UP: Final = 128


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(argv)
    except OptionError as error:
        terminal.complain(f"tvm-ipc run: {error} (see tvm-ipc run --help)")
        return 2
    try:
        return _run(options)
    except WeightsError as error:
        head, *problems = [line.strip() for line in str(error).splitlines()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelError(" ".join([head, *problems[:1]]) + more) from error


@dataclass(frozen=True)
class Run:
    """What was generated, and what it took.

    Attributes
    ----------
    tokens : that were generated.
    first, rest : seconds to the first token, and from there to the last.
    """

    tokens: list[int]
    first: float
    rest: float

    @property
    def per_second(self) -> float | None:
        """Tokens in a second, after the first one."""
        return (len(self.tokens) - 1) / self.rest if len(self.tokens) > 1 else None


def _run(options: Options) -> int:
    start = time.perf_counter()
    if options.hosts is not None:
        option.require(options.hosts)
    terminal.progress("reading the folder")
    from tvm_ipc.hf.folder import read_folder

    folder = read_folder(options.folder)
    tokenizer = None
    if options.prompt is not None:
        from tvm_ipc.hf import reading

        terminal.progress("reading the tokenizer")
        tokenizer = reading.tokenizer(folder)
    terminal.load_tvm(compiler=False)
    from tvm_ipc.hf.compiling import compiled
    from tvm_ipc.hf.model import Model, computed_in
    from tvm_ipc.hf.plans import read_plan
    from tvm_ipc.parallel.plan import AUTO
    from tvm_ipc.runtime.session import Session

    plan = options.plan if options.plan in (None, AUTO) else read_plan(str(options.plan))
    dtype = computed_in(folder, options.dtype)
    try:
        made = compiled(folder, options.workers, dtype, terminal.progress, plan)
    except ValueError as error:
        if plan is None:
            raise
        raise ModelError(f"--plan {options.plan}: {error}") from error
    ready = time.perf_counter()
    prompt = _prompt(options, tokenizer, made.vocabulary, folder.context)
    terminal.progress(f"starting {options.workers} workers")
    with Session(options.workers, threads=options.threads, hosts=options.hosts) as session:
        started = time.perf_counter()
        terminal.progress("loading weights")
        model = Model(session, folder, made)
        loaded = time.perf_counter()
        facts: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "workers": options.workers,
            "nodes": [node["host"] for node in session.nodes] or None,
            "seconds": {
                "compile": ready - start,
                "start": started - ready,
                "load": loaded - started,
            },
            "compiled_before": made.kept,
            "why_not_kept": made.why_not_kept,
            "plan": list(made.notes),
        }
        said = _said(options, model, prompt, tokenizer)
        facts["tokens"] = said.tokens
        if tokenizer is not None:
            facts["text"] = tokenizer.decode(said.tokens, skip_special_tokens=True)
        facts["seconds"] |= {"first_token": said.first, "other_tokens": said.rest}
        facts["tokens_per_second"] = said.per_second
        facts["memory"] = _memory(model, len(prompt) + options.max_new_tokens)
    if options.bench:
        from tvm_ipc.hf import rival

        terminal.progress("PyTorch does the same")
        theirs = rival.pytorch(folder, options, prompt, len(said.tokens))
        facts["pytorch"] = {**asdict(theirs), "tokens_per_second": theirs.per_second}
    _report(options, facts, said)
    return 0


def _prompt(options: Options, tokenizer: Any, vocabulary: int, context: int | None) -> list[int]:
    if options.prompt is not None:
        found = list(map(int, tokenizer(options.prompt)["input_ids"]))
        if not found:
            raise ModelError("the tokenizer makes no token of the prompt; give another one")
        wrong = next((one for one in found if one >= vocabulary), None)
        if wrong is not None:
            raise ModelError(
                f"the tokenizer makes token {wrong} of the prompt, and the model has {vocabulary}: "
                "they belong to different models"
            )
        return found
    if options.tokens is not None:
        wrong = next((one for one in options.tokens if one >= vocabulary), None)
        if wrong is not None:
            raise ModelError(
                f"--tokens has {wrong}, and the model's tokens are 0 to {vocabulary - 1}"
            )
        return list(options.tokens)
    import numpy as np

    room = _MADE_UP if context is None else context - options.max_new_tokens
    size = max(1, min(_MADE_UP, room))
    made_up: list[int] = np.random.default_rng(0).integers(vocabulary, size=size).tolist()
    return made_up


def _said(options: Options, model: Model, prompt: list[int], tokenizer: Any) -> Run:
    """Generate, and print what comes as it comes."""
    tokens: list[int] = []
    shown: Callable[[int], None] = lambda _: None  # noqa: E731
    ended = False
    if not options.json and not (options.bench and options.prompt is None):
        shown = _shower(tokenizer)
        ended = True
    try:
        stream = model.generate(
            prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop=[] if options.bench else None,
        )
    except ValueError as error:
        raise ModelError(str(error).removeprefix("generate: ")) from error
    if options.bench:
        terminal.progress("warming up")
        for _ in model.generate(prompt, min(2, options.max_new_tokens), stop=[]):
            pass  # as PyTorch does
    terminal.progress(f"looking at {len(prompt)} tokens")
    start = time.perf_counter()
    first = start
    for token in stream:
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        shown(token)
    end = time.perf_counter()
    if ended:
        terminal.say()
    return Run(tokens, first - start, end - first)


def _shower(tokenizer: Any) -> Callable[[int], None]:
    """Return what prints tokens as they come: their text, or their numbers."""
    if tokenizer is None:
        before = ""

        def number(token: int) -> None:
            nonlocal before
            terminal.write(f"{before}{token}")
            before = ","

        return number
    pieces = _pieces(tokenizer)
    next(pieces)
    return lambda token: terminal.write(pieces.send(token))


def _pieces(tokenizer: Any) -> Any:
    """Yield for each token that is sent what it adds to the text.

    What a token adds depends on those before it; a character of several tokens comes with the last.
    """
    tokens: list[int] = []
    begin = done = 0
    piece = ""
    while True:
        tokens.append((yield piece))
        before = tokenizer.decode(tokens[begin:done], skip_special_tokens=True)
        text = tokenizer.decode(tokens[begin:], skip_special_tokens=True)
        piece = ""
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            piece = text[len(before) :]
            begin, done = done, len(tokens)


def _memory(model: Model, tokens: int) -> dict[str, Any]:
    cut, caches = model.compiled.cut.values(), model.compiled.caches
    return {
        "weights_of_a_worker": sum(one.bytes_per_rank or 0 for one in cut),
        "keys_and_values_of_a_worker": tokens * sum(one.bytes_per_token for one in caches),
        "peak_of_processes": _peaks(model.session),
    }


def _peaks(session: Session) -> list[int]:
    """Return the most memory that the processes had."""
    from tvm_ipc.weights.worker import PEAK

    peak = session.get_global_func(PEAK)()
    pids = session.pids  # two nodes may have the same numbers
    ranks = range(len(pids)) if session.nodes else [pids.index(one) for one in dict.fromkeys(pids)]
    return [int(peak.debug_get_from_remote(rank)) for rank in ranks]


def _report(options: Options, facts: dict[str, Any], said: Run) -> None:
    if options.json:
        terminal.say(json.dumps(facts))
        return
    seconds, memory = facts["seconds"], facts["memory"]
    how = "was there" if facts["compiled_before"] else f"{seconds['compile']:.1f} s, and kept"
    if facts["why_not_kept"]:
        how = f"{seconds['compile']:.1f} s, and not kept: {facts['why_not_kept']}"
    _note("model", f"compiled: {how}; weights loaded in {seconds['load']:.1f} s")
    for note in facts["plan"]:
        _note("plan", note)
    _note("time", _time(facts["prompt_tokens"], said))
    where = f" on {len(facts['nodes'])} nodes" if facts["nodes"] else ""
    caches = _size(memory["keys_and_values_of_a_worker"])
    _note(
        "memory",
        f"each of {options.workers} workers{where}: {_size(memory['weights_of_a_worker'])} of "
        f"weights, {caches} of keys and values; processes at most "
        f"{', '.join(map(_size, memory['peak_of_processes']))}",
    )
    if "pytorch" in facts:
        theirs = facts["pytorch"]
        other = Run(theirs["tokens"], theirs["first"], theirs["rest"])
        _note("PyTorch", f"{theirs['threads']} threads: {_time(facts['prompt_tokens'], other)}")
        same = sum(a == b for a, b in zip(said.tokens, other.tokens, strict=False))
        faster = f"first token {other.first / said.first:.2f}x"
        if said.per_second and other.per_second:
            faster += f", others {said.per_second / other.per_second:.2f}x as fast as PyTorch"
        _note("", f"{faster}; {same} of {len(said.tokens)} tokens are the same")


def _time(prompt: int, said: Run) -> str:
    text = (
        f"first token after {said.first:.2f} s ({prompt / said.first:.1f} of the prompt a second)"
    )
    if said.per_second is not None:
        text += f", then {said.per_second:.1f} tokens a second"
    return text


def _note(label: str, text: str) -> None:
    terminal.complain(f"{label:<{_LABEL}}{text}")


def _size(number: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{int(number)} bytes"
