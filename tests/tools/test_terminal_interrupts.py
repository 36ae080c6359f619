# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a command that goes on after it."""

from __future__ import annotations

import signal

import pytest

from tvm_ipc.tools import terminal


def test_ctrl_c_between_two_waits_is_raised_by_the_next_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "_read_line", lambda prompt: "a line")
    interrupts = terminal.InterruptibleCommand()
    interrupts._handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        interrupts.wait_for_line("> ")
    assert interrupts.wait_for_line("> ") == "a line"


def test_a_cleared_ctrl_c_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_read_line", lambda prompt: "a line")
    interrupts = terminal.InterruptibleCommand()
    interrupts._handle(signal.SIGINT, None)
    interrupts.clear()
    assert interrupts.wait_for_line("> ") == "a line"
