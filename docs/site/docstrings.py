# SPDX-License-Identifier: Apache-2.0
"""Reads our docstrings, in which `name : text` says what a parameter is; its type is in the code.

A pass is a class whose options are its parameters (`transform/module_pass.py`); it gets the
constructor that `module_pass` makes of them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(Parameters|Attributes)\n-+\n")
_ITEM = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.*)$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Makes of our docstrings what the parser of NumPy's takes."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **_: Any) -> None:
        """Change one docstring."""
        del loader
        if obj.docstring is None:
            return
        head, *sections = re.split(
            r"(?=^(?:Parameters|Attributes|Raises|Returns)\n-+\n)",
            obj.docstring.value,
            flags=re.MULTILINE,
        )
        obj.docstring.value = head + "".join(
            _ITEM.sub(r"\1\n    \2", one) if _SECTION.match(one) else one for one in sections
        )

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
