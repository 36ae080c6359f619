# SPDX-License-Identifier: Apache-2.0
"""What `module_pass` makes of a class."""

from __future__ import annotations

import pytest
import tvm

from tvm_ipc import arguments
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option

PASSED: list[tuple[int, int | None]] = []


@module_pass
class Example(ModulePass):
    """An example."""

    least: int = option(arguments.integer, "a number, 0 or more")
    most: int | None = option(arguments.integer, "a number or None", default=None, kw_only=True)
    anything: object = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < self.least:
            raise ValueError("Example: most is less than least")

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        PASSED.append((self.least, self.most))
        return mod


def test_the_class_is_a_pass_of_its_name_that_does_what_it_says() -> None:
    PASSED.clear()
    one = Example(2, most=3)
    assert isinstance(one, tvm.transform.Pass)
    assert one.info.name == "Example"
    tvm.transform.Sequential([one, Example(1)])(tvm.IRModule())
    assert PASSED == [(2, 3), (1, None)]


def test_an_option_that_cannot_be_meant_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"^Example: least is a number, 0 or more, not '2'"):
        Example("2")
    with pytest.raises(TypeError, match=r"^Example: least is a number, 0 or more, not None"):
        Example(None)
    with pytest.raises(ValueError, match=r"^Example: most is a number or None, not -1"):
        Example(2, most=-1)
    with pytest.raises(ValueError, match="most is less than least"):
        Example(2, most=1)
    with pytest.raises(TypeError, match="positional"):
        Example(1, 2, 3)
