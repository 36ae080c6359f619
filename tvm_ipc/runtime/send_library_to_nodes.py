# SPDX-License-Identifier: Apache-2.0
"""Send compiled modules to nodes that do not have the file.

The digest of the contents decides, not the path: nodes need not share files, and may have different
files of the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm_ffi

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config
from tvm_ipc.tvm_private_names import LOAD_VM_MODULE

_BLOCK: Final = 1 << 20


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def distribute_module(session: Any, library: Path, first_ranks: Iterable[int]) -> str:
    """Send a library to all nodes that do not have it; return its digest.

    Parameters
    ----------
    session : a `tvm_ipc.Session`.
    library : the path of the library on the controller's node.
    first_ranks : the first rank of each node.
    """
    digest = digest_of(library)
    present = session.get_global_func("tvm_ipc.worker.has_library")(str(library), digest)
    if not all(present.debug_get_from_remote(rank) for rank in first_ranks):
        contents = session.put(np.fromfile(library, np.uint8))
        session.sync()  # on a GPU it is read without waiting for the copy
        session.get_global_func("tvm_ipc.worker.keep_library")(str(library), digest, contents)
        session.sync()  # the other workers of a node load it then
    return digest


def _received_path(digest: str) -> Path:
    """Return the path at which a worker's node keeps a library that was sent to it."""
    folder = config.folder_of_node()
    if folder is None:
        raise IPCError("this worker's node keeps no libraries: no agent has started it")
    return folder / f"{digest}.so"


def _find_library(path: str, digest: str) -> Path | None:
    """Return the path of a file with this digest, if this worker's node has one."""
    on_node = config.folder_of_node() is not None
    candidates = [Path(path), _received_path(digest)] if on_node else [Path(path)]
    for candidate in candidates:
        with contextlib.suppress(OSError):  # it does not exist, or cannot be read
            # On a node, another user's file could be replaced before it is loaded.
            if on_node and candidate.stat().st_uid not in (os.geteuid(), 0):
                continue
            if digest_of(candidate) == digest:
                return candidate
    return None


@tvm_ffi.register_global_func("tvm_ipc.worker.has_library")  # type: ignore[untyped-decorator]
def _has_library(path: str, digest: str) -> bool:
    return _find_library(path, digest) is not None


@tvm_ffi.register_global_func("tvm_ipc.worker.keep_library")  # type: ignore[untyped-decorator]
def _keep_library(path: str, digest: str, contents: Any) -> None:
    """Write a library, if this node lacks it and no other worker of the node writes it."""
    if _find_library(path, digest) is not None:
        return
    target = _received_path(digest)
    partial = target.with_suffix(".part")
    try:
        with partial.open("xb") as file:
            file.write(contents.numpy().tobytes())
    except FileExistsError:
        return
    partial.replace(target)


@tvm_ffi.register_global_func("tvm_ipc.worker.load_library")  # type: ignore[untyped-decorator]
def _load_library(path: str, digest: str, device: Any) -> Any:
    library = _find_library(path, digest)
    if library is None:
        raise IPCError(f"{path} was sent to this node, and is not there, or not as it was sent")
    return tvm_ffi.get_global_func(LOAD_VM_MODULE)(str(library), device)
