# SPDX-License-Identifier: Apache-2.0
"""The table in contract.py and what the package registers are the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from tvm_ipc import contract

PREFIXES = ("tvm_ipc.", f"runtime.disco.{contract.SHM}.", "runtime.disco.cuda_ipc.")
LIST_FUNCTIONS = """
import json, tvm_ipc
tvm_ipc.Session
from tvm_ffi.registry import list_global_func_names
print(json.dumps(list(list_global_func_names())))
"""


@pytest.fixture(params=["0", "1"], ids=["full", "runtime_only"])
def registered(request: pytest.FixtureRequest, run_python: Callable[..., str]) -> set[str]:
    return set(json.loads(run_python(LIST_FUNCTIONS, TVM_USE_RUNTIME_LIB=request.param)))


def test_names_are_listed_once() -> None:
    counts = Counter(function.name for function in contract.FUNCTIONS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_listed_function_is_registered(registered: set[str]) -> None:
    assert [f.name for f in contract.FUNCTIONS if f.name not in registered] == []


def test_every_registered_function_is_listed(registered: set[str]) -> None:
    listed = {function.name for function in contract.FUNCTIONS}
    assert sorted(n for n in registered if n.startswith(PREFIXES) and n not in listed) == []
