# SPDX-License-Identifier: Apache-2.0
"""The decorator `module_pass`, which turns a class with options into a pass of TVM.

    @module_pass
    class LowerExternCalls(ModulePass):
        \"\"\"Lower all calls of extern declarations.\"\"\"

        place_arguments: bool = option(arguments.flag, default=True)

        def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
            return lower(mod, place_arguments=self.place_arguments)

The class becomes a dataclass, and then a pass of TVM of the same name. Each option is checked with
a function of `tvm_ipc.arguments` when the pass is created. An option may be None if that is its
default.
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
        """Stand in for the decorator that tells type checkers what `module_pass` does."""
        return lambda decorator: decorator


class ModulePass:
    """The base class of classes with options that `module_pass` turns into passes."""

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module after the pass."""
        raise NotImplementedError

    if TYPE_CHECKING:

        def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
            """Return the module after the pass; TVM's decorator adds this."""
            ...


_Options = TypeVar("_Options", bound=ModulePass)


def option(
    check: Callable[..., Any], *wanted: Any, default: Any = MISSING, kw_only: bool = False
) -> Any:
    """Return a field of a pass that is set to the result of `check(name, value, *wanted)`."""
    return field(default=default, kw_only=kw_only, metadata={"check": (check, wanted)})


@dataclass_transform(field_specifiers=(option,))
def module_pass(cls: type[_Options]) -> type[_Options]:
    """Turn a class with options and a method `apply` into a pass.

    A method `__post_init__` of the class is called after all options have been checked.
    """
    post_init = getattr(cls, "__post_init__", None)

    def check_options(self: Any) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if "check" in item.metadata and (value is not None or item.default is not None):
                check, wanted = item.metadata["check"]
                setattr(self, item.name, check(f"{cls.__name__}: {item.name}", value, *wanted))
        if post_init is not None:
            post_init(self)

    def transform_module(
        self: ModulePass, mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        return self.apply(mod)

    cls.__post_init__ = check_options  # type: ignore[attr-defined]
    cls.transform_module = transform_module  # type: ignore[attr-defined]
    decorate = tvm.transform.module_pass(opt_level=0, name=cls.__name__)
    result: type[_Options] = decorate(dataclass(cls))
    return result
