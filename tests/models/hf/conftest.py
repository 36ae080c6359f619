# SPDX-License-Identifier: Apache-2.0
"""What is compiled in tests is kept apart from what users keep, and compiled in this process.

Another process would import PyTorch and transformers for each model. That it is one for users is
tested in `test_processes`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_IPC_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _apart(cache: Path) -> None:
    pass


@pytest.fixture(scope="package", autouse=True)
def _here() -> Iterator[None]:
    from tvm_ipc.models.hf import compile_cache, weight_to_stored_name_cache
    from tvm_ipc.tools.run import pytorch_baseline

    with pytest.MonkeyPatch.context() as patch:
        for module in (weight_to_stored_name_cache, compile_cache, pytorch_baseline):
            patch.setattr(module, "run_in_child", here)
        yield


def here(
    function: str, given: Any, progress: Callable[[str], None] = lambda _: None, purpose: str = ""
) -> Any:
    """Do what `apart` does, in this process."""
    module, _, name = function.partition(":")
    done = getattr(importlib.import_module(module), name)(json.loads(json.dumps(given)), progress)
    return json.loads(json.dumps(done))
