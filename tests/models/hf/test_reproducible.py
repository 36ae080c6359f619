# SPDX-License-Identifier: Apache-2.0
"""With `reproducible=True`, logits have the same bits for every layout of the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.hf.checkpoints import saved
from tvm_ipc.errors import ModelError, TransformError
from tvm_ipc.models import Model
from tvm_ipc.tools.run.generate_text_command import main

#: All sizes can be shared by 8 workers; windows are shorter than the prompt.
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 6},
    "Mixtral": {"num_local_experts": 4},
}
USUAL = {
    "hidden_size": 64,
    "intermediate_size": 176,  # parts of 11 steps
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
}
RANDOM = np.random.default_rng(0)
PROMPT: list[int] = RANDOM.integers(64, size=70).tolist()
#: The tokens after the prompt, which are given, so that each layout computes the same.
OTHERS: list[int] = RANDOM.integers(64, size=64).tolist()

Logits = dict[int, bytes]


def whole_and_pieces(model: Model, pieces: tuple[int, ...], count: int) -> Iterator[Logits]:
    """Yield the logits after each step, by position, of a prompt in pieces and of decoding."""
    session, steps = model.session, model._steps
    for piece in pieces:
        caches = steps.allocate_caches(len(PROMPT) + count)
        found: Logits = {}
        for seen in range(0, len(PROMPT), piece):
            tokens = PROMPT[seen : seen + piece]
            logits = session.get(steps.prefill(tokens, seen, caches))
            found[seen + len(tokens)] = logits[0].tobytes()
        for seen, token in enumerate(OTHERS[:count], len(PROMPT)):
            found[seen + 1] = session.get(steps.decode(token, seen, caches))[0].tobytes()
        yield found


def batches(model: Model, sizes: tuple[int, ...], count: int) -> Iterator[Logits]:
    """Yield the logits of requests of a batch, whose prompts have different lengths."""
    session, steps, tokens = model.session, model._steps, PROMPT + OTHERS
    for size in sizes:
        model.batch(size)
        lengths = [len(PROMPT) - 3 * number for number in range(size)]
        caches = [steps.allocate_caches(len(tokens)) for _ in lengths]
        for length, cache in zip(lengths, caches, strict=True):
            steps.prefill(PROMPT[:length], 0, cache)
        found: list[Logits] = [{} for _ in lengths]
        for step in range(count):
            at = [length + step for length in lengths]
            rows = steps.decode_batch([tokens[one] for one in at], at, session.tuple(caches))
            for logits, position, row in zip(found, at, session.get(rows), strict=True):
                logits[position + 1] = row.tobytes()
        yield from found


def assert_same_bits(
    folder: Path,
    workers: int,
    expected: Logits,
    pieces: tuple[int, ...],
    sizes: tuple[int, ...],
    count: int,
    threads: int = 1,
) -> None:
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        session.get_global_func("tvm_ipc.worker.set_threads")(threads)
        model = tvm_ipc.models.load(folder, session, reproducible=True)
        several = tuple(size for size in sizes if size > 1)
        layouts = [*whole_and_pieces(model, pieces, count), *batches(model, several, count)]
        for number, found in enumerate(layouts):
            assert found
            differing = [at for at, bits in found.items() if expected.get(at, bits) != bits]
            assert not differing, f"{workers} workers, layout {number}: {differing}"


def expected_of(folder: Path, count: int) -> Logits:
    """Return the logits at each position: of one worker, one token after the other."""
    with tvm_ipc.Session(1, threads=True, timeout=60) as session:
        model = tvm_ipc.models.load(folder, session, reproducible=True)
        (expected,) = whole_and_pieces(model, (1,), count)
    return expected


@pytest.mark.parametrize(
    ("name", "dtype", "workers"),
    [("Llama", "bfloat16", 4), ("Gemma2", "float32", 2), ("Mixtral", "float32", 2)],
)
def test_bits_of_logits(name: str, dtype: str, workers: int, tmp_path: Path) -> None:
    saved(tmp_path, name, dtype, **{**USUAL, **SIZES[name], "num_hidden_layers": 1})
    expected = expected_of(tmp_path, 8)
    assert len(set(expected.values())) == len(expected), "each token has its own logits"
    for count in (1, workers):
        assert_same_bits(tmp_path, count, expected, (70, 64, 7), (3,), 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZES)
def test_every_layout(name: str, dtype: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model compares all layouts")
    saved(tmp_path, name, dtype, **{**USUAL, **SIZES[name]})
    expected = expected_of(tmp_path, len(OTHERS))
    for workers in (1, 2, 4, 8):
        for threads in (1, 2):
            assert_same_bits(
                tmp_path, workers, expected, (70, 64, 7, 1), (1, 3, 8), len(OTHERS), threads
            )


def test_the_default_has_other_bits(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    saved(tmp_path, "Llama", **{**USUAL, "num_hidden_layers": 1})
    found = []
    for workers in (1, 2):
        with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
            model = tvm_ipc.models.load(tmp_path, session)
            found += list(whole_and_pieces(model, (70, 1), 1))
    assert len({logits[len(PROMPT)] for logits in found}) > 2


def test_the_tokens_are_those_of_the_default(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", **{**USUAL, "num_hidden_layers": 1})
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        tokens = [
            list(
                tvm_ipc.models.load(tmp_path, session, reproducible=reproducible).generate(
                    PROMPT, 16, stop=[]
                )
            )
            for reproducible in (False, True)
        ]
    assert tokens[0] == tokens[1]


def test_what_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", **{**USUAL, "num_hidden_layers": 1})
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        with pytest.raises(TransformError, match=r"\d+ ranks|summed over 3 workers"):
            tvm_ipc.models.load(tmp_path, session, reproducible=True)
        with pytest.raises(ModelError, match="a model in float16 is not reproducible"):
            tvm_ipc.models.load(tmp_path, session, dtype="float16", reproducible=True)


def test_the_command_takes_the_option(tmp_path: Path) -> None:
    """Three workers are refused because of it."""
    saved(tmp_path, "Llama", **{**USUAL, "num_hidden_layers": 1})
    options = [
        str(tmp_path),
        "--tokens",
        "1,2",
        "--workers",
        "3",
        "--threads",
        "--max-new-tokens",
        "1",
    ]
    assert main(options) == 0
    with pytest.raises(TransformError, match=r"summed over 3 workers|ranks"):
        main([*options, "--reproducible"])


def test_sharded_experts_are_refused(tmp_path: Path) -> None:
    sizes = {**USUAL, **SIZES["Mixtral"], "num_hidden_layers": 1}
    saved(tmp_path, "Mixtral", **sizes)
    expected = pytest.raises(TransformError, match=r"comm.moe .*: experts that are sharded")
    with tvm_ipc.Session(2, threads=True, timeout=60) as session, expected:
        tvm_ipc.models.load(tmp_path, session, plan="experts", reproducible=True)
