# SPDX-License-Identifier: Apache-2.0
"""Random collectives."""

from __future__ import annotations

import numpy as np

from tests.collective_results import results_of
from tests.end_to_end.programs import Dim, Value, in_teams, local
from tests.end_to_end.random_writer import Scope, Writer


class Collectives(Writer):
    """What workers compute together."""

    def _team(self) -> tuple[bool, list[range]]:
        """Choose who takes part: all workers, or each group for itself."""
        in_group = self.rng.random() < 0.5
        size = self.world // self.groups if in_group else self.world
        return in_group, [range(first, first + size) for first in range(0, self.world, size)]

    def _allreduce(self, scope: Scope) -> Value | None:
        x = self._any(scope)
        kind = self.rng.choice(("sum",) * 5 + ("max", "min", "prod", "avg"))
        if kind == "avg" and x.dtype.startswith("int"):
            return None
        in_group, parts = self._team()
        ranks = len(parts[0])
        bound = {"sum": x.bound * ranks, "prod": x.bound**ranks}.get(kind, x.bound)
        result = self._emit(
            scope,
            f'R.ccl.allreduce({x.name}, "{kind}", {in_group})',
            in_teams(x.name, parts, lambda arrays: results_of("allreduce", arrays, reduction=kind)),
            x,
            bound=min(bound, 16) if kind == "avg" else bound,
            same=len(parts) == 1 or x.same,
            exact=kind != "avg",
        )
        if kind == "avg" and result is not None and self.rng.random() < 0.8:
            text = f'R.floor(R.add({result.name}, R.const(0.25, "{x.dtype}")))'
            quarter = np.asarray(0.25, x.dtype)
            run = local(result.name)(lambda a: np.floor(a + quarter))
            result = self._emit(scope, text, run, result, exact=True)
        return result

    def _allgather(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: bool(v.shape))
        if x is None:
            return None
        in_group, parts = self._team()
        ranks = len(parts[0])
        return self._emit(
            scope,
            f"R.ccl.allgather({x.name}, {ranks}, {in_group})",
            in_teams(x.name, parts, lambda arrays: results_of("allgather", arrays)),
            x,
            shape=(x.shape[0] * Dim(ranks), *x.shape[1:]),
            same=len(parts) == 1 or x.same,
        )

    def _broadcast(self, scope: Scope) -> Value | None:
        x = self._any(scope)
        return self._emit(
            scope,
            f"R.ccl.broadcast_from_worker0({x.name})",
            lambda env: [env.arrays[x.name][0]] * env.world,
            x,
            same=True,
        )

    def _scatter(self, scope: Scope) -> Value | None:
        x = self._pick(scope, lambda v: self._even_axis(v, self.world) is not None)
        if x is None:
            return None
        axis = self._even_axis(x, self.world)
        assert axis is not None
        shape = tuple(
            Dim(d.factor // self.world, d.symbols) if i == axis else d
            for i, d in enumerate(x.shape)
        )
        return self._emit(
            scope,
            f"R.ccl.scatter_from_worker0({x.name}, {self.world}, {axis})",
            lambda env: np.split(env.arrays[x.name][0], env.world, axis),
            x,
            shape=shape,
            same=False,
        )
