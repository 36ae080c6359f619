# SPDX-License-Identifier: Apache-2.0
"""A folder that transformers saved continues texts on workers as PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.hf.checkpoints import SIZES, continued, saved, torch, transformers
from tvm_ipc.errors import ModelError

PROMPT = [5, 61, 17, 3, 44, 60, 2, 29, 31]


def on_workers(
    folder: Path, workers: int, prompt: list[int], count: int, plan: Any = None
) -> list[int]:
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        model = tvm_ipc.models.load(folder, session, plan=plan)
        return list(model.generate(prompt, count, stop=[]))


@pytest.mark.parametrize(("name", "workers", "layers"), [("Llama", 2, 2), ("Qwen3Moe", 3, 1)])
def test_says_what_pytorch_says(name: str, workers: int, layers: int, tmp_path: Path) -> None:
    """Also where the ranks do not divide heads, and files have experts one by one."""
    model = saved(tmp_path, name, num_hidden_layers=layers)
    expected = continued(model, PROMPT, 16)
    assert len(set(expected)) > 3, "else it could be by chance"
    assert on_workers(tmp_path, workers, PROMPT, 16) == expected


@pytest.mark.parametrize(("name", "workers"), [("Mixtral", 2), ("Mixtral", 4), ("Qwen3Moe", 4)])
def test_sharded_experts_say_what_pytorch_says(name: str, workers: int, tmp_path: Path) -> None:
    """Also where the ranks do not divide the experts, and for a prompt of one token."""
    model = saved(tmp_path, name, num_hidden_layers=1)
    for prompt in (PROMPT, PROMPT[:1]):
        expected = continued(model, prompt, 16)
        assert on_workers(tmp_path, workers, prompt, 16, "experts") == expected


def test_models_without_experts_have_none_to_shard(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", num_hidden_layers=1)
    with pytest.raises(ModelError, match="no plan that shards experts of this model"):
        on_workers(tmp_path, 2, PROMPT, 1, "experts")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_model(name: str, workers: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model tries all architectures")
    model = saved(tmp_path, name)
    for prompt in (PROMPT, PROMPT[:1]):
        assert on_workers(tmp_path, workers, prompt, 16) == continued(model, prompt, 16)


def test_one_model_many_texts(tmp_path: Path) -> None:
    """Each text has keys and values of its own, also while others are being continued."""
    model = saved(tmp_path, "Llama")
    long = np.random.default_rng(0).integers(67, size=40).tolist()
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        ours = tvm_ipc.models.load(tmp_path, session)
        first, second = ours.generate(PROMPT, 8, stop=[]), ours.generate(long, 8, stop=[])
        taken = list(zip(first, second, strict=True))
        expected = list(zip(continued(model, PROMPT, 8), continued(model, long, 8), strict=True))
        assert taken == expected
        # To the last token that a cache has room for, from a prompt of one.
        assert list(ours.generate([7], 63, stop=[])) == continued(model, [7], 63)
        end = expected[2][0]
        assert list(ours.generate(PROMPT, 8, stop=[end])) == [
            *[one for one, _ in expected[: [one for one, _ in expected].index(end)]],
            end,
        ]
        drawn = [list(ours.generate(PROMPT, 8, temperature=2.0, seed=1)) for _ in range(2)]
        assert drawn[0] == drawn[1] != list(ours.generate(PROMPT, 8, temperature=2.0, seed=2))
        with pytest.raises(ValueError, match="9 tokens and 4090 new ones are more than the 4096"):
            ours.generate(PROMPT, 4090)
        with pytest.raises(ValueError, match="or a sequence of tokens, each 0 to 66"):
            ours.generate([67])
        with pytest.raises(ValueError, match="at least one"):
            ours.generate([])


def test_long_prompts_are_taken_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_ipc.models.hf import load_and_generate as module

    monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    model = saved(tmp_path, "Llama")
    assert on_workers(tmp_path, 2, PROMPT, 4) == continued(model, PROMPT, 4)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Phi3", "GPT2"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bfloat16_is_as_near_to_float32_as_pytorchs(
    name: str, workers: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Given the same tokens, so that one near tie does not make two texts of one."""
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model compares logits of bfloat16")
    saved(tmp_path, name, "bfloat16")
    text = np.random.default_rng(1).integers(67, size=40).tolist()
    prompt, rest = text[:12], text[12:]
    exact, theirs = (logits_of_pytorch(tmp_path, dtype, text) for dtype in ("float32", "bfloat16"))
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        ours = tvm_ipc.models.load(tmp_path, session)
        steps = ours._steps
        caches = steps.allocate_caches(len(text))
        found = [session.get(steps.prefill(prompt, 0, caches))[0]]
        for seen, token in enumerate(rest, start=len(prompt)):
            found.append(session.get(steps.decode(token, seen, caches))[0])
    exact, theirs = exact[len(prompt) - 1 :], theirs[len(prompt) - 1 :]
    error = np.square(np.stack(found) - exact).mean()
    assert error < 1.5 * np.square(theirs - exact).mean()
    assert error < 0.01 * np.square(exact).mean()


def logits_of_pytorch(folder: Path, dtype: str, text: list[int]) -> np.ndarray[Any, Any]:
    """Return what comes after each token of a text."""
    kept = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        found: np.ndarray[Any, Any] = kept(torch.tensor([text])).logits[0].float().numpy()
    return found
