# SPDX-License-Identifier: Apache-2.0
"""Collectives of sessions in which all workers of a team send and receive."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.contract import CollectiveFlag, ReduceKind
from tvm_ipc.runtime.given import check_reference
from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.teams import Team, in_team
from tvm_ipc.runtime.values import ValueSession

_KINDS: Final = {kind.name.lower(): int(kind) for kind in ReduceKind}
_MOST: Final = (1 << 63) - 1


class CollectiveSession(ValueSession):
    """Collectives among all workers, a group, or a team."""

    def allreduce(
        self, src: DRef, dst: DRef, op: str = "sum", in_group: bool | Team = True
    ) -> None:
        """Combine all workers' `src` in every worker's `dst`.

        Parameters
        ----------
        op : "sum", "prod", "min", "max" or "avg".
        """
        kind = _kind("allreduce: op", op)
        self._collective("allreduce", ("src", src), ("dst", dst), in_group, tvm_ffi.Shape([kind]))

    def reduce_scatter(
        self, src: DRef, dst: DRef, op: str = "sum", in_group: bool | Team = True
    ) -> None:
        """Give each worker's `dst` its part of what all workers' `src` are when combined.

        Worker i gets part i of as many equal parts as there are workers, with the bits that
        `allreduce` would give it. `dst` may be that part of `src`.

        Parameters
        ----------
        op : "sum", "prod", "min", "max" or "avg".
        """
        kind = _kind("reduce_scatter: op", op)
        self._own_collective("reduce_scatter", src, dst, in_group, kind)

    def allgather(self, src: DRef, dst: DRef, in_group: bool | Team = True) -> None:
        """Put all workers' `src` one after the other into every worker's `dst`."""
        self._collective("allgather", ("src", src), ("dst", dst), in_group)

    def reduce(
        self,
        src: DRef,
        dst: DRef,
        op: str = "sum",
        root: int = 0,
        in_group: bool | Team = True,
    ) -> None:
        """Combine all workers' `src` in one worker's `dst`, with the bits of `allreduce`.

        Parameters
        ----------
        op : "sum", "prod", "min", "max" or "avg".
        root : the worker's place in its group or team, from 0 on.
        """
        kind = _kind("reduce: op", op)
        self._own_collective("reduce", src, dst, in_group, kind, self._rank("reduce: root", root))

    def all_to_all(
        self,
        src: DRef,
        dst: DRef,
        in_group: bool | Team = True,
        parts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Give part j of worker i's `src` to worker j, as part i of its `dst`.

        The two share no memory.

        Parameters
        ----------
        parts : `parts[i][j]` is the number of elements that worker i gives to worker j, by their
            places in the group or team; None where all parts are equal.
        """
        given = tvm_ffi.Shape(_flat("all_to_all: parts", parts))
        self._own_collective("all_to_all", src, dst, in_group, given)

    def emulate_link(
        self, latency: float = 0.0, bandwidth: float = 0.0, jitter: float = 0.0
    ) -> None:
        """Let all that workers receive come as late as over a link, to try programs for one.

        A worker sleeps while data travel, and uses no core. All zeros is no link, as at the start.

        Parameters
        ----------
        latency : seconds from the end of a collective until its data are there.
        bandwidth : bytes a second that a worker receives; 0 is as fast as it is.
        jitter : seconds that come on top at most.
        """
        if self._device != "cpu":
            raise ValueError(
                "emulate_link: links are emulated between workers on CPUs, and those of this "
                f"session are on {self._device}"
            )
        amounts = (
            _amount("emulate_link: latency", latency),
            _amount("emulate_link: bandwidth", bandwidth),
            _amount("emulate_link: jitter", jitter),
        )
        self._get_cached_method("tvm_ipc.worker.emulate_link")(*amounts)

    def _own_collective(
        self, name: str, src: object, dst: object, in_group: bool | Team, *numbers: Any
    ) -> None:
        """Do one that Disco does not have, with an exit barrier."""
        source, target = check_reference(f"{name}: src", src), check_reference(f"{name}: dst", dst)
        team = in_team(f"{name}: in_group", in_group, self._name)
        function = self._get_cached_method(f"tvm_ipc.{name}")
        flags = int(CollectiveFlag.NONE)
        if not isinstance(team, Team):
            function(source, *numbers, int(team), flags, target)
            return
        call = self._get_cached_method("tvm_ipc.worker.call_in_team")
        call(function, team.id, source, *numbers, team.id, flags, target)


def _amount(name: str, value: object) -> float:
    """Return a finite number from 0 on."""
    is_zero = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0
    return 0.0 if is_zero else arguments.above_zero(name, value, "a finite number from 0 on")


def _kind(name: str, op: object) -> int:
    """Return the number of a reduction."""
    return _KINDS[arguments.one_of(name, op, _KINDS)]


def _flat(name: str, parts: object) -> list[int]:
    """Return the numbers of a square, row after row; none for None."""
    if parts is None:
        return []
    wanted = "a row of elements for each worker, with one for each worker, or None"
    if isinstance(parts, (str, bytes, dict, set)) or not isinstance(parts, Iterable):
        raise arguments.wrong_type(name, wanted, parts)
    rows = list(parts)
    try:
        counts = [arguments.integers(name, row, wanted, 0, _MOST) for row in rows]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {wanted}, not {arguments.show(parts)}") from None
    if not rows or any(len(row) != len(rows) for row in counts):
        raise arguments.wrong_value(name, wanted, parts)
    return [number for row in counts for number in row]
