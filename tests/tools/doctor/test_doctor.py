# SPDX-License-Identifier: Apache-2.0
"""The command `tvm-ipc`, above all its doctor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tvm_ipc.__main__ import main
from tvm_ipc.errors import IPCError, LibraryError
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.tools.doctor.cxx_compiler import try_compiler
from tvm_ipc.tools.doctor.facts import cgroup_limit, examine
from tvm_ipc.tools.doctor.format_facts_as_text import render


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return examine()


def test_shared_memory_works_here(facts: dict[str, Any]) -> None:
    assert facts["backends"]["shm"]["available"], facts["backends"]["shm"]["reason"]
    assert facts["tvm"]["problem"] is None


def test_mpi_is_available_or_the_reason_says_what_is_missing(facts: dict[str, Any]) -> None:
    try:
        find_mpi()
    except IPCError as error:
        assert not facts["backends"]["mpi"]["available"]
        assert str(error) in facts["backends"]["mpi"]["reason"]
    else:
        assert facts["backends"]["mpi"]["available"], facts["backends"]["mpi"]["reason"]


def test_patched_defects_are_reported(facts: dict[str, Any]) -> None:
    assert "tvm.runtime.disco._ffi_api was empty" in facts["tvm"]["patched"]


def test_native_facts_are_there(facts: dict[str, Any]) -> None:
    assert facts["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["cpu"]["instruction_set"] in facts["cpu"]["instruction_sets"]
    assert facts["system_calls"]["memfd"] is True
    assert facts["memory"]["physical"] > 0


def test_table_shows_packages_backends_and_limits(facts: dict[str, Any]) -> None:
    table = render(facts)
    assert "tvm.runtime.disco._ffi_api was empty: patched" in table
    for text in ("apache-tvm-ffi", "(tested)", "shm", "available: ", "open files"):
        assert text in table
    verbose = render(facts, verbose=True)
    for text in ("RLIMIT_NOFILE", "memfd", "TVM_NUM_THREADS", "OpenBLAS library"):
        assert text in verbose
        assert text not in table


def test_missing_native_facts_are_unknown(facts: dict[str, Any]) -> None:
    less = {**facts, "cpu": {**facts["cpu"], "instruction_sets": None, "instruction_set": None}}
    assert "instruction set used unknown" in render(less)


def test_json_has_the_same_facts(
    capsys: pytest.CaptureFixture[str], facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_ipc.tools.doctor.facts.examine", lambda _: facts)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_a_broken_library_is_an_answer_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path:
        raise LibraryError("no such library")

    monkeypatch.setattr(shared_libraries, "load", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("no such library") == 1  # and not for each thing that does not work without it
    assert "shm                  not available: see the first line" in out
    assert out.startswith("Not ready: TVM or the native library fails: no such library.\n")
    assert "none found" not in out


def test_error_of_ours_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> dict[str, Any]:
        raise IPCError("what\nand where")

    monkeypatch.setattr("tvm_ipc.tools.doctor.facts.examine", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "tvm-ipc: what (more with --traceback)\n"
    with pytest.raises(IPCError):
        main(["--traceback", "doctor"])
    with pytest.raises(IPCError):
        main(["doctor", "--traceback"])


COMPILERS = {
    "links": ('exec c++ "$@"', ""),
    "says no": ("echo no such file; exit 3", "ended with exit code 3: no such file"),
    "makes nothing": ("exit 0", "answer.so: cannot open shared object file"),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_compiler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    script, reason = COMPILERS[kind]
    compiler = tmp_path / "my c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = try_compiler(None)
    assert found["command"] == str(compiler)
    assert found["works"] == (not reason)
    assert reason in (found["reason"] or "")
    assert found["settings"]["CXX"] == str(compiler)


def test_without_a_compiler_the_doctor_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    table = render({**facts, "cxx": try_compiler(None)})
    assert "none found" in table
    assert "install g++ or clang, or name one in the environment variable CXX" in table
    monkeypatch.setenv("CXX", "ccache g++")
    assert "TVM treats the whole text as one path" in try_compiler(None)["reason"]


def test_lines_break_on_a_terminal_and_nowhere_else(facts: dict[str, Any]) -> None:
    wide = {**facts, "blas": {**facts["blas"], "library": "OpenBLAS " * 20}}
    assert max(map(len, render(wide, verbose=True).splitlines())) > 180
    for line in render(wide, 80, verbose=True).splitlines():
        _label, _, value = line.strip().partition("  ")
        assert len(line) <= 80 or " " not in value.strip()  # a path is left whole
    assert render(wide, 1)


def test_cgroup_limit_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "memory.max").write_text("4096\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    membership.write_text("0::/a/b\n")
    assert cgroup_limit(membership, root) == 4096


def test_cgroup_version_1_and_no_limit(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "root"
    limit = root / "memory" / "memory.limit_in_bytes"
    limit.parent.mkdir(parents=True)
    membership.write_text("3:cpu:/x\n2:memory:/x\n")
    limit.write_text("9223372036854771712\n")
    assert cgroup_limit(membership, root) is None
    limit.write_text("8192\n")
    assert cgroup_limit(membership, root) == 8192
    assert cgroup_limit(tmp_path / "absent", root) is None


def test_says_which_blas_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examine()
    assert "OpenBLAS" in facts["blas"]["library"]
    assert Path(facts["blas"]["path"]).is_file()
    monkeypatch.setattr("tvm_ipc.cpu.openblas_discovery._PACKAGE", "no_such_package")
    missing = examine()
    assert "pip install scipy-openblas64" in missing["blas"]["reason"]
    assert "pip install scipy-openblas64" in render(missing)
