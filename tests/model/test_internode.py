# SPDX-License-Identifier: Apache-2.0
"""The protocol between nodes holds in every order of steps, and does not with a fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model import internode_model
from tests.model.model_checker import check

pytestmark = pytest.mark.slow  # explores all interleavings


def test_a_reduction_across_nodes_takes_the_right_pieces() -> None:
    verdict = check(internode_model.reduction())
    assert not verdict.wrong, str(verdict)


@pytest.mark.parametrize(
    "mutation",
    [
        {"stages": 1},
        {"buffers": 1},
        {"waits_until_sent": False},
        {"ends_before_it_meets": False},
        {"reads_after_it_meets": False},
    ],
    ids=str,
)
def test_a_reduction_across_nodes_with_a_fault_is_wrong(mutation: dict[str, Any]) -> None:
    verdict = check(internode_model.reduction(internode_model.Protocol(**mutation)))
    assert verdict.wrong.startswith("wrong: "), str(verdict)
