# SPDX-License-Identifier: Apache-2.0
"""Lists of FFI arrays."""

from __future__ import annotations

import gc

import pytest
from tvm import relax

from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.transform.gc_paused import gc_paused


@pytest.mark.parametrize("size", [0, 1, 5])
def test_list_has_the_elements_of_the_array(size: int) -> None:
    variables = [relax.Var(f"x{k}", relax.AnyType()) for k in range(size)]
    elements = as_list(relax.Tuple(variables).fields)
    assert type(elements) is list
    assert len(elements) == size
    assert all(one.same_as(other) for one, other in zip(elements, variables, strict=True))


def test_facts_of_a_decorated_function_are_gone_when_the_search_for_garbage_resumes() -> None:
    alive: list[int] = []
    facts = 0

    class Fact:
        def __init__(self) -> None:
            nonlocal facts
            facts += 1

        def __del__(self) -> None:
            nonlocal facts
            facts -= 1

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            alive.append(facts)

    @gc_paused()
    def analyze() -> int:
        found = [Fact() for _ in range(5000)]
        return len(found)

    gc.callbacks.append(note)
    try:
        assert analyze() == 5000
    finally:
        gc.callbacks.remove(note)
    assert not any(alive)
