# SPDX-License-Identifier: Apache-2.0
"""What a folder calls the weights of a model, found once and kept beside what is compiled of it.

`names` asks transformers, which takes seconds to import; the answer depends on the model and the
names in the folder alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tvm_ipc.hf.compiling import Compiled
from tvm_ipc.hf.folder import Folder
from tvm_ipc.runtime.apart import apart
from tvm_ipc.weights import concat, stack
from tvm_ipc.weights.joined import Joined, Name


def called(folder: Folder, stored: Iterable[str], made: Compiled) -> dict[str, Name]:
    """Return what the weights of a model are called in its folder, by their names in the model.

    Parameters
    ----------
    folder : of the model.
    stored : the names in its files.
    made : what is compiled of it.
    """
    names = sorted(stored)
    place = made.library.parent / _file(names)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return _read(json.loads(place.read_text()))
    given = {
        "path": str(folder.path),
        "config": folder.config,
        "dtype": made.dtype,
        "stored": names,
        "weights": list(made.cut),
    }
    found = apart("tvm_ipc.hf.making:names", given, purpose="to find the weights of a model")
    keep(place.parent, names, found)
    return _read(found)


def _file(stored: Sequence[str]) -> str:
    return f"names-{hashlib.sha256(chr(0).join(stored).encode()).hexdigest()[:40]}.json"


def _read(kept: dict[str, Any]) -> dict[str, Name]:
    return {name: _name_of(one) for name, one in kept.items()}


def keep(folder: Path, stored: Sequence[str], found: dict[str, Any]) -> None:
    """Write what weights are called, whole or not at all; it is no matter if that fails."""
    place = folder / _file(stored)
    with contextlib.suppress(OSError):
        file, written = tempfile.mkstemp(prefix=".names-", dir=folder)
        with os.fdopen(file, "w") as out:
            json.dump(found, out)
        Path(written).replace(place)


def json_of(name: Name) -> Any:
    """Return a name as JSON says it."""
    if isinstance(name, str):
        return name
    how = "stack" if name.new else "concat"
    return {how: [json_of(part) for part in name.parts], "axis": name.axis}


def _name_of(kept: Any) -> Name:
    if isinstance(kept, str):
        return kept
    how, join = ("stack", stack) if "stack" in kept else ("concat", concat)
    joined: Joined = join([_name_of(part) for part in kept[how]], kept["axis"])
    return joined
