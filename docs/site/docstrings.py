# SPDX-License-Identifier: Apache-2.0
"""Read our docstrings, in which `name : text` describes a parameter; its type is in the code.

A pass is a class whose options are its parameters (`transform/module_pass.py`); it gets the
constructor that `module_pass` makes of them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

_SECTIONS = re.compile(
    r"(?=^(?:Parameters|Attributes|Raises|Returns|Examples)\n-+\n)", re.MULTILINE
)
_ITEM = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : (?P<text>.*))?")
#: A line that ends in a colon, or two, and the block that is indented below it.
_SKETCH = re.compile(r"^(\S.*[^:]):{1,2}\n+( {4}.*\n(?: {4}.*\n|\n)*)", re.MULTILINE)


def _is_type(text: str) -> bool:
    """Return whether a text can be an annotation, such as `int` or `list[str] | None`."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    parts = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BitOr, ast.Tuple, ast.List)
    others = (ast.Expression, ast.Constant, ast.expr_context)
    return all(isinstance(node, parts + others) for node in ast.walk(tree))


def _items(section: str) -> str:
    """Give each name an item of its own, whose type is that of the parameter of this name.

    The parser gives all names of a group the type and the default of the first one.
    """
    title, line, *rest = section.splitlines()
    items: list[list[str]] = []
    for text in rest:
        if text and not text.startswith(" "):
            items.append([text])
        elif items:
            items[-1].append(text)
    lines = [title, line]
    for head, *below in items:
        found = _ITEM.fullmatch(head)
        if found is None:
            lines += [head, *below]
            continue
        text = found["text"] or ""
        # NumPy's own form has the type there, and the text below.
        of_type = bool("".join(below).strip()) and _is_type(text)
        for name in found["names"].split(", "):
            if of_type:
                lines += [f"{name} : {text}", *below]
            else:
                lines += [name, *([f"    {text}"] if text else []), *below]
    return "\n".join([*lines, ""])


def _sketches(text: str) -> str:
    """Make what is indented below `Before:` and the like a block of code."""

    def block(found: re.Match[str]) -> str:
        code = textwrap.dedent(found[2]).strip("\n")
        return f"{found[1]}:\n\n```python\n{code}\n```\n\n"

    return _SKETCH.sub(block, text + "\n").rstrip("\n")


def to_numpy(text: str) -> str:
    """Return a docstring as the parser of NumPy's takes it."""
    head, *sections = _SECTIONS.split(text)
    head = _sketches(head)
    if head and sections:
        head += "\n\n"
    named = ("Parameters\n", "Attributes\n")
    return head + "".join(_items(one) if one.startswith(named) else one for one in sections)


class Docstrings(griffe.Extension):
    """Makes of our docstrings what the parser of NumPy's takes."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **_: Any) -> None:
        """Change one docstring."""
        del loader
        if obj.docstring is not None:
            obj.docstring.value = to_numpy(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, loader: Any, **_: Any) -> None:
        """Give a pass its constructor."""
        del loader
        if not any(str(one.value).endswith("module_pass") for one in cls.decorators):
            return
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for name, one in cls.attributes.items():
            if one.annotation is None:
                continue
            value = "" if one.value is None else str(one.value)
            made = re.match(r"(?:option|field)\(", value)
            found = re.search(r"default=([^,)]+)", value) if made else None
            default = found.group(1) if found else None if made else value or None
            keyword = "kw_only=True" in value
            kind = griffe.ParameterKind
            parameters.append(
                griffe.Parameter(
                    name,
                    annotation=one.annotation,
                    kind=kind.keyword_only if keyword else kind.positional_or_keyword,
                    default=default,
                )
            )
        parameters.sort(key=lambda one: one.kind is griffe.ParameterKind.keyword_only)
        built = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls)
        cls.set_member("__init__", built)
