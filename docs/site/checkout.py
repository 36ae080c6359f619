# SPDX-License-Identifier: Apache-2.0
"""Reads and imports the checkout, also where another tvm_ipc is installed, or none is."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def declared(key: str) -> str | None:
    """Return a string of pyproject.toml, or None (tomllib is new in Python 3.11)."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'^{key} = "(.*)"$', text, re.MULTILINE)
    return found.group(1) if found else None


class _Checkout:
    """Finds tvm_ipc in the checkout.

    `sys.path` is not enough: MkDocs restores it when it has loaded the hooks, and finders of
    editable installs come before it.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of tvm_ipc; None for others."""
        if name.partition(".")[0] != "tvm_ipc":
            return None
        return PathFinder.find_spec(name, [str(ROOT)] if path is None else path, target)


@cache
def import_checkout() -> None:
    """Import tvm_ipc of the checkout; its modules then come from there too."""
    sys.meta_path.insert(0, _Checkout)  # type: ignore[arg-type]
    import tvm_ipc

    if Path(tvm_ipc.__file__).parents[1] != ROOT:
        raise ImportError(
            f"docs/site/checkout.py: tvm_ipc was imported from {tvm_ipc.__file__} before; "
            f"expected the one in {ROOT}; run mkdocs in a process of its own"
        )
    # The metadata that it reads otherwise is that of an installed package.
    tvm_ipc.__version__ = declared("version")


def public(module: str) -> list[str]:
    """Return the names in `__all__` of a module, which is not imported."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    raise ValueError(f"{file} has no __all__")
