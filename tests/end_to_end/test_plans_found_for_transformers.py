# SPDX-License-Identifier: Apache-2.0
"""plan="auto" for models of `transformers`: predicted to be as good as their plans, and right."""

from __future__ import annotations

import pytest

from tvm_ipc import parallelize
from tvm_ipc.spmd.op_costs import Costs, nominal, predicted

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.end_to_end.test_parallelize_transformers import check
from tests.end_to_end.transformers_models import MODELS, imported

#: What runs without `--every-model`, and on how many workers.
FEW = {("Llama", "float32"): 2, ("GPT2", "float32"): 3, ("ViT", "bfloat16"): 2}
EVERY = [(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")]


def _leave_to_every_model(name: str, dtype: str, config: pytest.Config) -> None:
    if not config.getoption("--every-model") and (name, dtype) not in FEW:
        pytest.skip("--every-model runs it")


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_predicted_time(name: str, dtype: str, pytestconfig: pytest.Config) -> None:
    """At most a tenth above that of the model's own plan, or of one that people wrote."""
    _leave_to_every_model(name, dtype, pytestconfig)
    one = imported(name, dtype)
    for workers in (2, 4):
        costs = Costs(nominal(workers))
        found = parallelize(one.module, "auto", workers, names=one.names)
        own = parallelize(one.module, one.plan, workers, names=one.names)
        assert predicted(found.module, costs).total <= 1.1 * predicted(own.module, costs).total


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_logits(name: str, dtype: str, pytestconfig: pytest.Config) -> None:
    _leave_to_every_model(name, dtype, pytestconfig)
    one = imported(name, dtype)
    made = parallelize(one.module, "auto", FEW.get((name, dtype), 3), names=one.names)
    assert made.collectives
    check(one, made)
