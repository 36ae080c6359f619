# SPDX-License-Identifier: Apache-2.0
"""The option `--hosts` of commands: what a session would refuse is refused before they compile."""

from __future__ import annotations

import pytest

from tvm_ipc.tools.command_line import main
from tvm_ipc.tools.demo import compare_worker_counts


@pytest.mark.parametrize("name", ["none.invalid", "a..b"])
@pytest.mark.parametrize("command", [["demo"], ["run", "/no/folder", "--tokens", "1"]])
def test_names_that_lead_nowhere(
    command: list[str],
    name: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_worker_counts, "compile_model", pytest.fail)
    monkeypatch.setattr("tvm_ipc.nodes.find_mpi_installation.find_mpi", lambda: None)
    assert main([*command, "--hosts", f"localhost,{name}"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("tvm-ipc: ") and f"'{name}' cannot be reached from" in err
