# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every line of a session: no crash, no hang, no error lost, and nothing left behind.

Every scenario runs in an interpreter of its own (interrupt_scenarios.py), with a time limit. The
ordinary run leaves lines out; `--fault-rounds 100` comes to nearly every one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.child_python import output_of

pytestmark = pytest.mark.slow  # presses Ctrl-C at every line

SCENARIOS = Path(__file__).with_name("interrupt_scenarios.py")
#: How many lines are left out between two that are tried, in the ordinary run.
STRIDES = {
    "values": 7,
    "long_commands": 11,
    "errors": 3,
    "threads": 41,
    "processes": 151,
    "block": 67,
    "close": 5,
    "disco_session": 5,
}


@pytest.mark.parametrize("scenario", STRIDES)
def test_interrupt_at_every_line(scenario: str, request: pytest.FixtureRequest) -> None:
    rounds = int(request.config.getoption("--fault-rounds"))
    stride = max(1, STRIDES[scenario] * 6 // rounds)
    said = output_of(SCENARIOS, scenario, str(stride), timeout=120 + 30 * rounds)
    assert said.endswith("done\n")
