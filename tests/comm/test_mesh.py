# SPDX-License-Identifier: Apache-2.0
"""Meshes: the teams along axes, and what is no mesh."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tvm_ipc.comm import Mesh


def test_teams_along_an_axis() -> None:
    mesh = Mesh({"pp": 2, "tp": 3})
    assert mesh.ranks == (0, 1, 2, 3, 4, 5)
    assert mesh.teams("tp") == ((0, 1, 2), (3, 4, 5))
    assert mesh.teams("pp") == ((0, 3), (1, 4), (2, 5))
    assert mesh.extent("tp") == 3
    assert mesh.extent("tp", "pp") == 6


def test_teams_along_several_axes() -> None:
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    assert mesh.teams("a", "c") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.teams("c", "a") == ((0, 4, 1, 5), (2, 6, 3, 7)), "the last one changes fastest"
    assert mesh.teams("a", "b", "c") == (tuple(range(8)),)


def test_ranks_in_another_order() -> None:
    mesh = Mesh({"x": 2, "y": 2}, ranks=[3, 1, 0, 2])
    assert mesh.teams("x") == ((3, 0), (1, 2))
    assert mesh.teams("y") == ((3, 1), (0, 2))
    assert repr(mesh) == "Mesh({'x': 2, 'y': 2}, ranks=(3, 1, 0, 2))"
    assert repr(Mesh({"x": 2})) == "Mesh({'x': 2})"


def test_meshes_are_values() -> None:
    assert Mesh({"x": 2, "y": 2}) == Mesh({"x": 2, "y": 2}, ranks=[0, 1, 2, 3])
    assert hash(Mesh({"x": 2})) == hash(Mesh({"x": 2}, ranks=[0, 1]))
    assert Mesh({"x": 2, "y": 1}) != Mesh({"y": 1, "x": 2})
    assert Mesh({"x": 2}) != Mesh({"x": 2}, ranks=[1, 0])
    assert Mesh({"x": 2}) != "x"


@pytest.mark.parametrize(
    ("axes", "ranks", "error", "message"),
    [
        ({}, None, ValueError, "Mesh: axes is at least one axis, not {}"),
        ([("x", 2)], None, TypeError, "Mesh: axes is a mapping from names to extents"),
        ({"x": 0}, None, ValueError, "Mesh: axis 'x' is a number of ranks, 1 to 64, not 0"),
        ({"x": 2.0}, None, TypeError, "Mesh: axis 'x' is a number of ranks"),
        ({"a b": 2}, None, ValueError, "Mesh: the name of an axis is a name, without spaces"),
        ({"x": 9, "y": 9}, None, ValueError, "are 81 ranks; a session has at most 64"),
        ({"x": 2}, [0], ValueError, "Mesh: ranks is 2 different ranks, 0 to 63, not [0]"),
        ({"x": 2}, [1, 1], ValueError, "Mesh: ranks is 2 different ranks"),
        ({"x": 2}, [0, 64], ValueError, "Mesh: ranks is 2 different ranks"),
        ({"x": 2}, "01", TypeError, "Mesh: ranks is 2 different ranks"),
    ],
)
def test_what_is_no_mesh(axes: Any, ranks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Mesh(axes, ranks)


def test_axes_that_are_not_there() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    with pytest.raises(ValueError, match=r"there is no axis 'z'; there are 'x', 'y'"):
        mesh.teams("z")
    with pytest.raises(ValueError, match=r"no axis is named; there are 'x', 'y'"):
        mesh.teams()
    with pytest.raises(ValueError, match=r"Mesh.teams: x, x names an axis twice"):
        mesh.teams("x", "x")
    with pytest.raises(TypeError, match=r"Mesh: an axis is a name, not 0"):
        mesh.extent(0)  # type: ignore[arg-type]
