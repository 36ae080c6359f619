# SPDX-License-Identifier: Apache-2.0
"""Files that other nodes of a session do not have: worker 0 reads them, and sends each its part.

A node has a file if what is at the same path there is the same file as here: its inode, its size
and when it was changed, as nodes see a file system that they have in common. A copy is sent anew,
for equal names and sizes do not say that it has the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm_ipc.parts import Runs
from tvm_ipc.runtime.session import Session
from tvm_ipc.weights import worker
from tvm_ipc.weights.stored import File


class Elsewhere:
    """Which ranks cannot read which files.

    Parameters
    ----------
    session : whose workers have imported `worker`.
    files : that are to be read.
    """

    def __init__(self, session: Session, files: Iterable[File]) -> None:
        self._session = session
        others = [node["ranks"] for node in session.nodes[1:]]
        found = list(dict.fromkeys(files)) if others else []
        self._without: dict[File, set[int]] = {file: set() for file in found}
        if not found:
            return
        has = session.get_global_func(worker.HAS)
        told = has(json.dumps([[file.path, file.state] for file in found]))
        for ranks in others:
            there = json.loads(told.debug_get_from_remote(ranks[0]))
            for file, is_there in zip(found, there, strict=True):
                if not is_there:
                    self._without[file].update(ranks)

    def __bool__(self) -> bool:
        """Whether anything is to be sent."""
        return any(self._without.values())

    def sends(
        self, files: Iterable[File], different: Sequence[Runs], of_rank: Mapping[int, Runs]
    ) -> list[dict[str, Any]]:
        """Return who gets a part from worker 0: its number among the parts, the team, its ranks.

        Parameters
        ----------
        files : that the weight lies in.
        different : its parts.
        of_rank : which part a rank has.
        """
        without: set[int] = set().union(*(self._without.get(file, ()) for file in files))
        found = []
        for number, runs in enumerate(different):
            ranks = sorted(rank for rank in without if of_rank.get(rank) == runs)
            if ranks:
                team = self._session.team([0, *ranks]).id
                found.append({"part": number, "team": team, "ranks": ranks})
        return found
