# SPDX-License-Identifier: Apache-2.0
"""Teams of a session's workers, and collectives on the values that the workers hold."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.packed_functions import CollectiveFlag, ReduceKind
from tvm_ipc.runtime.references import DRef, RemoteTensor
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.session_argument_conversion import check_reference
from tvm_ipc.runtime.team import Team

_native_team = tvm_ffi.get_global_func("tvm_ipc.session.team")
_REDUCTIONS: Final = {kind.name.lower(): int(kind) for kind in ReduceKind}
_MAX_COUNT: Final = (1 << 63) - 1
_MAX_COPY: Final = (1 << 31) - 1

#: Collectives whose source is on the root only, so that other workers do not know its shape.
_SOURCE_ON_ROOT: Final = frozenset({"broadcast_from_worker0", "scatter_from_worker0"})

#: The workers of a collective: each group (True), all workers (False), or a team.
Scope = bool | Team


class Collectives:
    """The teams and collectives of one session.

    Attributes
    ----------
    backend : the name of the backend that the workers use.
    num_workers : how many workers the session has.
    group_size : how many workers each group has.
    """

    def __init__(
        self, dispatcher: CommandDispatcher, num_workers: int, num_groups: int, backend: str
    ) -> None:
        self._dispatcher = dispatcher
        self.num_workers = num_workers
        self.group_size = num_workers // num_groups
        self.backend = backend

    def team(self, ranks: Sequence[int], copy: int) -> Team:
        """Return the team of some workers."""
        ranks_text = arguments.ranks_below(self.num_workers)
        example = list(range(min(self.num_workers, 2)))
        expected = f"ranks of workers, each {ranks_text} and once, such as {example}"
        members = arguments.integers("team: ranks", ranks, expected, 0, self.num_workers - 1)
        if not members or len(set(members)) != len(members):
            raise arguments.wrong_value("team: ranks", expected, ranks)
        copy = arguments.integer(
            "team: copy", copy, f"a number from 0 to {_MAX_COPY}", 0, _MAX_COPY
        )
        dispatcher = self._dispatcher
        dispatcher.thread_state()
        with dispatcher.lock:
            dispatcher.check_ready()
            team_id = int(_native_team(dispatcher.session, tvm_ffi.Shape(members), copy))
        return Team(members, copy, team_id, dispatcher.name)

    def scope(self, where: str, in_group: object, team: object) -> Scope:
        """Return the workers that the arguments `in_group` and `team` of a method select."""
        if isinstance(in_group, Team):
            raise TypeError(
                f"{where}: in_group is True or False, not a team; pass team={in_group!r}"
            )
        each_group = arguments.flag(f"{where}: in_group", in_group)
        if team is None:
            return each_group
        if not isinstance(team, Team):
            expected = "a team that session.team returned, such as session.team([0, 1]), or None"
            raise arguments.wrong_type(f"{where}: team", expected, team)
        if team._session != self._dispatcher.name:
            raise ValueError(f"{where}: team is a team of another session: {team!r}")
        if not each_group:
            raise ValueError(
                f"{where}: in_group=False selects all workers, and team selects the workers "
                f"{list(team.ranks)}; pass only one of them"
            )
        return team

    def rank(self, name: str, rank: object) -> int:
        """Return the rank of a worker."""
        expected = f"the rank of a worker, {arguments.ranks_below(self.num_workers)}"
        return arguments.integer(name, rank, expected, 0, self.num_workers - 1)

    def run(
        self,
        name: str,
        source_and_target: dict[str, Any],
        scope: Scope,
        kind: int | None = None,
        root: int | None = None,
    ) -> DRef:
        """Run a collective of Disco on references, and return the target.

        Parameters
        ----------
        name : the name of the collective.
        source_and_target : the two references by the names of their parameters. A target of None is
            a new tensor, for collectives whose result has a shape that follows from the source.
        scope : the workers that take part.
        kind : the number of the reduction, if the collective has one.
        root : the index of the only worker that gets a result; None if all do.
        """
        source, target = self._operands(name, source_and_target, scope, root=root)
        if not isinstance(scope, Team):
            function = self._dispatcher.function(f"runtime.disco.{name}")
            reduction = () if kind is None else (tvm_ffi.Shape([kind]),)
            function(source, *reduction, scope, target)
            return target
        # Disco has no teams. Its function would call the backend's, which takes a team.
        function = self._dispatcher.function(f"runtime.disco.{self.backend}.{name}")
        call = self._dispatcher.function("tvm_ipc.worker.call_in_team")
        call(function, scope.id, source, *(() if kind is None else (kind,)), scope.id, target)
        return target

    def run_own(
        self,
        name: str,
        source_and_target: dict[str, Any],
        scope: Scope,
        *options: Any,
        root: int | None = None,
        parts: Sequence[int] = (),
    ) -> DRef:
        """Run a collective that Disco does not have, with an exit barrier; see `run`.

        Parameters
        ----------
        options : the arguments of the packed function between the source and the team.
        parts : the numbers of elements of an all-to-all with unequal parts.
        """
        source, target = self._operands(name, source_and_target, scope, root, parts)
        function = self._dispatcher.function(f"tvm_ipc.{name}")
        flags = int(CollectiveFlag.NONE)
        if not isinstance(scope, Team):
            function(source, *options, int(scope), flags, target)
            return target
        call = self._dispatcher.function("tvm_ipc.worker.call_in_team")
        call(function, scope.id, source, *options, scope.id, flags, target)
        return target

    def _operands(
        self,
        name: str,
        source_and_target: dict[str, Any],
        scope: Scope,
        root: int | None = None,
        parts: Sequence[int] = (),
    ) -> tuple[DRef, DRef]:
        """Return the references of a collective; allocate a target that is None."""
        (source_name, source), (target_name, target) = source_and_target.items()
        check_reference(f"{name}: {source_name}", source)
        if target is not None or name in _SOURCE_ON_ROOT:
            check_reference(f"{name}: {target_name}", target)
            return source, target
        allocate = self._dispatcher.function("tvm_ipc.worker.empty_result")
        team = scope.id if isinstance(scope, Team) else int(scope)
        args = name, source, tvm_ffi.Shape(parts), -1 if root is None else root, team
        if isinstance(scope, Team):
            call = self._dispatcher.function("tvm_ipc.worker.call_in_team")
            target = call(allocate, scope.id, *args)
        else:
            target = allocate(*args)
        known = source._known_tensor() if isinstance(source, DRef) else None
        if known is not None and not parts:
            target._tensor = self._result_tensor(name, known, scope, root)
        return source, target

    def _result_tensor(
        self, name: str, source: RemoteTensor, scope: Scope, root: int | None
    ) -> RemoteTensor:
        """Return the shape and type of the result that `tvm_ipc.worker.empty_result` allocates."""
        members = self.num_workers if scope is False else self.group_size
        workers = "the workers"
        if root is not None:
            workers = (
                f"worker {root}" if members == self.num_workers else f"worker {root} of each group"
            )
        if isinstance(scope, Team):
            members = len(scope.ranks)
            ranks = scope.ranks if root is None else scope.ranks[root : root + 1]
            workers = f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        shape = source.shape
        if name in ("allgather", "gather_to_worker0"):
            shape = ((*shape, 1)[0] * members, *shape[1:])
        elif name == "reduce_scatter":
            shape = tuple(extent // members for extent in shape[:1]) + shape[1:]
        return RemoteTensor(shape, source.dtype, workers)

    def emulate_link(self, latency: float, bandwidth: float, jitter: float) -> None:
        """Delay received data as a link would."""
        seconds_and_bytes = (
            _amount("emulate_link: latency", latency),
            _amount("emulate_link: bandwidth", bandwidth),
            _amount("emulate_link: jitter", jitter),
        )
        self._dispatcher.function("tvm_ipc.worker.emulate_link")(*seconds_and_bytes)


def flatten_parts(name: str, parts: object) -> list[int]:
    """Return the numbers of a square matrix in row-major order; an empty list for None."""
    if parts is None:
        return []
    expected = "a row of elements for each worker, with one for each worker, or None"
    if isinstance(parts, (str, bytes, dict, set)) or not isinstance(parts, Iterable):
        raise arguments.wrong_type(name, expected, parts)
    rows = list(parts)
    try:
        counts = [arguments.integers(name, row, expected, 0, _MAX_COUNT) for row in rows]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {expected}, not {arguments.quote(parts)}") from None
    if not rows or any(len(row) != len(rows) for row in counts):
        raise arguments.wrong_value(name, expected, parts)
    return [number for row in counts for number in row]


def _amount(name: str, value: object) -> float:
    """Return a finite number that is 0 or more."""
    is_zero = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0
    return 0.0 if is_zero else arguments.above_zero(name, value, "a finite number from 0 on")


def reduction_kind(name: str, op: object) -> int:
    """Return the number of a reduction from its name."""
    return _REDUCTIONS[arguments.one_of(name, op, _REDUCTIONS)]
