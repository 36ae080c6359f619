# SPDX-License-Identifier: Apache-2.0
"""Tokens are drawn as transformers says that they are drawn, and what is no choice is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.sampling import Sampler

#: Temperature, top_k and top_p.
CHOICES = [
    (1.0, None, 1.0),
    (0.3, None, 0.9),
    (2.5, 7, 1.0),
    (0.9, 40, 0.5),
    (1.0, 1, 1.0),
    (1.0, None, 1e-9),
    (3.0, 10**9, 0.999),
]


def logits_of(size: int, scale: float = 3.0) -> np.ndarray[Any, Any]:
    return (scale * np.random.default_rng(size).normal(size=size)).astype("float32")


def chances(sampler: Sampler, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How likely each token is."""
    tokens, likely = sampler.chances(logits)
    found = np.zeros(len(logits))
    found[tokens] = likely / likely.sum()
    return found


def expected(
    logits: np.ndarray[Any, Any], temperature: float, top_k: int | None, top_p: float
) -> np.ndarray[Any, Any]:
    """The same by hand: of the likeliest, until they have their share."""
    order = np.argsort(-logits.astype("float64"), kind="stable")
    kept = order[: len(order) if top_k is None else top_k]
    likely = np.exp((logits[kept].astype("float64") - logits.max()) / temperature)
    likely /= likely.sum()
    count = next(k for k in range(1, len(kept) + 1) if likely[:k].sum() >= top_p - 1e-12)
    found = np.zeros(len(logits))
    found[kept[:count]] = likely[:count] / likely[:count].sum()
    return found


@pytest.mark.parametrize("size", [1, 2, 67, 5000])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_chances(choice: tuple[float, int | None, float], size: int) -> None:
    logits = logits_of(size)
    np.testing.assert_allclose(
        chances(Sampler(*choice), logits), expected(logits, *choice), rtol=1e-9
    )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_as_transformers_does(choice: tuple[float, int | None, float]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    process = pytest.importorskip(
        "transformers.generation.logits_process", reason="transformers is not installed"
    )
    temperature, top_k, top_p = choice
    for logits in (logits_of(300), np.repeat(logits_of(50), 3)):  # and with equal ones
        scores = process.TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
        if top_k is not None:
            scores = process.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1 and len(set(logits.tolist())) == len(logits):  # else they differ in the order
            scores = process.TopPLogitsWarper(top_p)(None, scores)
        elif top_p < 1:
            continue
        wanted = torch.softmax(scores.double(), -1)[0].numpy()
        found = chances(Sampler(*choice), logits)
        np.testing.assert_array_equal(found > 0, wanted > 0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_flat_ones_take_more_than_are_sorted_at_first() -> None:
    logits = logits_of(20000, 0.01)
    np.testing.assert_allclose(
        chances(Sampler(1.0, None, 0.7), logits), expected(logits, 1.0, None, 0.7), rtol=1e-9
    )


def test_draws_are_as_often_as_they_are_likely() -> None:
    logits, count = logits_of(20, 1.5), 20000
    for choice in ((1.0, None, 1.0), (0.7, 12, 0.9)):
        sampler = Sampler(*choice, seed=3)
        seen = np.bincount([sampler(logits) for _ in range(count)], minlength=20)
        wanted = expected(logits, *choice)
        assert (seen[wanted == 0] == 0).all()
        error = np.sqrt(count * wanted * (1 - wanted))
        assert (np.abs(seen - count * wanted) <= 5 * error).all()


def test_seeds() -> None:
    logits = logits_of(100, 0.1)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(1.0, seed=seed)
        return [sampler(logits) for _ in range(20)]

    assert draws(4) == draws(4)
    assert len({tuple(draws(seed)) for seed in (0, 1, None, None)}) == 4


def test_extremes() -> None:
    """Of temperatures, and of tokens that are far from likely."""
    logits = np.array([3.0, -1e30, 2.5, 3.0, 1e5], "float32")
    assert {Sampler(5e-324, seed=k)(logits) for k in range(20)} == {4}
    assert {Sampler(1e308, seed=k)(logits) for k in range(60)} == {0, 1, 2, 3, 4}
    assert {Sampler(1.0, seed=k)(np.array([0.0, -1e30])) for k in range(20)} == {0}
    assert Sampler()(logits) == 4
    assert Sampler()(np.array([1.0, 7.0, 7.0])) == 1, "the first one, as PyTorch's argmax"


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(wrong: float, temperature: float) -> None:
    logits = np.array([1.0, wrong, wrong, 3.0], "float32")
    with pytest.raises(ModelError, match="2 logits that are not finite"):
        Sampler(temperature)(logits)
