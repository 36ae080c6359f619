# SPDX-License-Identifier: Apache-2.0
"""Every name that a package exports exists, also those that are imported on first use."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import tvm_ipc
from tvm_ipc import lazy_exports

PACKAGE = Path(tvm_ipc.__file__).parent
PACKAGES = [
    ".".join(("tvm_ipc", *path.parent.relative_to(PACKAGE).parts))
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if "__all__" in path.read_text()
]
LAZY = ["tvm_ipc", *(f"tvm_ipc.{name}" for name in ("cpu", "gpu", "models", "spmd"))]


def lazy_names(package: ModuleType) -> set[str]:
    """Return the names in the table of a package."""
    get = getattr(package, "_import_name", None) or package.__getattr__
    table = inspect.getclosurevars(get).nonlocals
    return {*table["modules"], *table["submodules"]}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_exists(name: str) -> None:
    package = importlib.import_module(name)
    assert [one for one in package.__all__ if getattr(package, one, None) is None] == []
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("name", LAZY)
def test_tables_list_exported_names(name: str) -> None:
    package = importlib.import_module(name)
    assert lazy_names(package) <= set(package.__all__)
    for one in lazy_names(package):
        assert getattr(package, one) is package.__dict__[one], "is kept after its first use"


@pytest.mark.parametrize("name", LAZY)
def test_an_unknown_name_is_an_error_that_names_the_package(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Sesion'"):
        _ = importlib.import_module(name).Sesion


def test_lazy_names_import_nothing_before_their_use(run_python: Callable[..., str]) -> None:
    code = f"import sys, {', '.join(LAZY)}\nprint('tvm' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]
    code = "import tvm_ipc\nprint('Session' in dir(tvm_ipc), len(tvm_ipc.__version__) > 2)"
    assert run_python(code).split() == ["True", "True"]


def test_the_example_of_the_helper_runs() -> None:
    result = doctest.testmod(lazy_exports)
    assert result.failed == 0 < result.attempted
