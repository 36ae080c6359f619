# SPDX-License-Identifier: Apache-2.0
"""Disco works after `import tvm`, in every mode, and in the workers too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MODES = {
    "full": {},
    "runtime_only": {"TVM_USE_RUNTIME_LIB": "1"},
}
WITHOUT_ENTRY_POINT = {"TVM_DEVICE_BACKEND_AUTOLOAD": "0"}

# Everything stays inside a function, so that Disco's objects end before the interpreter does.
PROCESS_SESSION = """
import tvm
from tvm.runtime import disco

def main():
    session = disco.ProcessSession(2)
    session.import_python_module("colorsys")
    worker_id = session.get_global_func("runtime.disco.worker_id")()
    session._sync_all()
    print([int(worker_id.debug_get_from_remote(i)[0]) for i in range(2)])
    session.shutdown()

main()
"""

THREADED_SESSION = """
import tvm_ipc.runtime
tvm_ipc.runtime.ready()
from tvm.runtime import disco

def main():
    session = disco.ThreadedSession(2)
    array = session.empty((2, 3), "float32")
    print(type(array).__name__, array.debug_get_from_remote(1).shape)
    session.shutdown()

main()
"""

TWICE = """
import tvm
from tvm.runtime import disco
from tvm_ipc.runtime.repair_disco_import import patch_disco
first, ffi_api = patch_disco(), dict(vars(disco._ffi_api))
again = patch_disco()
assert again == first, (again, first)
assert tvm.runtime.disco is disco
assert all(vars(disco._ffi_api)[name] is value for name, value in ffi_api.items())
assert first.found == first.patched, first
print(first.patched)
"""

ALREADY_RIGHT = """
import tvm
from tvm_ipc.runtime import repair_disco_import
repair_disco_import._defects.clear()
assert repair_disco_import.patch_disco() == repair_disco_import.DiscoPatch(found=(), patched=())
"""


@pytest.mark.parametrize("mode", MODES)
def test_process_session_and_import_in_workers(mode: str, run_python: Callable[..., str]) -> None:
    assert run_python(PROCESS_SESSION, **MODES[mode]) == "[0, 1]\n"


@pytest.mark.parametrize("mode", MODES)
def test_without_the_entry_point(mode: str, run_python: Callable[..., str]) -> None:
    out = run_python(THREADED_SESSION, **MODES[mode], **WITHOUT_ENTRY_POINT)
    assert out.startswith("DRef")


@pytest.mark.parametrize("mode", MODES)
def test_twice_is_once(mode: str, run_python: Callable[..., str]) -> None:
    assert "tvm.runtime.disco._ffi_api was empty" in run_python(TWICE, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_right_is_left_alone(mode: str, run_python: Callable[..., str]) -> None:
    run_python(ALREADY_RIGHT, **MODES[mode])


def test_import_of_the_package_does_not_import_tvm(run_python: Callable[..., str]) -> None:
    out = run_python("import sys, tvm_ipc; print('tvm' in sys.modules, tvm_ipc.__version__)")
    assert out.startswith("False ")


@pytest.mark.parametrize("environment", [{}, WITHOUT_ENTRY_POINT], ids=["autoload", "no_autoload"])
def test_session_needs_no_import_of_tvm(
    environment: dict[str, str], run_python: Callable[..., str]
) -> None:
    code = """
import tvm_ipc
with tvm_ipc.Session(2) as session:
    print(session.num_workers)
"""
    assert run_python(code, **environment) == "2\n"
