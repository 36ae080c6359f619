# SPDX-License-Identifier: Apache-2.0
"""Python's search for garbage, which a pass over a large module can do without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def collection(wanted: bool) -> Iterator[None]:
    """Let Python look for garbage, or not, until the block ends."""
    before = gc.isenabled()
    (gc.enable if wanted else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


def no_collection() -> AbstractContextManager[None]:
    """Keep Python from looking through all of TVM for garbage while a pass makes its facts.

    They are many small objects that all live until the pass is done: the search takes a third to
    a half of its time, and finds nothing.
    """
    return collection(False)
