# SPDX-License-Identifier: Apache-2.0
"""The decoder on workers against NumPy: the same tokens, the same logits, any prompt length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm import relax

import tvm_ipc
from tests.tools.demo.reference import Reference
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.comm.collective_relax_op import is_collective
from tvm_ipc.errors import WorkerError
from tvm_ipc.examples.tensor_parallel_decoder import decoder_model as model
from tvm_ipc.examples.tensor_parallel_decoder import random_weights as weights
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import DTYPES, Config
from tvm_ipc.examples.tensor_parallel_decoder.decoder_model import Shard
from tvm_ipc.examples.tensor_parallel_decoder.generate import Generator
from tvm_ipc.tools.demo.compare_worker_counts import allowed_difference
from tvm_ipc.tools.demo.compile_model import compile_model, decisions
from tvm_ipc.tools.demo.options import Build
from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import evaluate

CONFIG = Config(layers=2, hidden=64, heads=8, kv_heads=4, inner=96, vocabulary=128, context=80)
PLAIN = Build()
BUILDS = {
    "plain": PLAIN,
    "sequence parallel": Build(sequence_parallel=True),
    "overlap": Build(sequence_parallel=True, overlap=2),
}
#: Of 7, 1, 8 and 70 tokens: with 2 and 4 workers parts are equal, or not, or there are none.
PROMPTS = ([3, 5, 17, 99, 4, 4, 28], [1], [9, 2, 6, 5, 3, 5, 8, 97], list(range(30, 100)))


@pytest.fixture(scope="module", params=[1, 2, 4])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(request.param) as session:
        yield session


def generator(session: Any, config: Config, build: Build = PLAIN) -> Generator:
    executable = compile_model(config, session.num_workers, build)
    return Generator(session, executable, config, list(weights.make(config)))


@pytest.fixture(scope="module", params=BUILDS.values(), ids=BUILDS)
def small(session: Any, request: pytest.FixtureRequest) -> Generator:
    return generator(session, CONFIG, request.param)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_tokens_and_logits_are_those_of_numpy(
    small: Generator, reference: Reference, prompt: list[int]
) -> None:
    expected, logits = reference.generate(prompt, 8)
    heard: list[int] = []
    said = small.generate(prompt, 8, heard.append)
    assert said.tokens == [expected] * small.session.num_workers
    np.testing.assert_allclose(said.logits, logits, atol=1e-5)
    assert heard[-1] == 8
    assert heard == sorted(heard)


def test_caches_are_not_remembered(small: Generator) -> None:
    first, second = (small.generate([7, 8, 9], 5) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.logits.tobytes() == second.logits.tobytes()


def test_full_cache_is_refused_and_the_last_place_is_used(small: Generator) -> None:
    prompt = [5] * 70
    assert len(small.generate(prompt, 11).tokens[0]) == 11
    with pytest.raises(
        ValueError, match=r"KV cache is too small: .* 70 tokens and 12 new .* has 80"
    ):
        small.generate(prompt, 12)
    with pytest.raises(ValueError, match="the KV cache is too small"):
        small.generate([5] * 81, 1)


def test_program_itself_refuses_a_position_beyond_its_caches(small: Generator) -> None:
    beyond = model.padded_context(CONFIG) + 1
    token = small.session.put(np.array([1], "int32"))
    small._prefill(token, tvm_ffi.Shape([beyond]), small._caches, small._weights)
    with pytest.raises(WorkerError, match="the KV cache is full"):
        small.session.sync()
    assert small.generate([1], 2).tokens[0]


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([], 1, "the prompt is empty"),
        ([1], 0, "the number of new tokens is 0"),
        ([1, 128], 1, "the token 128; tokens must be 0 to 127"),
        ([-1], 1, "the token -1"),
    ],
)
def test_wrong_prompts_are_refused(
    small: Generator, prompt: list[int], count: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        small.generate(prompt, count)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_sizes_that_fill_no_vector(dtype: str, build: Build) -> None:
    config = Config(3, 60, 6, 2, 42, 100, 40, dtype)
    expected, logits = Reference(config).generate(PROMPTS[0], 1)
    with tvm_ipc.Session(2, threads=True) as session:
        said = generator(session, config, build).generate(PROMPTS[0], 1)
    np.testing.assert_allclose(
        said.logits, logits, atol=2 * allowed_difference(config, logits), rtol=0
    )
    assert len(said.tokens) == 2 and said.tokens[0] == said.tokens[1]
    assert dtype != "float32" or said.tokens[0] == expected


@pytest.mark.parametrize("overlap", [None, 1, 3])
def test_sequence_parallelism_with_rows_that_three_workers_cannot_divide(
    overlap: int | None,
) -> None:
    config = Config(2, 96, 6, 3, 96, 99, 40)
    build = Build(sequence_parallel=True, overlap=overlap)
    found = decisions(config, 3, build)
    assert (found.gathers, found.scatters) == (4, 4)
    assert found.overlapped == (0 if overlap is None else 8)
    reference = Reference(config)
    with tvm_ipc.Session(3, threads=True) as session:
        three = generator(session, config, build)
        for length in range(1, 9):
            tokens, logits = reference.generate(list(range(length)), 3)
            said = three.generate(list(range(length)), 3)
            assert said.tokens == [tokens] * 3
            np.testing.assert_allclose(said.logits, logits, atol=1e-5)
        # The longest prompt, whose parts have room for two rows more.
        tokens, _ = reference.generate(list(range(40)), 1)
        assert three.generate(list(range(40)), 1).tokens == [tokens] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_of_a_prompt_goes_on_beside_products(dtype: str) -> None:
    config = Config(2, 64, 4, 2, 64, 64, 40, dtype)
    found = decisions(config, 2, BUILDS["overlap"])
    assert (found.gathers, found.scatters, found.overlapped) == (4, 4, 8)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("workers", [2, 4])
def test_check_proves_the_program_for_all_lengths(workers: int, build: Build) -> None:
    mod = model.build(CONFIG, workers, sequence_parallel=build.sequence_parallel)
    with tvm_ipc.transform.collect_report() as report:
        tvm_ipc.get_pipeline("llvm", workers, overlap=build.overlap)(mod)
    doubts = [one for one in report.decisions if one.pass_name == "VerifyCrossRankSafety"]
    assert doubts == []


def test_gathers_feed_products_and_these_feed_reduce_scatters() -> None:
    """No copy is between them, so that they can be done piece by piece."""
    prefill = model.build(CONFIG, 4, sequence_parallel=True)["prefill"]
    bindings = [binding for block in prefill.body.blocks for binding in block.bindings]
    made = {binding.var: binding.value for binding in bindings}

    def what(variable: Any) -> str:
        value = made[variable]
        if not isinstance(value, relax.Call):
            return ""
        kind = is_collective(value) and value.attrs.kind
        return str(kind or value.op.name)

    edges = Counter(
        (what(argument), what(binding.var))
        for binding in bindings
        if isinstance(binding.value, relax.Call)
        for argument in binding.value.args
        if argument in made
    )
    layers = CONFIG.layers
    assert edges["allgather", "relax.matmul"] == 2 * layers  # of QKV; of gate and up
    assert edges["relax.matmul", "reduce_scatter"] == 2 * layers
    of_gathers = {other for one, other in edges if one == "allgather"}
    into_scatters = {one for one, other in edges if other == "reduce_scatter"}
    assert (of_gathers, into_scatters) == ({"relax.matmul"}, {"relax.matmul"})
    # A step has one row.
    assert not any(
        is_collective(call)
        for call in calls(model.build(CONFIG, 4, sequence_parallel=True)["decode"])
    )


def test_residual_stream_in_parts_takes_its_part_of_memory() -> None:
    whole, parts = (
        model.build(CONFIG, 4, sequence_parallel=parallel)["prefill"] for parallel in (False, True)
    )

    def rows(function: relax.Function) -> set[int]:
        """Of the tensors that are added or normalised."""
        sizes = {"n": CONFIG.context}
        return {
            evaluate(str(call.ty.shape.values[0]), sizes) or 0
            for call in calls(function)
            if getattr(call.op, "name", "") in ("relax.add", "relax.nn.rms_norm")
        }

    assert rows(whole) == {CONFIG.context, 1}
    assert rows(parts) == {CONFIG.context // 4, 1}


def test_every_allreduce_is_rewritten_and_memory_is_saved() -> None:
    found = decisions(replace(CONFIG, context=256), 2)
    assert found.allreduces == found.rewritten == 8
    assert found.without_barrier == 8
    assert sum(found.memory.ours.values()) < sum(found.memory.upstream.values())
    assert (found.gathers, found.scatters) == (0, 0)
    alone = decisions(CONFIG, 1)
    assert (alone.allreduces, alone.rewritten, alone.without_barrier) == (0, 0, 0)


def test_weights_are_the_same_for_any_number_of_workers() -> None:
    rows = np.arange(24).reshape(12, 2)
    assert weights.shard(rows, Shard(0, (12,)), 3)[1].tolist() == rows[4:8].tolist()
    columns = np.arange(16).reshape(2, 8)
    first, second = weights.shard(columns, Shard(1, (4, 2, 2)), 2)
    assert first[0].tolist() == [0, 1, 4, 6]
    assert second[0].tolist() == [2, 3, 5, 7]
    made = [list(weights.make(CONFIG)) for _ in range(2)]
    for (name, one, _), (_, other, _) in zip(*made, strict=True):
        assert one.tobytes() == other.tobytes(), name
    other_seed = {name: value for name, value, _ in weights.make(CONFIG, 1)}
    assert not np.array_equal(other_seed["embedding"], made[0][0][1])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"heads": 7}, "hidden 64 cannot be split evenly over 7 heads; use hidden 70"),
        ({"kv_heads": 3}, "heads 8 cannot be split evenly over 3 kv_heads; use heads 9"),
        (
            {"hidden": 72},
            "gives each of 8 heads a width of 9; rotary embeddings need an even width",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float32, float16, bfloat16"),
    ],
)
def test_wrong_sizes_are_refused(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **sizes)


def test_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(
        ValueError, match="heads 8 cannot be split evenly over 3 workers; use heads 9"
    ):
        model.build(CONFIG, 3)
    with pytest.raises(ValueError, match="kv_heads 4 cannot be split evenly over 8 workers"):
        model.build(CONFIG, 8)
    with pytest.raises(ValueError, match="number of workers is 65; it must be 1 to 64"):
        model.build(CONFIG, 65)
