# SPDX-License-Identifier: Apache-2.0
"""What `parallelize` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import tvm

from tvm_ipc import arguments
from tvm_ipc.comm import Mesh
from tvm_ipc.parallel.cut import Cut
from tvm_ipc.transform.report import Decision


@dataclass(frozen=True)
class Parallelized:
    """A model for the ranks of a mesh.

    Attributes
    ----------
    module : what one rank runs.
    placed : the same for all ranks, with places; `LowerPlacements` makes `module` of it, before
        that is divided into stages of a pipeline.
    mesh : of the ranks.
    cut : how each parameter is divided, by the names that plans know.
    decisions : which collectives were inserted, and what for.
    notes : what else there is to know of the plan: how it was found, and what is not divided.
    """

    module: tvm.IRModule
    placed: tvm.IRModule
    mesh: Mesh
    cut: Mapping[str, Cut]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """How many bytes of parameters a rank has, without those of symbolic extents.

        Of a pipeline it is a rank of the stage that has most.
        """
        return max(map(self.bytes_of_rank, self.mesh.ranks))

    def bytes_of_rank(self, rank: int) -> int:
        """Return how many bytes of parameters one rank has, without those of symbolic extents."""
        known = f"a rank of {self.mesh}"
        if arguments.integer("bytes_of_rank: rank", rank, known) not in self.mesh.ranks:
            raise arguments.wrong_value("bytes_of_rank: rank", known, rank)
        has = (one for one in self.cut.values() if one.ranks is None or rank in one.ranks)
        return sum(one.bytes_per_rank or 0 for one in has)

    @property
    def collectives(self) -> Mapping[str, int]:
        """How many collectives of each kind the functions have, `take_part` left out."""
        kinds = Counter(one.subject.split(" of ")[0] for one in self.decisions if _moves(one))
        return dict(kinds)

    def __str__(self) -> str:
        whole = sum(one.bytes or 0 for one in self.cut.values())
        each = [self.bytes_of_rank(rank) for rank in self.mesh.ranks]
        least = "" if min(each) == max(each) else f"{min(each)} to "
        lines = [f"on {self.mesh}, {least}{max(each)} bytes of parameters on each rank, of {whole}"]
        lines += [f"  {one}" for one in self.notes]
        for one in self.cut.values():
            known = one.bytes_per_rank
            lines.append(f"  {one}" if known is None else f"  {one}, {known} bytes on each rank")
        lines += [f"  {one.subject}: {one.reason}" for one in self.decisions if _moves(one)]
        return "\n".join(lines)


def _moves(decision: Decision) -> bool:
    return " along " in decision.subject and not decision.subject.startswith("take_part")
