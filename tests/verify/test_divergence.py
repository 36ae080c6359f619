# SPDX-License-Identifier: Apache-2.0
"""The check of order: programs whose ranks would wait for each other are found before they run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import tvm_ipc
from tvm_ipc.errors import DeadlineError, TransformError, WorkerError
from tvm_ipc.transform import Hazard, collect_report, verify_cross_rank_safety
from tvm_ipc.verify import comm_trace_builder
from tvm_ipc.verify.hazard_types_and_messages import HazardKind

BRANCHES, DISAGREES, STUCK = HazardKind.BRANCHES, HazardKind.DISAGREES, HazardKind.STUCK

HEADER = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def first(p: T.Buffer((), "int64"), c: T.Buffer((), "bool")):
        with T.sblock("c"):
            vi = T.axis.spatial(T.int64(1), T.int64(0))
            c[()] = p[()] == T.int64(0)
    @T.prim_func(private=True, s_tir=True)
    def odd(p: T.Buffer((), "int64"), c: T.Buffer((), "bool")):
        with T.sblock("c"):
            vi = T.axis.spatial(T.int64(1), T.int64(0))
            c[()] = p[()] % T.int64(2) == T.int64(1)
    @T.prim_func(private=True, s_tir=True)
    def anywhere(p: T.Buffer((), "int64"), c: T.Buffer((), "bool")):
        with T.sblock("c"):
            vi = T.axis.spatial(T.int64(1), T.int64(0))
            c[()] = p[()] >= T.int64(0)
    @T.prim_func(private=True, s_tir=True)
    def maybe(p: T.Buffer((), "int64"), x: T.Buffer((4,), "float32"), c: T.Buffer((), "bool")):
        with T.sblock("c"):
            vi = T.axis.spatial(T.int64(1), T.int64(0))
            T.where(x[0] > T.float32(0))
            c[()] = p[()] == T.int64(0)
    @T.prim_func(private=True, s_tir=True)
    def positive(x: T.Buffer((4,), "float32"), c: T.Buffer((), "bool")):
        with T.sblock("c"):
            vi = T.axis.spatial(T.int64(1), T.int64(0))
            c[()] = x[0] > T.float32(0)
"""


def packed(name: str, *arguments: object, result: str = "_", ty: str = "R.Any") -> str:
    given = ", ".join([f'"{name}"', *map(str, arguments)])
    return f"{result} = R.call_packed({given}, ty_args=({ty},))"


def tensor(name: str, shape: str = "4", dtype: str = "float32") -> str:
    shape = f"[{shape}]"
    return f'{name} = R.builtin.alloc_tensor(R.shape({shape}), R.dtype("{dtype}"), 0, "global")'


def team(ranks: object) -> str:
    return f"R.shape({list(ranks)})" if isinstance(ranks, tuple) else f"R.prim_value({ranks})"


def allreduce(recv: str = "y", of: object = 0, kind: int = 0, send: str = "x") -> str:
    return packed("tvm_ipc.allreduce", send, kind, team(of), 3, 0, recv)


def allgather(recv: str = "z", of: object = 0) -> str:
    return packed("tvm_ipc.allgather", "x", team(of), 0, recv)


def post(work: str, recv: str, of: object = 0, kind: int = 0) -> str:
    given = ['"tvm_ipc.allreduce"', "x", kind, team(of), 3, 0, recv]
    return packed("tvm_ipc.start", *given, result=work)


def wait(work: str) -> str:
    return packed("tvm_ipc.wait", work)


def send(to: int) -> str:
    return packed("runtime.disco.send_to_worker", "x", to)


def receive(sender: int) -> str:
    return packed("runtime.disco.recv_from_worker", "y", sender)


#: The caller's place in a team, and whether it is the first.
def place(kernel: str = "first", of: object = 0) -> list[str]:
    return [
        *(tensor("p", "", "int64"), tensor("c", "", "bool")),
        packed("tvm_ipc.team_index", team(of), "p"),
        f"Module.{kernel}(p, c)",
    ]


def lines_of(body: list[str]) -> list[str]:
    return [line for part in body for line in part.split("\n")]


def branch(then: list[str], otherwise: list[str], condition: str = "c") -> str:
    lines = [f"if {condition}:", *(f"    {line}" for line in lines_of([*then, "r = x"]))]
    lines += ["else:", *(f"    {line}" for line in lines_of([*otherwise, "r = x"]))]
    return "\n".join(lines)


def function(*body: str, name: str = "main", parameters: str = "") -> str:
    given = ", ".join(["x: R.Tensor((4,), 'float32')", *filter(None, [parameters])])
    private = "" if name == "main" else ", private=True"
    lines = [f"@R.function(pure=False{private})", f"def {name}({given}):"]
    whole = [tensor("y"), tensor("z", "8"), *body, "return x"]
    lines += ["    " + line for part in whole for line in part.split("\n")]
    return "\n".join("    " + line for line in lines) + "\n"


def module(*body: str, parameters: str = "", others: str = "") -> tvm.IRModule:
    text = HEADER + others + function(*body, parameters=parameters)
    return tvm.script.from_source(text)


def check(*body: str, **options: Any) -> list[Hazard]:
    parameters = options.pop("parameters", "")
    others = options.pop("others", "")
    mod = module(*body, parameters=parameters, others=others)
    options.setdefault("world_size", 4)
    return verify_cross_rank_safety(mod, **options)


def kinds(*body: str, **options: Any) -> list[tuple[HazardKind, bool]]:
    return [(hazard.kind, hazard.unknown) for hazard in check(*body, **options)]


CERTAIN = [(STUCK, False)]
PAIRS = (2, 0, 1, 2, 3)  #: the ranks 0 and 1, and the ranks 2 and 3
OTHERS = (2, 0, 2, 1, 3)


# ---- one branch of an `if` ----------------------------------------------------------------------


def test_a_collective_of_the_first_rank_alone() -> None:
    (hazard,) = check(*place(), branch([allreduce()], []))
    assert (hazard.kind, hazard.unknown) == (STUCK, False)
    assert hazard.memory == "rank 0" and "tvm_ipc.allreduce" in hazard.binding
    assert "rank 0 is waiting indefinitely; rank 1 has ended" in str(hazard)
    assert "all ranks of a team must make the same calls in the same order" in str(hazard)
    assert "(for example where 4 workers run it)" in str(hazard)


def test_the_rank_as_a_number() -> None:
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    assert kinds(rank, branch([allreduce()], [], "q == 0")) == CERTAIN
    assert kinds(rank, branch([allreduce()], [], "q >= 0")) == []
    assert kinds(rank, branch([allreduce()], [], "q > 3")) == []
    shape = packed("runtime.disco.worker_id", result="s", ty="R.Shape(ndim=1)")
    named = ["q = T.int64()", shape, "t = R.match_cast(s, R.Shape([q]))"]
    assert kinds(*named, branch([allreduce()], [], "q == 0")) == CERTAIN


def test_a_kernel_that_may_not_store() -> None:
    """What it leaves there, nobody knows."""
    start = [tensor("p", "", "int64"), packed("tvm_ipc.team_index", team(0), "p")]
    body = [tensor("c", "", "bool"), "Module.maybe(p, x, c)", branch([allreduce()], [])]
    assert kinds(*start, *body) == [(BRANCHES, True)]


def test_a_post_of_the_first_rank_alone() -> None:
    body = branch([post("w", "y"), wait("w")], [])
    assert kinds(*place(), body) == CERTAIN


def test_both_branches_do_the_same() -> None:
    assert kinds(*place(), branch([allreduce()], [allreduce()])) == []
    assert kinds(*place(), branch([post("w", "y"), wait("w")], [post("w", "y"), wait("w")])) == []
    same = [allreduce(), allgather()]
    assert kinds(*place(), branch(same, same)) == []
    assert kinds(*place(), branch(same, same[::-1])) == [(DISAGREES, False)]


@pytest.mark.parametrize(
    ("then", "otherwise"),
    [
        (allreduce(), allgather()),
        (allreduce(kind=0), allreduce(kind=3)),
        (allreduce(), packed("tvm_ipc.allreduce", "x", 0, 0, 3, 1, "y")),
        (allreduce(), allreduce("z", send="z")),
    ],
)
def test_branches_that_meet_in_something_else(then: str, otherwise: str) -> None:
    hazards = check(*place(), branch([then], [otherwise]))
    (hazard,) = (one for one in hazards if one.kind is not HazardKind.RETURN)
    assert (hazard.kind, hazard.unknown) == (DISAGREES, False)
    assert "is in a call that does not match the call of a peer; rank 0 is in" in str(hazard)


def test_upstreams_sum_is_the_same_sum() -> None:
    upstreams = packed("runtime.disco.cuda_ipc.custom_allreduce", "x", 3, "y")
    assert kinds(*place(), branch([allreduce()], [upstreams])) == []


def test_all_ranks_of_a_team_take_the_same_branch() -> None:
    """The first of each pair are a team of OTHERS, so they may do what the second ones do not."""
    body = [*place("odd"), branch([allreduce(of=OTHERS)], [])]
    assert kinds(*body) == []
    assert kinds(*place("odd"), branch([allreduce(of=PAIRS)], [])) == CERTAIN
    first = place("odd", of=PAIRS)
    assert kinds(*first, branch([allreduce(of=OTHERS)], [])) == []
    assert kinds(*place("odd", of=OTHERS), branch([allreduce(of=OTHERS)], [])) == CERTAIN


def test_a_condition_that_all_ranks_have_alike() -> None:
    condition = [tensor("c", "", "bool"), allreduce(), "Module.positive(y, c)"]
    assert kinds(*condition, branch([allgather()], [])) == []
    gathered = [tensor("c", "", "bool"), post("w", "y"), wait("w"), "Module.positive(y, c)"]
    assert kinds(*gathered, branch([allgather()], [])) == []


def test_a_condition_that_nobody_knows() -> None:
    condition = [tensor("c", "", "bool"), "Module.positive(x, c)"]
    (hazard,) = check(*condition, branch([allgather()], []))
    assert (hazard.kind, hazard.unknown) == (BRANCHES, True)
    assert "one branch has allgather, the other one nothing" in str(hazard)
    assert "communication may be different in both branches of a condition" in str(hazard)
    assert kinds(*condition, branch([allgather()], [allgather()])) == []
    given = [branch([allgather()], [])]
    assert kinds(*given, parameters='c: R.Tensor((), "bool")') == [(BRANCHES, True)]


def test_a_condition_that_a_team_has_alike() -> None:
    condition = [tensor("c", "", "bool"), allreduce(of=PAIRS), "Module.positive(y, c)"]
    assert kinds(*condition, branch([allgather(of=PAIRS)], [])) == []
    assert kinds(*condition, branch([allgather(of=OTHERS)], [])) == [(BRANCHES, True)]
    assert kinds(*condition, branch([allgather()], [])) == [(BRANCHES, True)]


def test_what_is_alike_is_not_so_when_it_is_written_again() -> None:
    condition = [tensor("c", "", "bool"), allreduce(), "Module.positive(y, c)"]
    again = [*condition, "Module.positive(x, c)"]
    assert kinds(*again, branch([allgather()], [])) == [(BRANCHES, True)]
    again = [*condition, packed("some.function", "c")]
    assert kinds(*again, branch([allgather()], [])) == [(BRANCHES, True)]
    view = 'v: R.Tensor((), "bool") = R.reshape(c, R.shape([]))'
    again = [*condition, view, "Module.positive(x, v)"]
    assert kinds(*again, branch([allgather()], [])) == [(BRANCHES, True)]


def test_parts_of_what_is_alike_differ() -> None:
    """Ranks have the same, and each looks at another part of it."""
    ty = "R.Tensor((4,), 'float32')"
    given = ["R.shape([4])"]
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    start = [tensor("c", "", "bool"), rank, allgather(recv="z")]
    meeting = ["Module.positive(v, c)", branch([allreduce()], [])]
    same_part = packed("tvm_ipc.view", "z", 0, *given, result="v", ty=ty)
    assert kinds(*start, same_part, *meeting) == []
    by_rank = packed("tvm_ipc.view", "z", "q * 16", *given, result="v", ty=ty)
    assert kinds(*start, by_rank, *meeting, world_size=2) == [(BRANCHES, True)]
    out = check(*start, by_rank, *meeting, world_size=3)  # of 2 parts, the third
    assert "for example where q = 2" in str(out[0])
    by_place = packed("tvm_ipc.own_slice", "z", 0, 0, 16, 0, *given, result="v", ty=ty)
    assert kinds(*start, by_place, *meeting) == [(BRANCHES, True)]
    # What is written through it is not alike any more, either.
    write = [by_place, copy("x", "v"), "Module.positive(w, c)"]
    whole = packed("tvm_ipc.view", "z", 0, *given, result="w", ty=ty)
    assert kinds(*start, whole, *write, branch([allreduce()], [])) == [(BRANCHES, True)]


def test_what_is_alike_is_written_under_another_name() -> None:
    """One of two tensors goes on under one name after an `if`."""
    start = [tensor("c", "", "bool"), tensor("d", "", "bool"), allreduce()]
    start += ["Module.positive(y, c)", "Module.positive(y, d)"]
    one = "if c:\n    m = c\nelse:\n    m = d"
    meeting = branch([allgather()], [])
    assert kinds(*start, one, meeting) == []
    assert kinds(*start, one, "Module.positive(y, m)", branch([allgather()], [], "m")) == []
    assert kinds(*start, one, "Module.positive(x, m)", meeting) == [(BRANCHES, True)]


def test_a_condition_that_a_branch_decides() -> None:
    """What one of two branches wrote is alike if both are, and if so is the condition."""
    start = [tensor("c", "", "bool"), tensor("d", "", "bool"), allreduce(), "Module.positive(y, c)"]
    meeting = branch([allgather()], [], "d")
    assert (
        kinds(*start, branch(["Module.positive(y, d)"], ["Module.positive(y, d)"]), meeting) == []
    )
    one = branch(["Module.positive(y, d)"], ["Module.positive(x, d)"])
    assert kinds(*start, one, meeting) == [(BRANCHES, True)]
    by_rank = [*place(), *start[1:3], branch([copy("c", "d")], [copy("c", "d")]), meeting]
    assert kinds(*by_rank) == CERTAIN


def copy(source: str, target: str) -> str:
    return packed("tvm_ipc.copy", source, target)


def test_a_branch_within_a_branch() -> None:
    start = [tensor("d", "", "bool"), allreduce(), "Module.positive(y, d)"]
    inner = branch([allgather()], [], "d")
    assert kinds(*start, *place(), branch([inner], [])) == CERTAIN
    assert kinds(*start, *place(), branch([inner], [inner])) == []
    outer = branch([branch([allgather()], [])], [], "d")
    assert kinds(*start, *place(), outer) == CERTAIN


def test_unknown_hazards_are_noted_and_certain_ones_refused() -> None:
    mod = module(branch([allgather()], []), parameters='c: R.Tensor((), "bool")')
    with collect_report() as report:
        tvm_ipc.get_pipeline("llvm", 2)(mod)
    notes = [one for one in report.decisions if one.pass_name == "VerifyCrossRankSafety"]
    assert [one.verdict for one in notes] == ["not proved"]
    with pytest.raises(TransformError, match="rank 0 is waiting indefinitely; rank 1 has ended"):
        tvm_ipc.get_pipeline("llvm", 2)(module(*place(), branch([allreduce()], [])))


# ---- orders -------------------------------------------------------------------------------------


def test_teams_that_are_met_in_another_order() -> None:
    """Ranks 0 and 3 meet their pair first, ranks 1 and 2 their other team: a circle of all four."""
    meetings = [allreduce(of=PAIRS), allreduce(of=OTHERS)]
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    condition = "T.floormod(q, 3) == 0"
    (hazard,) = check(rank, branch(meetings, meetings[::-1], condition))
    assert (hazard.kind, hazard.unknown) == (STUCK, False)
    assert kinds(rank, branch(meetings, meetings, condition)) == []
    # Ranks that are not in each other's teams do as they like.
    assert kinds(rank, branch(meetings, meetings[::-1], "q < 0")) == []


def test_works_of_teams_in_another_order() -> None:
    def works(first: object, second: object) -> list[str]:
        return [post("v", "y", first), post("w", "z", second), wait("v"), wait("w")]

    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    condition = "T.floormod(q, 3) == 0"
    assert kinds(rank, branch(works(PAIRS, OTHERS), works(OTHERS, PAIRS), condition)) == CERTAIN
    assert kinds(rank, branch(works(PAIRS, OTHERS), works(PAIRS, OTHERS), condition)) == []


def test_works_have_teams_of_their_own() -> None:
    """So a work and a call may be in another order on another rank; two calls may not."""
    one = [post("v", "y"), allgather(), wait("v")]
    other = [allgather(), post("v", "y"), wait("v")]
    assert kinds(*place(), branch(one, other)) == []
    waits = [post("v", "y"), wait("v"), allgather()]
    assert kinds(*place(), branch(waits, one)) == []
    assert kinds(*place(), branch(waits, other)) == CERTAIN


def test_messages_of_two_ranks() -> None:
    two: dict[str, Any] = {"world_size": 2}
    assert kinds(*place(), branch([send(1), receive(1)], [receive(0), send(0)]), **two) == []
    crossed = branch([receive(1), send(1)], [receive(0), send(0)])
    assert kinds(*place(), crossed, **two) == CERTAIN
    # Small messages wait in a buffer until they are received, large ones do not.
    both = branch([send(1), receive(1)], [send(0), receive(0)])
    assert kinds(*place(), both, **two) == [(STUCK, True)]
    # Another program may have sent it, also where others wait for who receives it.
    assert kinds(*place(), branch([], [receive(0)]), **two) == [(STUCK, True)]
    assert kinds(*place(), branch([], [receive(0)]), allreduce(), **two) == [(STUCK, True)]


def test_a_message_and_a_collective() -> None:
    two: dict[str, Any] = {"world_size": 2}
    body = branch([allreduce(), send(1)], [receive(0), allreduce()])
    assert kinds(*place(), body, **two) == CERTAIN
    assert kinds(*place(), branch([send(1), allreduce()], [receive(0), allreduce()]), **two) == []


def test_a_team_that_the_program_asks_for() -> None:
    asked = packed("tvm_ipc.team", "R.shape([0, 2])", 0, result="t", ty="R.Prim('int64')")
    meeting = packed("tvm_ipc.allreduce", "x", 0, "t", 3, 0, "y")
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    assert kinds(asked, rank, branch([meeting], [], "T.floormod(q, 2) == 0")) == []
    assert kinds(asked, rank, branch([meeting], [], "q == 0")) == CERTAIN


# ---- what is shown -------------------------------------------------------------------------------


IPC = tensor("x_ipc").replace('"global"', '"ipc_memory"')


def show(name: str, of: object = 0, what: str = "x_ipc") -> str:
    return packed("tvm_ipc.expose", what, team(of), result=name)


def peer(name: str, of: str, shift: int = 1) -> str:
    ty = 'R.Tensor((4,), "float32")'
    return packed("tvm_ipc.peer_view", of, shift, "R.shape([4])", result=name, ty=ty)


def hide(*names: str, of: object = 0) -> str:
    return packed("tvm_ipc.release", team(of), *names)


def test_what_one_rank_shows_and_hides_alone() -> None:
    body = [IPC, *place(), branch([show("s"), hide("s")], [])]
    assert kinds(*body) == CERTAIN
    both = [show("s"), hide("s")]
    assert kinds(IPC, *place(), branch(both, both)) == []
    assert kinds(IPC, *place(), branch([show("s"), hide("s"), allreduce()], both)) == CERTAIN


def test_a_peer_that_never_shows() -> None:
    """The second of two tensors is asked for, and the other ranks show one."""
    one = [show("s"), hide("s")]
    two = [show("s"), show("t"), peer("p", "t"), hide("s", "t")]
    (hazard,) = check(IPC, *place(), branch(two, one))
    assert (hazard.kind, hazard.unknown, hazard.memory) == (STUCK, False, "rank 0")
    assert (
        "tvm_ipc.peer_view" in hazard.binding
        and "rank 1 is in `_ = tvm_ipc.release" in hazard.related
    )
    assert kinds(IPC, *place(), branch(two, two)) == []


def test_a_peer_that_shows_later() -> None:
    """Each waits for what the other one shows after its own wait."""
    ask = [show("s"), peer("p", "s"), show("t"), hide("s", "t")]
    first = [show("s"), show("t"), peer("p", "t"), hide("s", "t")]
    two: dict[str, Any] = {"world_size": 2}
    assert kinds(IPC, *place(), branch(ask, first), **two) == []
    waits = [allreduce(), show("s"), peer("p", "s"), hide("s")]
    other = [show("s"), peer("p", "s"), allreduce(), hide("s")]
    assert kinds(IPC, *place(), branch(waits, other), **two) == CERTAIN
    # What a rank shows itself is there.
    own = [show("s"), peer("p", "s", 0), allreduce(), hide("s")]
    assert kinds(IPC, *place(), branch(waits, own), **two) == []


def test_tensors_that_belong_together_and_differ() -> None:
    large = tensor("l", "8").replace('"global"', '"ipc_memory"')
    body = branch([show("s"), hide("s")], [show("s", what="l"), hide("s")])
    assert kinds(IPC, large, *place(), body) == [(DISAGREES, False)]


# ---- functions of the module --------------------------------------------------------------------


PART = function(allreduce(), name="part")
CALL = 'u: R.Tensor((4,), "float32") = Module.part(x)'


CAPTURED = (
    'u: R.Tensor((4,), "float32") = R.call_builtin_with_ctx('
    '"vm.builtin.cuda_graph.run_or_capture", (Module.part, (x,), R.prim_value(0)), '
    'ty_args=(R.Tensor((4,), "float32"),))'
)


@pytest.mark.parametrize("call", [CALL, CAPTURED])
def test_functions_that_meet(call: str) -> None:
    assert kinds(*place(), branch([call], []), others=PART) == CERTAIN
    assert kinds(*place(), branch([call], [allreduce()]), others=PART) == []
    assert kinds(*place(), branch([call], [call]), others=PART) == []


def test_a_function_that_is_given_its_condition() -> None:
    condition = 'c: R.Tensor((), "bool")'
    part = function(branch([allreduce()], []), name="part", parameters=condition)
    call = CALL.replace("(x)", "(x, c)")
    assert kinds(*place(), call, others=part) == CERTAIN
    assert kinds(*place("anywhere"), call, others=part) == []
    assert kinds(*place("anywhere"), call, *place(), call, others=part) == CERTAIN
    alike = [tensor("c", "", "bool"), allreduce(), "Module.positive(y, c)"]
    assert kinds(*alike, call, call, others=part) == []
    (hazard,) = check(call, others=part, parameters=condition)
    assert (hazard.kind, hazard.function, hazard.unknown) == (BRANCHES, "part", True)


def test_recursion_is_unknown() -> None:
    condition = 'c: R.Tensor((), "bool")'
    call = CALL.replace("(x)", "(x, c)")
    part = function(branch([call], [allreduce()]), name="part", parameters=condition)
    found = {kind for kind, unknown in kinds(call, others=part, parameters=condition) if unknown}
    assert found == {BRANCHES}


# ---- numbers of ranks ---------------------------------------------------------------------------


def test_without_a_number_of_workers_several_are_tried() -> None:
    found = check(*place(), branch([allreduce()], []), world_size=None)
    assert [(one.kind, one.unknown) for one in found] == CERTAIN
    assert "where 2 workers run it" in str(found[0])
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    third = branch([allreduce()], [], "q == 2")
    assert kinds(rank, third, world_size=None) == [(STUCK, True)]
    assert kinds(rank, third, world_size=2) == []
    # Teams that all ranks are divided into say how many there are.
    assert kinds(allgather(of=PAIRS), rank, third, world_size=None) == CERTAIN


def test_a_message_to_the_next_group() -> None:
    to = packed("runtime.disco.send_to_next_group", "x")
    come = packed("runtime.disco.recv_from_prev_group", "y")
    rank = packed("runtime.disco.worker_rank", result="q", ty="R.Prim('int64')")
    grouped: dict[str, Any] = {"world_size": 4, "num_groups": 2}
    assert kinds(rank, branch([to], [come], "q < 2"), **grouped) == []
    assert kinds(rank, branch([to, allreduce()], [allreduce(), come], "q < 2"), **grouped) == [
        (STUCK, True)
    ]
    assert (
        kinds(rank, branch([allreduce(), to], [come, allreduce()], "q < 2"), **grouped) == CERTAIN
    )
    assert kinds(rank, branch([allreduce(of=1)], [], "q < 2"), **grouped) == []
    assert kinds(rank, branch([allreduce(of=1)], [], "q < 1"), **grouped) == CERTAIN


# ---- what is said is so -------------------------------------------------------------------------


RUNS = {
    "one alone": (place(), [allreduce()], []),
    "other kinds": (place(), [allreduce()], [allgather()]),
    "crossed": (place(), [receive(1), send(1)], [receive(0), send(0)]),
    "right": (place(), [send(1), allreduce()], [receive(0), allreduce()]),
    "in a thread": (
        place(),
        [post("v", "y"), allgather(), wait("v")],
        [allgather(), post("v", "y"), wait("v")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_workers_do_as_the_check_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, then, otherwise = RUNS[name]
    mod = module(*start, branch(then, otherwise))
    found = verify_cross_rank_safety(mod, world_size=2)
    assert all(not hazard.unknown for hazard in found)
    if found:
        with pytest.raises(TransformError, match="VerifyCrossRankSafety"):
            tvm_ipc.get_pipeline("llvm", 2)(mod)
    keep = tvm.transform.module_pass(lambda mod, _: mod, opt_level=0, name="Keep")
    monkeypatch.setattr(tvm_ipc.pipeline, "VerifyCrossRankSafety", lambda **_: keep)
    program = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2))
    x = np.ones(4, "float32")

    def run() -> None:
        with tvm_ipc.Session(2, threads=True, timeout=1) as session:
            session.get(session.load_vm_module(program)["main"](session.put(x)), rank=1)
            session.sync()

    if found:
        with pytest.raises((DeadlineError, WorkerError), match=r"waited 1 s|the ranks disagree"):
            run()
    else:
        run()


def test_steps_without_other_ranks_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_trace_builder, "MOST_STEPS", 0)
    assert not verify_cross_rank_safety(lowered_ifs("f", "g"), world_size=2)
    (hazard,) = verify_cross_rank_safety(lowered_ifs("f", "runtime.disco.allreduce"), world_size=2)
    assert hazard.kind is BRANCHES
    assert hazard.unknown


def lowered_ifs(then: str, otherwise: str) -> tvm.IRModule:
    """Return a function that calls one of two packed functions."""
    more = "R.shape([0]), R.prim_value(0), "
    calls = [f"x, {more if 'disco' in name else ''}y" for name in (then, otherwise)]
    module: tvm.IRModule = tvm.script.from_source(f"""
@I.ir_module
class Module:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        R.func_attr({{"global_symbol": "main"}})
        {tensor("y")}
        if c:
            {packed(then, calls[0])}
            z = y
        else:
            {packed(otherwise, calls[1])}
            z = y
        return z
""")
    return module


# ---- teams that leave out ranks -----------------------------------------------------------------

EVEN = (2, 0, 2)  #: the ranks 0 and 2 of four


def test_only_members_of_a_team_need_to_call() -> None:
    members_only = branch([], [allreduce(of=EVEN), allgather(of=EVEN)])
    assert kinds(*place("odd"), members_only) == []
    assert kinds(*place("odd"), branch([allreduce(of=EVEN)], [])) == []  # nobody waits
    assert kinds(allreduce(of=EVEN), allreduce()) == []
    (hazard,) = check(*place(), branch([allreduce(of=EVEN)], []))
    assert (hazard.kind, hazard.unknown) == (STUCK, False)
    assert "rank 0 is waiting indefinitely; rank 2 has ended" in str(hazard)


def test_members_of_a_team_have_to_agree() -> None:
    reverse = branch([allreduce(of=EVEN), allgather(of=EVEN)], [allgather(of=EVEN), allreduce()])
    assert (DISAGREES, False) in kinds(*place(), reverse)


def test_a_result_is_the_same_on_members_only() -> None:
    decide = [allreduce(of=EVEN), tensor("c", "", "bool"), "Module.positive(y, c)"]
    assert kinds(*decide, branch([allreduce(of=EVEN)], [])) == []
    assert kinds(*decide, branch([allreduce()], [])) == [(BRANCHES, True)]


def test_the_number_of_ranks_is_not_the_number_of_members() -> None:
    """Without `world_size`, the largest rank in a team tells how many ranks there are."""
    body = [*place("odd", (4, 0, 1, 2, 3)), branch([], [allreduce(of=EVEN)])]
    assert kinds(*body, world_size=None) == []
    (hazard,) = check(*place(of=EVEN), branch([allreduce(of=EVEN)], []), world_size=None)
    assert "rank 0 is waiting indefinitely; rank 2 has ended" in str(hazard)


def test_the_index_of_a_rank_outside_is_the_size_of_the_team() -> None:
    rank_1_calls = [*place("odd", EVEN), branch([allreduce()], [])]  # of ranks 1, 2 and 3: 2, 1, 2
    (hazard,) = check(*rank_1_calls)
    assert (hazard.kind, hazard.memory) == (STUCK, "rank 2")
