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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tvm_ipc.hf.compiling import Compiled
from tvm_ipc.hf.folder import Folder
from tvm_ipc.hf.packages import needed
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
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:40]
    place = made.library.parent / f"names-{digest}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        kept = json.loads(place.read_text())
        return {name: _name_of(one) for name, one in kept.items()}
    needed("to find the weights of a model")
    from tvm_ipc.hf import importing, reading
    from tvm_ipc.hf.names import checkpoint_names

    model = importing.build(reading.configuration(folder), made.dtype)
    found = checkpoint_names(model, names)
    found = {name: one for name, one in found.items() if name in made.cut}
    _keep(place, {name: _json_of(one) for name, one in found.items()})
    return found


def _keep(place: Path, names: dict[str, Any]) -> None:
    """Write names beside the library, whole or not at all; it is no matter if that fails."""
    with contextlib.suppress(OSError):
        file, written = tempfile.mkstemp(prefix=".names-", dir=place.parent)
        with os.fdopen(file, "w") as out:
            json.dump(names, out)
        Path(written).replace(place)


def _json_of(name: Name) -> Any:
    if isinstance(name, str):
        return name
    how = "stack" if name.new else "concat"
    return {how: [_json_of(part) for part in name.parts], "axis": name.axis}


def _name_of(kept: Any) -> Name:
    if isinstance(kept, str):
        return kept
    how, join = ("stack", stack) if "stack" in kept else ("concat", concat)
    joined: Joined = join([_name_of(part) for part in kept[how]], kept["axis"])
    return joined
