# SPDX-License-Identifier: Apache-2.0
"""A collective that no pass ever heard of: its entry in the contract is all that it takes."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import calls
from tvm_ipc.packed_functions import IPC_MEMORY, PROGRAMS, CollectiveFlag, Function, Sync, Team
from tvm_ipc.transform import (
    PlanMemoryScopes,
    RequireWorkers,
    StaticPlanBlockMemory,
    collect_report,
    verify_cross_rank_safety,
)
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

EXCHANGE = Function(
    "mine.exchange",
    "(recv: Tensor, send: Tensor, flags: CollectiveFlag, team: Team)",
    "any of the operands is at another place than those of all-reduce",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.BARRIER,
)
PLAIN = Function(
    "mine.plain",
    "(recv: Tensor, send: Tensor)",
    "the same, over all workers",
    reads=("send",),
    writes=("recv",),
    scopes={"send": IPC_MEMORY},
    peers_read=("send",),
    sync=Sync.BARRIER,
    general_form="mine.exchange",
    defaults={"flags": CollectiveFlag.NONE, "team": Team.WORLD},
)
#: Of the ranks one may return before others have entered.
SPREAD = Function(
    "mine.spread",
    "(recv: Tensor, send: Tensor, team: Team)",
    "",
    reads=("send",),
    writes=("recv",),
    sync=Sync.PARTIAL,
)
LOOK = Function("mine.look", "(*tensors: Tensor)", "", reads=("tensors",))


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (EXCHANGE, PLAIN, SPREAD, LOOK):
        monkeypatch.setitem(PROGRAMS, function.name, function)


def packed(name: str, *arguments: object) -> str:
    return f'_ = R.call_packed("mine.{name}", {", ".join(map(str, arguments))}, ty_args=(R.Any,))'


def exchange(recv: str, send: str, team: int = 0, flags: int = 0) -> str:
    return packed("exchange", recv, send, f"R.prim_value({flags})", f"R.prim_value({team})")


def tensor(name: str, scope: str = "global") -> str:
    return (
        f'{name}: R.Tensor((64,), "float32") = R.builtin.alloc_tensor(R.shape([64]), '
        f'R.dtype("float32"), R.prim_value(0), R.str("{scope}"))'
    )


def module(*lines: str) -> tvm.IRModule:
    body = "\n".join(f"        {line}" for line in lines)
    return tvm.script.from_source(
        "@I.ir_module\n"
        "class Module:\n"
        "    @T.prim_func(s_tir=True)\n"
        '    def copy(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):\n'
        "        for i in range(64):\n"
        '            with T.sblock("copy"):\n'
        "                vi = T.axis.spatial(64, i)\n"
        "                y[vi] = x[vi]\n"
        "    @R.function(pure=False)\n"
        '    def main(x: R.Tensor((64,), "float32"), y: R.Tensor((64,), "float32"), '
        'z: R.Tensor((64,), "float32"), c: R.Tensor((), "bool")):\n'
        f"{body}\n"
        "        return z\n"
    )


def chain(*between: str, team: int = 0, later: int = 0) -> tvm.IRModule:
    """Two exchanges; the input of the second is made after the first one."""
    return module(
        tensor("s"),
        "Module.copy(x, s)",
        exchange("y", "s", team),
        *between,
        tensor("t"),
        "Module.copy(y, t)",
        exchange("z", "t", later),
    )


def planned(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[tuple[str, str]]]:
    """Return the module with memory planned, and what was decided about barriers."""
    with collect_report() as report:
        result = StaticPlanBlockMemory(packed=True)(PlanMemoryScopes()(mod))
    decided = [one for one in report.decisions if one.pass_name == "StaticPlanBlockMemory"]
    return result, [(one.subject, one.verdict) for one in decided]


def flags(mod: tvm.IRModule) -> list[int]:
    named = [call for call in calls(mod["main"]) if isinstance(call.op, relax.ExternFunc)]
    return [int(call.args[2].value) for call in named if call.op.global_symbol == EXCHANGE.name]


def test_its_input_is_placed_where_its_entry_demands():
    mod = PlanMemoryScopes()(module(tensor("s"), "Module.copy(x, s)", exchange("z", "s")))
    text = mod.script()
    assert text.count(f'R.str("{IPC_MEMORY}")') == 1
    assert "tvm_ipc.copy" not in text
    copied = PlanMemoryScopes()(module(exchange("z", "x"))).script()
    assert copied.count(f'R.str("{IPC_MEMORY}")') == 1
    assert copied.count('"tvm_ipc.copy"') == 1


def test_its_barrier_is_left_out_where_the_next_one_proves_it_needless():
    result, decided = planned(chain())
    assert flags(result) == [CollectiveFlag.NO_EXIT_BARRIER, CollectiveFlag.NONE]
    assert decided == [("exchange of s", "barrier left out"), ("exchange of t", "barrier kept")]
    assert verify_cross_rank_safety(result) == []


@pytest.mark.parametrize(
    ("team", "later", "left_out"),
    [
        *((1, 0, True), (1, 1, True), (2, 2, True), (2, 0, True)),
        *((0, 1, False), (2, 1, False), (2, 3, False), (1, 2, False), (0, 2, False)),
    ],
)
def test_a_meeting_proves_nothing_of_a_team_that_it_does_not_contain(team, later, left_out):
    result, _ = planned(chain(team=team, later=later))
    assert flags(result) == [int(left_out), 0]
    assert verify_cross_rank_safety(result) == []


def test_one_that_not_all_wait_in_proves_nothing():
    result, _ = planned(
        module(
            *(tensor("s"), "Module.copy(x, s)", exchange("y", "s")),
            packed("spread", "z", "y", "R.prim_value(0)"),
        )
    )
    assert flags(result) == [0]


def test_what_reads_its_input_before_the_meeting_is_no_obstacle():
    result, _ = planned(chain(packed("look", "x", "s")))
    assert flags(result) == [1, 0]
    result, _ = planned(chain(packed("unheard", "s")))
    assert flags(result) == [0, 0]
    result, _ = planned(chain(packed("spread", "s", "x", "R.prim_value(0)")))
    assert flags(result) == [0, 0]


def test_nothing_is_decided_of_a_team_that_the_program_does_not_name():
    result, decided = planned(
        module(
            *(
                tensor("s"),
                "Module.copy(x, s)",
                packed("exchange", "y", "s", "R.prim_value(0)", "x"),
            ),
            *(tensor("t"), "Module.copy(y, t)", exchange("z", "t")),
        )
    )
    assert flags(result) == [0, 0]
    assert decided == [("exchange of t", "barrier kept")]
    assert verify_cross_rank_safety(result) == []


@pytest.mark.parametrize(
    ("team", "then", "otherwise", "left_out"),
    [(1, 0, 1, True), (2, 0, 2, True), (0, 0, 1, False), (2, 2, 1, False)],
)
def test_branches_prove_what_both_of_them_prove(team, then, otherwise, left_out):
    branches = [
        *("if c:", "    " + exchange("z", "y", then), "    r = y"),
        *("else:", "    " + exchange("z", "y", otherwise), "    r = x"),
    ]
    result, _ = planned(
        module(tensor("s"), "Module.copy(x, s)", exchange("y", "s", team), *branches)
    )
    assert flags(result)[0] == int(left_out)
    # Nobody says that ranks have the same conditions.
    found = [(hazard.kind, hazard.unknown) for hazard in verify_cross_rank_safety(result)]
    assert found == ([] if then == otherwise else [(HazardKind.BRANCHES, True)])


def test_one_without_flags_becomes_the_one_that_takes_them():
    result, decided = planned(
        module(
            tensor("s"), "Module.copy(x, s)", packed("plain", "y", "s"), packed("plain", "z", "y")
        )
    )
    assert flags(result) == [1]
    assert decided[0] == ("plain of s", "barrier left out")
    assert verify_cross_rank_safety(result) == []


WRITE, FREE = HazardKind.WRITE, HazardKind.FREE
SPREADS = packed("spread", "z", "y", "R.prim_value(0)")
RACE = (
    tensor("s", IPC_MEMORY),
    "Module.copy(x, s)",
    exchange("y", "s", flags=1),
)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (("Module.copy(x, s)", exchange("z", "y")), [WRITE, FREE]),
        ((exchange("z", "y"), "Module.copy(x, s)"), []),
        ((exchange("z", "y", team=2), "Module.copy(x, s)", exchange("z", "y")), [WRITE, FREE]),
        ((packed("spread", "s", "x", "R.prim_value(0)"), exchange("z", "y")), [WRITE, FREE]),
        ((packed("look", "s"), exchange("z", "y")), [FREE]),
        ((packed("plain", "z", "y"), "Module.copy(x, s)"), []),
        ((SPREADS, "Module.copy(x, s)", exchange("z", "y")), [WRITE, FREE]),
    ],
)
def test_a_race_with_it_is_found(after, found):
    hazards = verify_cross_rank_safety(module(*RACE, *after))
    assert [hazard.kind for hazard in hazards] == found
    assert all("mine.exchange" in hazard.related for hazard in hazards)


def test_a_race_of_a_team_that_the_program_does_not_name_ends_when_the_world_meets():
    start = (tensor("s", IPC_MEMORY), "Module.copy(x, s)", packed("exchange", "y", "s", 1, "x"))
    write = "Module.copy(x, s)"
    assert verify_cross_rank_safety(module(*start, exchange("z", "y"), write)) == []
    (hazard, *_) = verify_cross_rank_safety(module(*start, exchange("z", "y", team=1), write))
    assert hazard.kind is WRITE


def test_a_module_with_it_runs_with_as_many_workers_as_it_was_compiled_for():
    assert "require_workers" in RequireWorkers(2)(module(exchange("z", "x"))).script()
    assert "require_workers" not in RequireWorkers(2)(module(packed("look", "x"))).script()
