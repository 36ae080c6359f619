# SPDX-License-Identifier: Apache-2.0
"""Requests of a batch get the tokens that each of them gets alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.hf.checkpoints import SIZES, continued, saved, saved_with
from tests.models.hf.tokenizers_of_tests import of_words
from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.models import Model
from tvm_ipc.models.hf import batch as batch_module

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(67, size=count).tolist() for count in (9, 1, 20, 5)]
COUNT = 12


def alone_and_together(
    folder: Path, workers: int, plan: Any = None
) -> tuple[list[list[int]], list[list[int]]]:
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        model = tvm_ipc.models.load(folder, session, plan=plan)
        alone = [list(model.generate(prompt, COUNT, stop=[])) for prompt in PROMPTS]
        return alone, [list(tokens) for tokens in model.generate(PROMPTS, COUNT, stop=[])]


# Windows are shorter than the texts; on 3 workers, ranks do not divide the heads of keys.
@pytest.mark.parametrize(("name", "workers"), [("Gemma3Text", 1), ("Mixtral", 3)])
def test_tokens_are_those_of_each_prompt_alone(name: str, workers: int, tmp_path: Path) -> None:
    pytorch = saved(tmp_path, name)
    alone, together = alone_and_together(tmp_path, workers)
    assert together == alone
    assert together == [continued(pytorch, prompt, COUNT) for prompt in PROMPTS]
    assert len({token for tokens in together for token in tokens}) > 3, "else it could be chance"


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_model(name: str, workers: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model tries all architectures")
    saved(tmp_path, name)
    alone, together = alone_and_together(tmp_path, workers)
    assert together == alone


@pytest.mark.parametrize("plan", ["experts", "auto", {"gate_proj": "colwise"}])
def test_plans(plan: Any, tmp_path: Path) -> None:
    """A batch uses the weights of the model, whatever the plan that sharded them."""
    saved(tmp_path, "Mixtral" if plan == "experts" else "Llama", num_hidden_layers=1)
    alone, together = alone_and_together(tmp_path, 2, plan)
    assert together == alone


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("llama")
    saved_with(of_words(), folder, num_hidden_layers=1)
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        yield tvm_ipc.models.load(folder, session)


@pytest.fixture(scope="module")
def expected(llama: Model) -> list[list[int]]:
    """The tokens of each prompt alone."""
    return [list(llama.generate(prompt, COUNT, stop=[])) for prompt in PROMPTS]


def test_requests_join_and_leave(llama: Model, expected: list[list[int]]) -> None:
    batch = llama.batch(size=3)
    assert batch.step() == {}, "nobody is there"
    first = batch.add(PROMPTS[0], COUNT, stop=[])
    assert batch.step() == {first: expected[0][0]}
    second = batch.add(PROMPTS[1], 3, stop=[])
    third = batch.add(PROMPTS[2], COUNT, stop=[])
    assert batch.step() == {first: expected[0][1], second: expected[1][0], third: expected[2][0]}
    with pytest.raises(IPCError, match="add: the batch has 3 requests, which is its size"):
        batch.add(PROMPTS[3])
    batch.step()
    batch.step()
    assert (second.finish_reason, second.tokens) == ("length", expected[1][:3])
    assert batch.requests == (first, third)
    third.cancel()
    fourth = batch.add(PROMPTS[3], COUNT, stop=[])
    while batch.requests:
        batch.step()
    assert (first.tokens, fourth.tokens) == (expected[0], expected[3])
    assert (third.finish_reason, third.tokens) == ("cancelled", expected[2][:3])
    third.cancel()
    first.cancel()
    assert first.finish_reason == "length", "it has ended before"


def test_prompts_are_processed_in_chunks_beside_other_requests(
    llama: Model, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "PREFILL_CHUNK", 8)
    batch = llama.batch(size=2)
    short, long = batch.add(PROMPTS[1], COUNT, stop=[]), batch.add(PROMPTS[2], COUNT, stop=[])
    steps = [batch.step() for _ in range(3)]
    assert [long in tokens for tokens in steps] == [False, False, True]
    assert [tokens[short] for tokens in steps] == expected[1][:3]
    while batch.requests:
        batch.step()
    assert [short.tokens, long.tokens] == [expected[1], expected[2]]


def test_end_tokens_end_requests_at_their_own_steps(
    llama: Model, expected: list[list[int]]
) -> None:
    stop = [expected[0][2], expected[2][5]]
    ended = [
        tokens[: min((tokens.index(end) for end in stop if end in tokens), default=COUNT) + 1]
        for tokens in expected
    ]
    assert len({*map(len, ended)}) > 1
    assert [list(tokens) for tokens in llama.generate(PROMPTS, COUNT, stop=stop)] == ended


def test_each_request_is_sampled_with_its_own_seed(llama: Model) -> None:
    def drawn(seed: int, prompt: list[int]) -> list[int]:
        return list(llama.generate(prompt, 8, temperature=2.0, top_k=20, seed=seed, stop=[]))

    batch = llama.batch(size=4)
    requests = [
        batch.add(prompt, 8, temperature=2.0, top_k=20, seed=seed, stop=[])
        for seed, prompt in enumerate(PROMPTS)
    ]
    while batch.requests:
        batch.step()
    assert [r.tokens for r in requests] == [drawn(s, prompt) for s, prompt in enumerate(PROMPTS)]
    assert len({tuple(request.tokens) for request in requests}) == 4


def test_sixteen_requests_and_their_memory(llama: Model, expected: list[list[int]]) -> None:
    batch = llama.batch(size=16)
    assert batch.cache_bytes == 0
    requests = [batch.add(PROMPTS[k % 4], COUNT, stop=[]) for k in range(16)]
    per_token = sum(spec.bytes_per_token for spec in llama.compiled.caches)
    assert batch.cache_bytes == 16 * 64 * per_token, "64 tokens each"
    while batch.requests:
        batch.step()
    assert [request.tokens for request in requests] == expected * 4
    assert batch.cache_bytes == 0


def test_texts_are_those_of_each_prompt_alone(llama: Model) -> None:
    prompts = ["word5 word61", "word17", "word3 word44 word60 word2"]
    texts = ["".join(llama.generate(prompt, 8)) for prompt in prompts]
    streams = llama.generate(prompts, 8)
    assert ["".join(stream) for stream in streams] == texts
    assert [stream.finish_reason for stream in streams] == ["length"] * 3
    stop = texts[0].split()[3]
    batch = llama.batch(size=2)
    requests = [batch.add(prompt, 8, stop=[stop]) for prompt in prompts[:2]]
    while batch.requests:
        batch.step()
    for request, prompt in zip(requests, prompts, strict=False):
        stream = llama.generate(prompt, 8, stop=[stop])
        assert (request.text, request.tokens) == ("".join(stream), stream.tokens)
        assert request.finish_reason == stream.finish_reason
    assert requests[0].finish_reason == "stop"


def test_iterators_that_are_closed_or_dropped_end_their_requests(
    llama: Model, expected: list[list[int]]
) -> None:
    first, second, third = llama.generate(PROMPTS[:3], COUNT, stop=[])
    assert next(first) == expected[0][0]
    batch = first._batch  # type: ignore[attr-defined]
    assert len(batch.requests) == 3
    second.close()  # type: ignore[attr-defined]
    del third
    assert len(batch.requests) == 1
    assert [next(first), *first] == expected[0][1:]
    assert list(second) == expected[1][:1], "what was generated before"


def test_cancelled_ends_all(llama: Model, expected: list[list[int]]) -> None:
    asked = []
    found = llama.generate(
        PROMPTS[:2], COUNT, stop=[], cancelled=lambda: asked.append(0) or len(asked) > 3
    )
    assert [list(tokens) for tokens in found] == [tokens[:3] for tokens in expected[:2]]


def test_logits_that_are_not_finite_end_one_request(
    llama: Model, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = llama.batch(size=2)
    first, second = (batch.add(prompt, COUNT, stop=[]) for prompt in PROMPTS[:2])
    batch.step()
    get = llama.session.get

    def spoiled(logits: Any) -> Any:
        found = get(logits).copy()
        found[0, 0] = np.nan
        return found

    with monkeypatch.context() as patch, pytest.raises(ModelError, match="not finite"):
        patch.setattr(llama.session, "get", spoiled)
        batch.step()
    assert (first.finish_reason, second.tokens) == ("error", expected[1][:2])
    while batch.requests:
        batch.step()
    assert second.tokens == expected[1]


def test_the_programs_of_the_page_run(llama: Model, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "hugging_face.md").read_text()
    section = page.partition("## Batches")[2].partition("\n## ")[0]
    programs = re.findall(r"^```py\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(programs) == 2
    names: dict[str, Any] = {"model": llama}
    for program in programs:
        exec(compile(program, "hugging_face.md", "exec"), names)
    assert len(names["texts"]) == 2
    assert len(names["first"].tokens) == 64
    assert capsys.readouterr().out.endswith("length\n")


def test_what_is_refused(llama: Model) -> None:
    with pytest.raises(ValueError, match="which has 17 prompts; expected 16 or fewer"):
        llama.generate([[1]] * 17)
    with pytest.raises(ValueError, match="at least one"):
        llama.generate([])
    with pytest.raises(ValueError, match="at least one"):
        llama.generate([[1], []])
    with pytest.raises(TypeError, match="generate: prompt"):
        llama.generate([[1], 2])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="generate: prompt"):
        llama.generate(["word1", b"word2"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="generate: 3 tokens and 4094 new ones are more than"):
        llama.generate([[1], [1, 2, 3]], 4094)
    for size in (0, 17, "2"):
        with pytest.raises((TypeError, ValueError), match="batch: size is a number of requests, 1"):
            llama.batch(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="add: temperature"):
        llama.batch(1).add([1], temperature=-1.0)


def test_a_batch_of_one_needs_no_function_of_its_own(
    llama: Model, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama._steps, "_decode_batch", None)
    monkeypatch.setattr(llama._steps, "load_batch", lambda _: pytest.fail("it is loaded"))
    (tokens,) = llama.generate(PROMPTS[:1], COUNT, stop=[])
    assert list(tokens) == expected[0]
