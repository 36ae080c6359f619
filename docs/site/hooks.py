# SPDX-License-Identifier: Apache-2.0
"""What pages say that the code knows: `<!-- made of: NAME -->` becomes what NAME below returns.

Nothing here imports TVM, so the site can be built where it is not installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

#: Parsers of commands that read their own options, and what follows `tvm-ipc`.
PARSERS = {
    "tvm-ipc": "tvm_ipc.tools.command_line:_parser",
    "tvm-ipc doctor": "tvm_ipc.tools.command_line:_doctor_parser",
    "tvm-ipc demo": "tvm_ipc.tools.demo.options:_parser",
    "tvm-ipc explain": "tvm_ipc.tools.explain.command:_parser",
    "tvm-ipc bench": "tvm_ipc.tools.bench.options:_parser",
    "tvm-ipc bench overlap": "tvm_ipc.tools.bench.options:_overlap_parser",
    "tvm-ipc run": "tvm_ipc.tools.run.options:_parser",
    "tvm-ipc node": "tvm_ipc.tools.command_line:_node_parser",
}
#: Modules that export passes: the core's, and the wings'.
PASSES = ("tvm_ipc.transform", "tvm_ipc.spmd", "tvm_ipc.cpu", "tvm_ipc.gpu")


def public(module: str) -> list[str]:
    """Return the names in `__all__` of a module, which is not imported."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    raise ValueError(f"{file} has no __all__")


def _described(module: str, names: Iterable[str], *, members: bool = True) -> str:
    options = "" if members else "\n    options:\n      members: false"
    return "\n\n".join(f"::: {module}.{name}{options}" for name in names)


def api() -> str:
    """Return the names of the package itself; its modules have pages or sections of their own."""
    modules = {
        "comm",
        "cpu",
        "errors",
        "gpu",
        "models",
        "packed_functions",
        "spmd",
        "transform",
        "__version__",
    }
    return _described("tvm_ipc", [one for one in public("tvm_ipc") if one not in modules])


def models() -> str:
    """Return the names of tvm_ipc.models."""
    return _described("tvm_ipc.models", sorted({*public("tvm_ipc.models")} - {*public("tvm_ipc")}))


def comm() -> str:
    """Return the names of tvm_ipc.comm."""
    return _described("tvm_ipc.comm", public("tvm_ipc.comm"))


def passes() -> str:
    """Return the passes of the core and of the wings."""
    parts = []
    for module in PASSES:
        names = [one for one in public(module) if one in _passes()]
        parts.append(f"**`{module}`**\n\n" + _described(module, names, members=False))
    return "\n\n".join(parts)


def beside_passes() -> str:
    """Return the other names of the modules that have passes."""
    parts = []
    for module in PASSES:
        names = [one for one in public(module) if one not in _passes() | {*public("tvm_ipc")}]
        if names:
            parts.append(f"**`{module}`**\n\n" + _described(module, names))
    return "\n\n".join(parts)


@cache
def _passes() -> frozenset[str]:
    folders = [ROOT / module.replace(".", "/") for module in PASSES]
    texts = [file.read_text() for folder in folders for file in folder.glob("*.py")]
    return frozenset(re.findall(r"^@module_pass\nclass (\w+)", "\n".join(texts), re.MULTILINE))


def errors() -> str:
    """Return all exceptions."""
    text = (ROOT / "tvm_ipc" / "errors.py").read_text()
    names = [one.name for one in ast.parse(text).body if isinstance(one, ast.ClassDef)]
    return _described("tvm_ipc.errors", [one for one in names if not one.startswith("_")])


def commands() -> str:
    """Return what `--help` of each command prints."""
    os.environ["COLUMNS"] = "76"  # what a page has room for
    parts = []
    for name, place in PARSERS.items():
        module, _, function = place.partition(":")
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        parts.append(f"## `{name}`\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts)


def functions_of_programs() -> str:
    """Return the packed functions that programs call."""
    from tvm_ipc import packed_functions

    return _functions(packed_functions.PROGRAM_FUNCTIONS)


def functions_of_sessions() -> str:
    """Return all others."""
    from tvm_ipc import packed_functions

    return _functions(packed_functions.SESSION_FUNCTIONS)


def _functions(functions: Iterable[Any]) -> str:
    return "\n\n".join(_function(one) for one in functions)


def _function(function: Any) -> str:
    # What the contract says of a function, without what it does not say.
    summary = function.summary[0].upper() + function.summary[1:] + "."
    lines = [
        f"### `{function.name}` {{ #{function.name} }}",
        f"```text\n{_signature(function.signature)}\n```",
        summary,
    ]
    effects = [
        ("reads", function.reads),
        ("writes", function.writes),
        ("peers read", function.peers_read),
        ("the same on all ranks", function.replicated),
        ("its result is the memory of", function.result_of),
        ("exposes", function.exposes),
        ("releases", function.releases),
        ("starts, in a thread of the rank,", function.starts),
    ]
    items = [
        f"- {what} {_quoted([names] if isinstance(names, str) else names)}"
        for what, names in effects
        if names
    ]
    items += [
        f"- `{name}` is in {'any memory scope' if scope == '*' else f'`{scope}`'}"
        for name, scope in function.scopes.items()
    ]
    if function.sync.name != "NONE":
        items.append(f"- {function.sync.value}")
    if function.general_form:
        items.append(
            f"- does what [`{function.general_form}`](#{function.general_form}) does, which takes "
            "flags"
        )
    return "\n\n".join([*lines, "\n".join(items)])


def _signature(text: str) -> str:
    if len(text) < 72:
        return text
    inside, _, result = text.partition(" -> ")
    lines = ",\n    ".join(inside.strip("()").split(", "))
    return f"(\n    {lines}\n)" + (f" -> {result}" if result else "")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join("its result" if one == "return" else f"`{one}`" for one in names)


def changelog() -> str:
    """Return what has changed, without the title; links to pages are those of the site."""
    text = (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]
    return re.sub(r"\]\(docs/", "](", text)


def examples() -> str:
    """Return the programs of examples/, each with what it says of itself."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        title = path.stem.replace("_", " ").capitalize()
        said = str(ast.get_docstring(ast.parse(text))).replace("\n\n", "\n").replace("\n", " ")
        program = text.split('"""', 2)[2].strip("\n")
        parts.append(f'## {title}\n\n{said}\n\n```python title="{path.name}"\n{program}\n```')
    return "\n\n".join(parts)


MADE: dict[str, Callable[[], str]] = {
    one.__name__: one
    for one in (
        api,
        models,
        comm,
        passes,
        beside_passes,
        errors,
        commands,
        functions_of_programs,
        functions_of_sessions,
        changelog,
        examples,
    )
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what the code knows."""
    return re.sub(r"^<!-- made of: (\w+) -->$", lambda m: MADE[m.group(1)](), markdown, flags=re.M)


def _breakable(table: str) -> str:
    if len(re.findall(r"<th\b", table)) < 3:
        return table

    def broken(code: re.Match[str]) -> str:
        at = "<wbr>" if len(code.group(1)) >= 24 else '<wbr class="narrow">'
        return re.sub(r"(?<=[._])(?=\w)", at, code.group(0))

    return re.sub(r"<code>([^<\s]{12,})</code>", broken, table)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables of three or more columns break behind a dot or an underscore.

    Shorter ones may on narrow screens alone (`pictures/site.css`).
    """
    return re.sub(r"<table>.*?</table>", lambda m: _breakable(m.group(0)), html, flags=re.S)
