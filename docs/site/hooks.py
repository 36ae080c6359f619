# SPDX-License-Identifier: Apache-2.0
"""Replace `<!-- made of: NAME -->` in pages by the result of the function NAME below.

The pages describe the checkout, also where another tvm_ipc is installed or none is. Nothing here
imports TVM.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import passes as pass_pages
from checkout import ROOT, declared, import_checkout, public
from mkdocs.structure.files import File

#: Parsers of commands that read their own options, and what follows `tvm-ipc`.
PARSERS = {
    "tvm-ipc": "tvm_ipc.tools.command_line:_parser",
    "tvm-ipc doctor": "tvm_ipc.tools.doctor.command:parser",
    "tvm-ipc demo": "tvm_ipc.tools.demo.options:parser",
    "tvm-ipc explain": "tvm_ipc.tools.explain.options:parser",
    "tvm-ipc bench": "tvm_ipc.tools.bench.options:parser",
    "tvm-ipc bench overlap": "tvm_ipc.tools.bench.options:overlap_parser",
    "tvm-ipc run": "tvm_ipc.tools.run.options:parser",
    "tvm-ipc node": "tvm_ipc.tools.command_line:_node_parser",
}


def _described(module: str, names: Iterable[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)


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
    """Return the names of tvm_ipc.comm; the functions of collectives come from their entries."""
    import_checkout()
    from tvm_ipc.packed_functions import KINDS

    return _described("tvm_ipc.comm", [*public("tvm_ipc.comm"), *KINDS])


def passes() -> str:
    """Return the table of all passes."""
    return pass_pages.table()


def beside_passes() -> str:
    """Return the other names of the modules that have passes."""
    parts = []
    for module in pass_pages.MODULES:
        names = {*public(module)} - pass_pages.found().keys() - {*public("tvm_ipc")}
        if names:
            in_order = [one for one in public(module) if one in names]
            parts.append(f"**`{module}`**\n\n" + _described(module, in_order))
    return "\n\n".join(parts)


def errors() -> str:
    """Return all exceptions."""
    text = (ROOT / "tvm_ipc" / "errors.py").read_text()
    names = [one.name for one in ast.parse(text).body if isinstance(one, ast.ClassDef)]
    return _described("tvm_ipc.errors", [one for one in names if not one.startswith("_")])


def commands() -> str:
    """Return what `--help` of each command prints."""
    import_checkout()
    os.environ["COLUMNS"] = "98"  # what a page has room for
    parts = []
    for name, place in PARSERS.items():
        module, _, function = place.partition(":")
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        parts.append(f"## `{name}`\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts)


def functions_of_programs() -> str:
    """Return the packed functions that programs call."""
    import_checkout()
    from tvm_ipc import packed_functions

    return _functions(packed_functions.PROGRAM_FUNCTIONS)


def functions_of_sessions() -> str:
    """Return all others."""
    import_checkout()
    from tvm_ipc import packed_functions

    return _functions(packed_functions.SESSION_FUNCTIONS)


def _functions(functions: Iterable[Any]) -> str:
    return "\n\n".join(_function(one) for one in functions)


def _function(function: Any) -> str:
    # Only the effects that the function has.
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
    """Return the programs of examples/, each after its docstring."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        title = path.stem.replace("_", " ").capitalize()
        docstring = str(ast.get_docstring(ast.parse(text))).replace("\n\n", "\n").replace("\n", " ")
        program = text.split('"""', 2)[2].strip("\n")
        parts.append(f'## {title}\n\n{docstring}\n\n```python title="{path.name}"\n{program}\n```')
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


def on_config(config: Any) -> Any:
    """Write the stub of collectives, set the links to the repository, and fill `nav`."""
    import_checkout()
    from tvm_ipc.packed_functions.generate_collective_functions import write_stub

    write_stub()  # mkdocstrings reads signatures and docstrings there
    config.repo_url = declared("Source")
    if config.repo_url is None or str(urlsplit(config.repo_url).hostname).endswith(".invalid"):
        config.repo_url = config.edit_uri = None  # the second is relative to the first
    else:
        config.repo_name = urlsplit(config.repo_url).path.strip("/")
    pass_pages.put_into(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each pass."""
    for one in pass_pages.found().values():
        file = File.generated(config, one.page, content=one.markdown())
        # Beside docs/, to which these links are relative.
        file.edit_uri = f"../{one.source.relative_to(ROOT)}"
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in what the code knows."""
    if page.file.src_uri == pass_pages.GUIDE:
        markdown = pass_pages.linked(markdown)
    return re.sub(r"^<!-- made of: (\w+) -->$", lambda m: MADE[m.group(1)](), markdown, flags=re.M)


def _breakable(table: str) -> str:
    columns = len(re.findall(r"<th\b", table))

    def broken(code: re.Match[str]) -> str:
        wide = columns >= 3 and len(code.group(1)) >= 24
        at = "<wbr>" if wide else '<wbr class="narrow">'
        return re.sub(r"(?<=[._])(?=\w)|(?<=[a-z])(?=[A-Z])", at, code.group(0))

    return re.sub(r"<code>([^<\s]{12,})</code>", broken, table)


def on_page_content(html: str, **_: Any) -> str:
    """Let names in tables break behind a dot or an underscore, and before a capital.

    On wide screens only long ones do, in tables of three or more columns (`pictures/site.css`).
    """
    return re.sub(r"<table>.*?</table>", lambda m: _breakable(m.group(0)), html, flags=re.S)
