# SPDX-License-Identifier: Apache-2.0
"""Compiled modules for nodes whose machines do not have the file: it is sent, and kept there.

What decides is the digest of the contents, not the path: nodes need no files in common, and may
have others of the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

_BLOCK: Final = 1 << 20


def digest_of(path: Path) -> str:
    """Return the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def ship(session: Any, library: Path, first_ranks: Iterable[int]) -> str:
    """Let all nodes have a library; return its digest.

    Parameters
    ----------
    session : of `tvm_ipc`.
    first_ranks : of each node, the first rank.
    """
    digest = digest_of(library)
    has = session.get_global_func("tvm_ipc.worker.has_library")(str(library), digest)
    if not all(has.debug_get_from_remote(rank) for rank in first_ranks):
        contents = session.put(np.fromfile(library, np.uint8))
        session.sync()  # on a GPU it is read without a look at what is on its way there
        session.get_global_func("tvm_ipc.worker.keep_library")(str(library), digest, contents)
        session.sync()  # who did not write it loads it then
    return digest


def _kept(digest: str) -> Path:
    """Where a worker's node keeps what was sent."""
    folder = config.folder_of_node()
    if folder is None:
        raise IPCError("this worker's node keeps no libraries: no agent has started it")
    return folder / f"{digest}.so"


def _found(path: str, digest: str) -> Path | None:
    places = [Path(path)] if config.folder_of_node() is None else [Path(path), _kept(digest)]
    for place in places:
        with contextlib.suppress(OSError):  # not there, or another user's
            if digest_of(place) == digest:
                return place
    return None


@tvm_ffi.register_global_func("tvm_ipc.worker.has_library")  # type: ignore[untyped-decorator]
def _has_library(path: str, digest: str) -> bool:
    return _found(path, digest) is not None


@tvm_ffi.register_global_func("tvm_ipc.worker.keep_library")  # type: ignore[untyped-decorator]
def _keep_library(path: str, digest: str, contents: Any) -> None:
    """Write it, if this worker's node lacks it and none of its neighbours is about to."""
    if _found(path, digest) is not None:
        return
    target = _kept(digest)
    begun = target.with_suffix(".part")
    try:
        with begun.open("xb") as file:
            file.write(contents.numpy().tobytes())
    except FileExistsError:
        return
    begun.replace(target)


@tvm_ffi.register_global_func("tvm_ipc.worker.load_library")  # type: ignore[untyped-decorator]
def _load_library(path: str, digest: str, device: Any) -> Any:
    found = _found(path, digest)
    if found is None:
        raise IPCError(f"{path} was sent to this node, and is not there, or not as it was sent")
    return tvm_ffi.get_global_func("runtime.disco.load_vm_module")(str(found), device)
