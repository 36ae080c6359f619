# SPDX-License-Identifier: Apache-2.0
"""Meshes: ranks in a grid whose axes have names.

    mesh = Mesh({"pp": 2, "tp": 4})     # ranks 0 to 7; those of a "tp" team are consecutive
    mesh.teams("tp")                    # ((0, 1, 2, 3), (4, 5, 6, 7))
    mesh.teams("pp")                    # ((0, 4), (1, 5), (2, 6), (3, 7))

Along each axis a rank is in one team. All ranks run the same program, so a collective along an axis
lists all the teams into which the axis splits the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tvm_ipc import arguments
from tvm_ipc.packed_functions import MAX_WORKERS

#: The teams into which ranks are split, all of equal size; the order of ranks in a team matters.
Teams: TypeAlias = tuple[tuple[int, ...], ...]


class Mesh:
    """A grid of ranks with named axes, in row-major order: the last axis varies fastest.

    Parameters
    ----------
    axes : the extent of each axis by its name.
    ranks : the ranks in row-major order; 0, 1, 2 and so on if None.

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> mesh = comm.Mesh({"pp": 2, "tp": 4})
    >>> mesh.teams("tp")
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> mesh.teams("pp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        arguments.instance("Mesh: axes", axes, Mapping, "a mapping from names to extents")
        if not axes:
            raise arguments.wrong_value("Mesh: axes", "at least one axis", axes)
        self.axes: dict[str, int] = {
            arguments.word("Mesh: the name of an axis", name, "a name"): arguments.integer(
                f"Mesh: axis {name!r}",
                extent,
                f"a number of ranks, 1 to {MAX_WORKERS}",
                1,
                MAX_WORKERS,
            )
            for name, extent in axes.items()
        }
        shape = tuple(self.axes.values())
        size = int(np.prod(shape))
        if size > MAX_WORKERS:
            raise ValueError(f"Mesh: {axes} are {size} ranks; a session has at most {MAX_WORKERS}")
        wanted = f"{size} different ranks, 0 to {MAX_WORKERS - 1}"
        in_order = range(size) if ranks is None else ranks
        numbers = arguments.integers("Mesh: ranks", in_order, wanted, 0, MAX_WORKERS - 1)
        if len(numbers) != size or len(set(numbers)) != size:
            raise arguments.wrong_value("Mesh: ranks", wanted, ranks)
        self._ranks = np.array(numbers).reshape(shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks in row-major order."""
        return tuple(map(int, self._ranks.ravel()))

    def extent(self, *names: str) -> int:
        """Return the number of ranks along some axes together.

        Parameters
        ----------
        *names : the axes; without any the result is 1.

        Returns
        -------
        int
            The product of their extents.

        Examples
        --------
        >>> from tvm_ipc import comm
        >>> comm.Mesh({"dp": 2, "pp": 2, "tp": 4}).extent("dp", "tp")
        8
        """
        return int(np.prod([self.axes[self._axis(name)] for name in names], dtype=int))

    def teams(self, *names: str) -> Teams:
        """Return the teams of ranks whose coordinates differ only along some axes.

        In a team, the coordinate along the axis that is named last varies fastest.

        Parameters
        ----------
        *names : the axes, at least one.

        Returns
        -------
        tuple of tuples of int
            The teams, which together have every rank of the mesh once.

        Raises
        ------
        ValueError
            An axis does not exist, or is named twice.

        Examples
        --------
        >>> from tvm_ipc import comm
        >>> comm.Mesh({"dp": 2, "tp": 2}).teams("tp", "dp")
        ((0, 2, 1, 3),)
        """
        if not names:
            raise ValueError(f"Mesh.teams: no axis is named; there are {self._axis_names()}")
        order = list(self.axes)
        team_axes = [order.index(self._axis(name)) for name in names]
        if len(set(team_axes)) != len(team_axes):
            raise ValueError(f"Mesh.teams: {', '.join(names)} names an axis twice")
        outer_axes = [axis for axis in range(len(order)) if axis not in team_axes]
        rows = self._ranks.transpose(*outer_axes, *team_axes).reshape(-1, self.extent(*names))
        return tuple(tuple(map(int, row)) for row in rows)

    def _axis(self, name: str) -> str:
        if arguments.text("Mesh: an axis", name) not in self.axes:
            raise ValueError(f"Mesh: there is no axis {name!r}; there are {self._axis_names()}")
        return name

    def _axis_names(self) -> str:
        return ", ".join(map(repr, self.axes))

    def __eq__(self, other: object) -> bool:
        """Compare names, extents and order of the axes, and the ranks."""
        if not isinstance(other, Mesh):
            return NotImplemented
        return list(self.axes.items()) == list(other.axes.items()) and self.ranks == other.ranks

    def __hash__(self) -> int:
        """Hash what equality compares."""
        return hash((tuple(self.axes.items()), self.ranks))

    def __repr__(self) -> str:
        """Return the call that creates the mesh; `ranks` is omitted if it is 0, 1, 2 and so on."""
        ranks = "" if self.ranks == tuple(range(len(self.ranks))) else f", ranks={self.ranks}"
        return f"Mesh({self.axes}{ranks})"
