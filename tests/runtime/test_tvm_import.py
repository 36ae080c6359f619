# SPDX-License-Identifier: Apache-2.0
"""TVM's runtime alone is imported without errors inside the FFI, each of which takes long."""

from __future__ import annotations

import pytest

from tests.child_python import output_of_code

PROGRAM = """
from tvm_ffi import core
ask, unknown = core._object_type_key_to_index, []
def watched(type_key):
    index = ask(type_key)
    if index is None:
        unknown.append(type_key)
    return index
core._object_type_key_to_index = watched
{begin}
assert core._object_type_key_to_index is watched
from tvm.runtime import disco
print(unknown, disco.DRef.__tvm_ffi_type_info__.type_key)
"""


@pytest.mark.parametrize("compiler", ["0", "1"])
@pytest.mark.parametrize(
    "begin", ["from tvm_ipc import Session", "import tvm_ipc; tvm_ipc.runtime_only()"]
)
def test_tvm_asks_for_no_type_that_is_not_there(begin: str, compiler: str) -> None:
    program = PROGRAM.format(begin=begin)
    said = output_of_code(program, environment={"TVM_USE_RUNTIME_LIB": compiler})
    assert said == "[] runtime.disco.DRef\n"


@pytest.mark.parametrize("module", ["comm", "models", "models.weights", "nodes", "calibration"])
def test_what_only_runs_programs_needs_no_compiler(module: str) -> None:
    program = f"""
import importlib, tvm_ipc
tvm_ipc.runtime_only()
module = importlib.import_module("tvm_ipc.{module}")
if module.__name__ == "tvm_ipc.models":
    module.load  # is imported on first use
print("imported")
"""
    assert output_of_code(program) == "imported\n"
