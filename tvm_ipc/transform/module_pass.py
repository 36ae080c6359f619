# SPDX-License-Identifier: Apache-2.0
"""The shape of a pass: its options, and a few lines around a pure function.

    @module_pass
    class LowerExternCalls:
        \"\"\"Lower all calls of extern declarations.\"\"\"

        place_arguments: bool = option(arguments.flag, default=True)

        def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
            return lower(mod, place_arguments=self.place_arguments)

The class becomes a dataclass, and then a pass of TVM of its name. An option is checked when the
pass is made, with a function of `arguments`; one whose default is None may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import tvm

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Say to type checkers what `module_pass` does."""
        return lambda decorator: decorator


_Options = TypeVar("_Options")


def option(
    check: Callable[..., Any], *wanted: Any, default: Any = MISSING, kw_only: bool = False
) -> Any:
    """Return a field of a pass, whose value is what `check(name, value, *wanted)` returns."""
    return field(default=default, kw_only=kw_only, metadata={"check": (check, wanted)})


@dataclass_transform(field_specifiers=(option,))
def module_pass(cls: type[_Options]) -> type[_Options]:
    """Make a pass of a class with options and a method `apply`.

    A method `__post_init__` of the class is called when each option has been checked.
    """
    together = getattr(cls, "__post_init__", None)

    def check_options(self: Any) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if "check" in one.metadata and (value is not None or one.default is not None):
                check, wanted = one.metadata["check"]
                setattr(self, one.name, check(f"{cls.__name__}: {one.name}", value, *wanted))
        if together is not None:
            together(self)

    def transform_module(
        self: Any, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        return self.apply(mod)

    cls.__post_init__ = check_options  # type: ignore[attr-defined]
    cls.transform_module = transform_module  # type: ignore[attr-defined]
    made: type[_Options] = tvm.transform.module_pass(opt_level=0, name=cls.__name__)(dataclass(cls))
    return made
