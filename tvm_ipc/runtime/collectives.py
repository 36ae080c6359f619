# SPDX-License-Identifier: Apache-2.0
"""Teams of a session's workers, and collectives on the values that the workers hold."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Final

import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.packed_functions import (
    KINDS,
    AllReduceStrategy,
    CollectiveFlag,
    Kind,
    ReduceKind,
)
from tvm_ipc.runtime.references import DRef, RemoteTensor
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.session_argument_conversion import check_reference
from tvm_ipc.runtime.team import Team

_native_team = tvm_ffi.get_global_func("tvm_ipc.session.team")
_REDUCTIONS: Final = {kind.name.lower(): int(kind) for kind in ReduceKind}
_DEFAULT: Final = int(AllReduceStrategy.DEFAULT)
_NO_FLAGS: Final = int(CollectiveFlag.NONE)
_MAX_COUNT: Final = (1 << 63) - 1
_MAX_COPY: Final = (1 << 31) - 1

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
        scope: Scope,
        source: Any,
        target: Any,
        *,
        op: object = "sum",
        root: object = 0,
        parts: object = None,
    ) -> DRef:
        """Run a collective on references with an exit barrier, and return the target.

        Parameters
        ----------
        name : the name of its kind. Errors have the names of the session method's parameters.
        scope : the workers that take part.
        source, target : the references. A target of None is a new tensor, unless only the root has
            the source, so that other workers do not know its shape.
        op, root, parts : the arguments of the session method. Kinds that lack one ignore it.
        """
        kind = KINDS[name]
        where = kind.method
        reduction = reduction_kind(f"{where}: op", op) if kind.reduces else None
        index = self.rank(f"{where}: root", root) if kind.rooted else None
        counts = flatten_parts(f"{where}: parts", parts)
        source_name, target_name = kind.method_operands
        check_reference(f"{where}: {source_name}", source)
        if target is None and not kind.source_on_root:
            target = self._allocate(kind, scope, source, index, counts)
        check_reference(f"{where}: {target_name}", target)
        values = {
            "send": source,
            "kind": reduction,
            "root": index,
            "parts": tvm_ffi.Shape(counts) if kind.packed_parameters else None,
            "team": scope.id if isinstance(scope, Team) else int(scope),
            "strategy": _DEFAULT,
            "flags": _NO_FLAGS,
            "recv": target,
        }
        args = [values[parameter.name] for parameter in kind.function.parameters]
        self._call_in(scope, kind.function.name, *args)
        result: DRef = target
        return result

    def _call_in(self, scope: Scope, name: str, *args: Any) -> DRef:
        """Call a function on the workers of a scope; the arguments need no conversion."""
        function = self._dispatcher.function(name)
        if not isinstance(scope, Team):
            return self._dispatcher.call(function, *args)
        in_team = self._dispatcher.function("tvm_ipc.worker.call_in_team")
        return self._dispatcher.call(in_team, function, scope.id, *args)

    def _allocate(
        self, kind: Kind, scope: Scope, source: Any, root: int | None, parts: Sequence[int]
    ) -> Any:
        """Return a new tensor for the result of a collective."""
        receiver = -1 if root is None else root
        team = scope.id if isinstance(scope, Team) else int(scope)
        args = kind.method, source, tvm_ffi.Shape(parts), receiver, team
        target = self._call_in(scope, "tvm_ipc.worker.empty_result", *args)
        known = source._known_tensor() if isinstance(source, DRef) else None
        if known is not None and not parts:
            target._tensor = self._result_tensor(kind, known, scope, root)
        return target

    def _result_tensor(
        self, kind: Kind, source: RemoteTensor, scope: Scope, root: int | None
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
        return RemoteTensor(kind.result_shape(source.shape, members), source.dtype, workers)

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
