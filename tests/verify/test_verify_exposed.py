# SPDX-License-Identifier: Apache-2.0
"""VerifyCrossRankSafety of programs that show tensors to peers."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.transform import collect_report
from tvm_ipc.transform.verify_cross_rank_safety import (
    HazardKind,
    VerifyCrossRankSafety,
    verify_cross_rank_safety,
)

#: A program; what stands for `{n}` is a line that a test puts there, or nothing.
PROGRAM = """
@I.ir_module(check_well_formed=False)
class Module:
    @T.prim_func(private=True)
    def fill(o: T.Buffer((8,), "float32")):
        for i in range(8):
            o[i] = T.float32(1)

    @T.prim_func(private=True)
    def double(x: T.Buffer((8,), "float32"), o: T.Buffer((8,), "float32")):
        for i in range(8):
            o[i] = x[i] * T.float32(2)

    @R.function(pure=False)
    def main(c: R.Tensor((), "bool")):
        cls = Module
        storage = R.memory.alloc_storage(R.shape([64]), 0, "ipc_memory", "uint8")
        x = R.memory.alloc_tensor(storage, 0, R.shape([8]), "float32")
        other = R.memory.alloc_tensor(storage, 32, R.shape([8]), "float32")
        o = R.builtin.alloc_tensor(R.shape([8]), "float32", 0, "global")
        cls.fill(x)
        s: R.Any = R.call_packed("tvm_ipc.expose", x, {team}, ty_args=R.Any)
        {shown}
        p = R.call_packed(
            "tvm_ipc.peer_view", s, 1, R.shape([8]), ty_args=R.Tensor((8,), "float32")
        )
        cls.double(p, o)
        {read}
        {hide}
        {hidden}
        return o
"""
HIDE = 'R.call_packed("tvm_ipc.release", 0, s, ty_args=R.Tuple())'


def hazards(**lines: str) -> list[tuple[HazardKind, str]]:
    given = {"team": "0", "shown": "", "read": "", "hide": HIDE, "hidden": "", **lines}
    text = PROGRAM.format(**given)
    module = tvm.script.from_source(text, {"I": I, "R": R, "T": T})
    found = verify_cross_rank_safety(module)
    # Nobody says that ranks have the same conditions.
    return [(one.kind, str(one)) for one in found if one.kind is not HazardKind.BRANCHES]


@pytest.mark.parametrize(
    "lines",
    [
        {},
        {"shown": "cls.double(x, o)"},  # peers read it, and so may its rank
        {"shown": "cls.fill(other)"},
        {"hidden": "cls.fill(x)"},
        {"hide": f"if c:\n            {HIDE}\n            u = R.tuple()\n        else:\n"
         f"            {HIDE}\n            u = R.tuple()"},
    ],
)  # fmt: skip
def test_what_is_right(lines: dict[str, str]) -> None:
    assert hazards(**lines) == []


def test_a_peer_that_is_asked_for_at_once() -> None:
    def notes(shown: str) -> list[str]:
        text = PROGRAM.format(team="0", shown=shown, read="", hide=HIDE, hidden="")
        with collect_report() as report:
            VerifyCrossRankSafety()(tvm.script.from_source(text, {"I": I, "R": R, "T": T}))
        return [one.verdict for one in report.decisions]

    assert notes("") == ["overlap lost"]
    assert notes("cls.fill(o)") == []


VIEW = 'R.call_packed("tvm_ipc.view", x, 8, R.shape([2]), ty_args=R.Tensor((2,), "float32"))'


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        (
            {"shown": "cls.fill(x)"},
            HazardKind.EXPOSED,
            "`_ = fill(x)`: x is written while it is exposed; it was exposed in "
            "`s = tvm_ipc.expose(x, T.int64(0))`; release it first, on every path",
        ),
        ({"read": "cls.fill(x)"}, HazardKind.EXPOSED, "written while it is exposed"),
        ({"read": "cls.fill(p)"}, HazardKind.EXPOSED, "written while it is exposed"),
        (
            {"shown": 'w = R.call_packed("unknown", x, ty_args=R.Any)'},
            HazardKind.EXPOSED,
            "written while it is exposed",
        ),
        (
            {"hide": ""},
            HazardKind.NEVER_RELEASED,
            "the exposed buffer s is not released; it was exposed in "
            "`s = tvm_ipc.expose(x, T.int64(0))`",
        ),
        (
            {"hide": f"if c:\n            {HIDE}\n            u = R.tuple()\n        else:\n"
             "            u = R.tuple()"},
            HazardKind.NEVER_RELEASED,
            "the exposed buffer s is not released",
        ),
        (
            {"hidden": "cls.double(p, o)"},
            HazardKind.RELEASED,
            "p is used after its release; it was released in `_ = tvm_ipc.release(T.int64(0), s)`, "
            "and its rank may have written it since; use it before the release",
        ),
        ({"hidden": HIDE}, HazardKind.RELEASED, "s is used after its release"),
        (
            {"hidden": 'q = R.call_packed("tvm_ipc.peer_view", s, 1, R.shape([8]), '
             'ty_args=R.Tensor((8,), "float32"))'},
            HazardKind.RELEASED,
            "s is used after its release",
        ),
        (
            {"read": 'w = R.call_packed("tvm_ipc.start", R.str("tvm_ipc.allgather"), p, 0, 0, o, '
             "ty_args=R.Any)",
             "hidden": 'R.call_packed("tvm_ipc.wait", w, ty_args=R.Tuple())'},
            HazardKind.BUSY,
            "p is written before the request that uses it has ended",
        ),
    ],
)  # fmt: skip
def test_what_is_a_hazard(lines: dict[str, str], kind: HazardKind, message: str) -> None:
    found = hazards(**lines)
    assert [one for one, _ in found] == [kind]
    assert message in found[0][1]


def test_a_work_that_writes_what_is_shown() -> None:
    post = (
        'w = R.call_packed("tvm_ipc.start", R.str("tvm_ipc.allgather"), other, 0, 0, x, '
        "ty_args=R.Any)"
    )
    found = hazards(shown=post, read='R.call_packed("tvm_ipc.wait", w, ty_args=R.Tuple())')
    # What peer gives may be the own tensor, as far as is known.
    assert [one for one, _ in found] == [HazardKind.EXPOSED, HazardKind.UNFINISHED]


def test_hiding_is_a_meeting_of_the_team() -> None:
    """After it nobody reads what a collective without an exit barrier left to read."""
    reduce = 'R.call_packed("tvm_ipc.allreduce", other, 0, 0, 3, 1, o, ty_args=R.Tuple())'
    later = "cls.fill(other)"
    assert hazards(shown=reduce, hidden=later) == []
    both = hazards(shown=reduce, read=later)
    assert [one for one, _ in both] == [HazardKind.WRITE]
