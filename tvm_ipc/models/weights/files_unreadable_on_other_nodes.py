# SPDX-License-Identifier: Apache-2.0
"""Find the files that other nodes of a session cannot read: worker 0 reads and sends those.

A node can read a file if the file at the same path there has the same inode, size and modification
time, as it does on a shared file system. A copy of the file does not count, because equal names and
sizes do not prove equal contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm_ipc.index_spans_per_axis import Spans
from tvm_ipc.models.weights import worker
from tvm_ipc.models.weights.tensor_in_file import File
from tvm_ipc.runtime.session import Session


class RemoteFiles:
    """The ranks that cannot read each file.

    Parameters
    ----------
    session : the session; its workers have imported `worker`.
    files : the files to read.
    """

    def __init__(self, session: Session, files: Iterable[File]) -> None:
        self._session = session
        other_nodes = [node["ranks"] for node in session.nodes[1:]]
        unique = list(dict.fromkeys(files)) if other_nodes else []
        self._ranks_without: dict[File, set[int]] = {file: set() for file in unique}
        if not unique:
            return
        has_files = session.get_global_func(worker.HAS_FILES)
        replies = has_files(json.dumps([[file.path, file.state] for file in unique]))
        for ranks in other_nodes:
            readable = json.loads(replies.debug_get_from_remote(ranks[0]))
            for file, is_readable in zip(unique, readable, strict=True):
                if not is_readable:
                    self._ranks_without[file].update(ranks)

    def __bool__(self) -> bool:
        """Return whether any file must be sent."""
        return any(self._ranks_without.values())

    def sends(
        self, files: Iterable[File], shards: Sequence[Spans], of_rank: Mapping[int, Spans]
    ) -> list[dict[str, Any]]:
        """Return the broadcasts from worker 0 that a weight needs.

        Each has the index of the shard, the id of the team, and the ranks that receive the shard.

        Parameters
        ----------
        files : the files that the weight is stored in.
        shards : the distinct shards of the weight.
        of_rank : the shard of each rank.
        """
        receivers: set[int] = set().union(*(self._ranks_without.get(file, ()) for file in files))
        sends = []
        for index, spans in enumerate(shards):
            ranks = sorted(rank for rank in receivers if of_rank.get(rank) == spans)
            if ranks:
                team = self._session.team([0, *ranks]).id
                sends.append({"shard": index, "team": team, "ranks": ranks})
        return sends
