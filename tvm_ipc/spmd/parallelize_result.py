# SPDX-License-Identifier: Apache-2.0
"""The result of `parallelize`: the per-rank program and the shards of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import tvm

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.comm.placements import format_placements
from tvm_ipc.html_tables import html_table
from tvm_ipc.spmd.parameter_shard_spec import ShardSpec, format_ranks
from tvm_ipc.transform.report import Decision

#: Number of sharded parameters that `repr` names.
_MAX_NAMES: Final = 4


@dataclass(frozen=True, eq=False)
class Parallelized:
    """A model for the ranks of a mesh.

    Attributes
    ----------
    module : the program that each rank runs.
    placed : the program for all ranks, with `R.comm.place`, of which one rank needs none.
        `LowerPlacements` lowers it; the result is `module`, except that `module` may be split into
        the stages of a pipeline, and that it takes the tuples of tensors that are separate
        parameters of `placed`.
    mesh : the mesh of the ranks.
    shards : how each parameter is sharded, by the names that plans use.
    decisions : the inserted collectives, with their reasons.
    notes : further facts about the plan: how it was found, and which weights are not sharded.

    Examples
    --------
    >>> import tvm
    >>> import tvm_ipc
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class MLP:
    ...     @R.function
    ...     def main(
    ...         x: R.Tensor((5, 8), "float32"),
    ...         up: R.Tensor((8, 6), "float32"),
    ...         down: R.Tensor((6, 8), "float32"),
    ...     ):
    ...         R.func_attr({"num_input": 1})  # up and down are weights
    ...         return R.matmul(R.nn.relu(R.matmul(x, up)), down)
    ... ''')
    >>> plan = {"up": tvm_ipc.comm.Shard(1), "down": tvm_ipc.comm.Shard(0)}
    >>> parallel = tvm_ipc.parallelize(mod, plan, 2)
    >>> dict(parallel.collectives), parallel.bytes_per_rank
    ({'allreduce': 1}, 192)
    >>> print(parallel.shards["up"])
    up (8, 6) float32: S[1] along 'tp'
    """

    module: tvm.IRModule
    placed: tvm.IRModule
    mesh: Mesh
    shards: Mapping[str, ShardSpec]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """Return the bytes of parameters on a rank, without parameters of symbolic extents.

        In a pipeline it is the maximum over the stages.
        """
        return max(map(self.bytes_of_rank, self.mesh.ranks))

    def bytes_of_rank(self, rank: int) -> int:
        """Return the bytes of parameters on one rank, without parameters of symbolic extents.

        Parameters
        ----------
        rank : a rank of the mesh.

        Returns
        -------
        int
            The sum over the shards of the rank.

        Raises
        ------
        ValueError
            The mesh has no such rank.
        """
        expected = f"a rank of {self.mesh}"
        if arguments.integer("bytes_of_rank: rank", rank, expected) not in self.mesh.ranks:
            raise arguments.wrong_value("bytes_of_rank: rank", expected, rank)
        on_rank = (
            spec for spec in self.shards.values() if spec.ranks is None or rank in spec.ranks
        )
        return sum(spec.bytes_per_rank or 0 for spec in on_rank)

    @property
    def collectives(self) -> Mapping[str, int]:
        """Return the number of collectives of each kind, without `take_shard`."""
        kinds = (decision.subject.split(" of ")[0] for decision in self._collective_decisions())
        return dict(Counter(kinds))

    def _collective_decisions(self) -> list[Decision]:
        return [
            decision
            for decision in self.decisions
            if " along " in decision.subject and not decision.subject.startswith("take_shard")
        ]

    def __repr__(self) -> str:
        """Return the mesh and the sharded parameters."""
        sharded = [
            f"{name} {format_placements(self.mesh, spec.placements)}"
            for name, spec in self.shards.items()
            if any(isinstance(placement, Shard) for placement in spec.placements)
        ]
        if len(sharded) > _MAX_NAMES:
            sharded[_MAX_NAMES:] = [f"{len(sharded) - _MAX_NAMES} more"]
        collectives = [f"{count} {kind}" for kind, count in self.collectives.items()]
        return (
            f"<Parallelized: {self.mesh}; sharded: {', '.join(sharded) or 'nothing'}; "
            f"collectives: {', '.join(collectives) or 'none'}; "
            f"{self.bytes_per_rank} bytes of parameters on each rank>"
        )

    def _repr_html_(self) -> str:
        """Return the shards and the collectives as tables, for notebooks."""
        shards = [
            (
                spec.name,
                f"({', '.join(map(str, spec.shape))})",
                spec.dtype,
                format_placements(self.mesh, spec.placements),
                "" if spec.ranks is None else format_ranks(spec.ranks),
                "" if spec.bytes_per_rank is None else spec.bytes_per_rank,
            )
            for spec in self.shards.values()
        ]
        headers = ("parameter", "shape", "type", "placement", "ranks", "bytes on each rank")
        decisions = [(each.subject, each.reason) for each in self._collective_decisions()]
        notes = [(note,) for note in self.notes]
        return "".join(
            html_table(title, titles, rows)
            for title, titles, rows in (
                (f"Shards on {self.mesh}", headers, shards),
                ("Collectives", ("collective", "reason"), decisions),
                ("Notes", (), notes),
            )
            if rows
        )

    def __str__(self) -> str:
        """Return the shards, the bytes on each rank and the collectives as a table."""
        whole = sum(spec.bytes or 0 for spec in self.shards.values())
        each = [self.bytes_of_rank(rank) for rank in self.mesh.ranks]
        least = "" if min(each) == max(each) else f"{min(each)} to "
        lines = [f"on {self.mesh}, {least}{max(each)} bytes of parameters on each rank, of {whole}"]
        lines += [f"  {note}" for note in self.notes]
        for spec in self.shards.values():
            size = spec.bytes_per_rank
            lines.append(f"  {spec}" if size is None else f"  {spec}, {size} bytes on each rank")
        decisions = self._collective_decisions()
        lines += [f"  {decision.subject}: {decision.reason}" for decision in decisions]
        return "\n".join(lines)
