# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of `tvm_ipc.transform`."""

from __future__ import annotations

import doctest
from collections.abc import Iterator

import pytest

import tvm_ipc.transform


def examples() -> Iterator[doctest.DocTest]:
    """Yield the docstrings of public names that have examples."""
    finder = doctest.DocTestFinder()
    for name in tvm_ipc.transform.__all__:
        found = finder.find(getattr(tvm_ipc.transform, name), name, module=False, globs={})
        yield from (test for test in found if test.examples)


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name)
def test_an_example_gives_what_it_shows(test: doctest.DocTest) -> None:
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_examples_are_found() -> None:
    names = {test.name for test in examples()}
    assert names >= {"LegalizeOps", "StaticPlanBlockMemory", "ScopeRegistry.demand_scope"}
