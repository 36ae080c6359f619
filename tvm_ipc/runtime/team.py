# SPDX-License-Identifier: Apache-2.0
"""`Team`: some workers of a session, in an order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Team:
    """Some workers of a session, in an order; returned by `session.team`.

    A team is a value: equal ranks and copies are the same team. It lives as long as its session.

    Attributes
    ----------
    ranks : its workers. The first one is the root of broadcast, scatter and gather.
    copy : tells teams of the same ranks apart.
    id : the number that packed functions take for the team.

    Examples
    --------
    >>> import numpy as np
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(num_workers=3) as session:
    ...     team = session.team([2, 0])
    ...     x = session.put(np.ones(2, "float32"))
    ...     y = session.put(np.zeros(2, "float32"))
    ...     y = session.allreduce(x, y, team=team)
    ...     [session.get(y, rank).tolist() for rank in range(3)]
    [[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]
    """

    ranks: tuple[int, ...]
    copy: int
    id: int
    _session: str = field(repr=False)
