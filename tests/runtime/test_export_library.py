# SPDX-License-Identifier: Apache-2.0
"""A compiled module on its way to workers: what a program says where there is no compiler."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.export_library import library_of


@I.ir_module
class Same:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        return x


def test_without_a_compiler_a_program_ends_in_one_traceback_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tvm.compile(Same, "llvm")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(IPCError) as raised:
        library_of(program, lambda: tmp_path / "program.so")
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("Traceback") == 1
    assert "install g++ or clang, or name one in the environment variable CXX" in text
