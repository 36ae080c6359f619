# SPDX-License-Identifier: Apache-2.0
"""How processes are started: what they are given, and where they find modules. Imports no TVM."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

#: Ctrl-C in a terminal is the controller's alone. A session of its own would do that too, but
#: the system shares the cores out between sessions, and a worker belongs to its program's.
OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


def import_path() -> list[str]:
    """Return the places where a process finds the modules that this one finds.

    Python passes over entries that are no texts, such as paths of pathlib, there too.
    """
    return [str(entry) for entry in sys.path if isinstance(entry, str)]


@contextlib.contextmanager
def passed(value: Any) -> Iterator[int]:
    """Make a file with what a process is given; an argument may be too short for it."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(value).encode())
        file.flush()
        yield file.fileno()
