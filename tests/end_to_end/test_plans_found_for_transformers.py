# SPDX-License-Identifier: Apache-2.0
"""plan="auto" for models of `transformers`: predicted to be as good as their plans, and right."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_ipc import parallelize
from tvm_ipc.parallel.costs import Costs, nominal, predicted

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from test_parallelize_transformers import run
from transformers_models import MODELS, imported

#: What runs without `--every-model`, and on how many workers.
FEW = {"Llama": 2, "GPT2": 3, "ViT": 2}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_time(name: str, pytestconfig: pytest.Config) -> None:
    """At most a tenth above that of the model's own plan, or of one that people wrote."""
    if not pytestconfig.getoption("--every-model") and name not in FEW:
        pytest.skip("--every-model runs it")
    one = imported(name, "float32", not MODELS[name].sees)
    for workers in (2, 4):
        costs = Costs(nominal(workers))
        found = parallelize(one.module, "auto", workers, names=one.names)
        own = parallelize(one.module, one.plan, workers, names=one.names)
        assert predicted(found.module, costs).total <= 1.1 * predicted(own.module, costs).total


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--every-model") and name not in FEW:
        pytest.skip("--every-model runs it")
    one = imported(name, "float32", not MODELS[name].sees)
    made = parallelize(one.module, "auto", FEW.get(name, 3), names=one.names)
    assert made.collectives
    for found in run(one, made):
        np.testing.assert_allclose(found, one.logits, rtol=1e-4, atol=1e-4)
