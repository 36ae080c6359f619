# SPDX-License-Identifier: Apache-2.0
"""A page for each pass, of its docstring, and the table that links to them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from checkout import ROOT, public

#: Modules that export passes: the core's, and the wings'.
MODULES = ("tvm_ipc.transform", "tvm_ipc.spmd", "tvm_ipc.cpu", "tvm_ipc.gpu")
#: The page with the table of the passes of the pipeline, in the order in which they run.
GUIDE = "passes.md"
#: The page with the table of all passes.
TABLE = "reference/transform.md"
_ROW = re.compile(r"^\| `(\w+)(\([^`]*\))`", re.MULTILINE)


@dataclass(frozen=True)
class Pass:
    """A pass, the module that exports it, and the file that has it."""

    name: str
    module: str
    source: Path
    summary: str

    @property
    def page(self) -> str:
        """Return its page, relative to docs/."""
        return f"reference/passes/{self.name}.md"

    def markdown(self) -> str:
        """Return the text of its page."""
        return (
            f"::: {self.module}.{self.name}\n"
            "    options:\n      heading_level: 1\n      members: false\n\n"
            f"## Where it runs\n\nImport it from `{self.module}`. {self._neighbours()}\n\n"
            f"{self._guides()}\n"
        )

    def _neighbours(self) -> str:
        order = in_pipeline()
        if self.name not in order:
            return (
                f"[`get_pipeline`](../../{GUIDE}) does not run `{self.name}`; add it to a "
                "`tvm.transform.Sequential` of your own. [All passes](../transform.md) are in a "
                "table."
            )
        at = order.index(self.name)
        before, after = order[at - 1 : at], order[at + 1 : at + 2]
        places = [
            f"{where} [`{name}`]({name}.md)"
            for where, names in (("after", before), ("before", after))
            for name in names
        ]
        return (
            f"In the order of [the pipeline](../../{GUIDE}), `{self.name}` runs "
            f"{' and '.join(places)}. [All passes](../transform.md) are in a table."
        )

    def _guides(self) -> str:
        links = [f"[{title}](../../{path})" for path, title, text in _guides() if self._is_in(text)]
        return "Pages that mention it: " + ", ".join(links) + "." if links else ""

    def _is_in(self, text: str) -> bool:
        return re.search(rf"\b{self.name}\b", text) is not None


@cache
def _guides() -> list[tuple[str, str, str]]:
    """Return path, title and text of the pages in docs/."""
    paths = sorted((ROOT / "docs").glob("*.md"))
    texts = [(path.name, path.read_text()) for path in paths if path.name != "changelog.md"]
    return [(name, text.partition("\n")[0].removeprefix("# "), text) for name, text in texts]


def in_pipeline() -> list[str]:
    """Return the names of passes as the table of the guide lists them."""
    listed = _ROW.findall((ROOT / "docs" / GUIDE).read_text())
    return [name for name, _ in listed if name in found()]


def _classes(module: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for file in sorted((ROOT / module.replace(".", "/")).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(one, ast.Name) and one.id == "module_pass" for one in node.decorator_list
            ):
                yield file, node


@cache
def found() -> dict[str, Pass]:
    """Return all passes by name; those of the pipeline are to be had from `in_pipeline`."""
    passes = {}
    for module in MODULES:
        exported = public(module)
        for file, node in _classes(module):
            if node.name in exported:
                summary = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
                passes[node.name] = Pass(node.name, module, file, summary)
    return passes


def _in_order() -> list[Pass]:
    """Return the passes as they run, then the others by name."""
    order = in_pipeline()
    others = sorted(name for name in found() if name not in order)
    return [found()[name] for name in [*order, *others]]


def table() -> str:
    """Return the table of all passes, with links to their pages."""
    rows = [
        f"| [`{one.name}`]({one.page.removeprefix('reference/')}) | {one.summary} |"
        for one in _in_order()
    ]
    return "\n".join(["| pass | what it does |", "|---|---|", *rows])


def linked(guide: str) -> str:
    """Return the guide with links from its table to the pages of the passes."""

    def link(row: re.Match[str]) -> str:
        name, arguments = row.groups()
        if name not in found():
            return row.group(0)
        return f"| [`{name}{arguments}`]({found()[name].page})"

    return _ROW.sub(link, guide)


def put_into(nav: list[Any]) -> None:
    """Put the pages below the page of the table in a navigation, which is changed."""
    for section in nav:
        for entries in section.values():
            for number, entry in enumerate(entries):
                if isinstance(entry, dict) and [*entry.values()] == [TABLE]:
                    pages = [{one.name: one.page} for one in _in_order()]
                    entries[number] = {title: [TABLE, *pages] for title in entry}
                    return
    raise ValueError(f"docs/site/passes.py: nav of mkdocs.yml has no entry for {TABLE}; add one")
