# SPDX-License-Identifier: Apache-2.0
"""The hubs of two nodes and the controller's: a failure on one node, a recovery, and a round more.

Mirrors core/internode_session_event_relay.cc `TellAborts`, `AskToRecover`, `AnswerRecovery`,
`Handle` and core/worker_status_and_error_table.cc `HearAbort`, `RecoverNodes`,
`Begin`. A node has one rank.

In a round rank a waits for what rank b has done, or for an abort on its node. In the first round
rank b may fail, and the deadline of rank a may be over; in the other model rank b dies when its
node has recovered, before the other hubs have or after.

Messages of a link arrive in order, but for aborts, which may overtake the others and, more than in
the code, be overtaken by them. What a hub does is a step each, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step, WrongError

NODES = ("a", "b")


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    tells_the_controller: bool = True
    tells_the_other_nodes: bool = True
    tells_of_each_generation: bool = True
    ignores_what_is_over: bool = True
    keeps_what_comes_early: bool = True
    all_nodes_begin_before_the_next_round: bool = True
    error_comes_before_the_ticket: bool = True


def failure(protocol: Protocol | None = None) -> Model:
    """Rank b may fail in the first round; nothing may end the second."""
    return _model(protocol or Protocol(), dies=False)


def death(protocol: Protocol | None = None) -> Model:
    """Rank b fails, recovers and dies before the second round; rank a must not wait for it."""
    return _model(protocol or Protocol(), dies=True)


def _model(protocol: Protocol, *, dies: bool) -> Model:
    cells: dict[Hashable, Any] = {"fails": dies, "dead": False, "go": False, "wanted": 0}
    cells["late"] = False
    for hub in ("c", *NODES):
        cells.update({("abort", hub): False, ("generation", hub): 0, ("coming", hub): 0})
    for node in NODES:
        for what in ("up", "up first", "down", "down first"):
            cells[what, node] = ()
        cells.update({("told", "c", node): -1, ("told", node, "c"): -1, ("asked", node): 0})
        cells.update({("ticket", node): 0, ("error", node): False, ("answer", node): 0})
    for done in (1, 2):
        cells["data", done] = False
    programs: dict[str, list[Step]] = {
        "rank a": [*_waits(1), *_next(), *_waits(2)],
        "rank b": [
            Step("fail or work", lambda m: _fail_or_work(m, protocol)),
            *_ticket("b", 1),
            *_next(),
            Step("work", lambda m: _work_again(m, dies=dies)),
            *_ticket("b", 2),
        ],
        "controller": _controller(protocol, dies=dies),
    }
    for node in NODES:
        for says, act in _hub_steps(node, protocol).items():
            programs[f"{says}, {node}"] = [Step(says, _looped(act), "again")]
    restless = frozenset(name for name in programs if "," in name)
    programs["deadline"] = [Step("is over", lambda m: m.__setitem__("late", True))]
    restless |= {"deadline"}
    if not dies:
        programs["fault"] = [Step("happens", lambda m: m.__setitem__("fails", True))]
        restless |= {"fault"}
    else:
        programs["death"] = [Step("of rank b", _die)]
    return Model(cells, programs, restless)


def _looped(act: Callable[[Memory], bool]) -> Callable[[Memory], bool | str]:
    return lambda m: "again" if act(m) else False


def _push(m: Memory, queue: Hashable, message: Any) -> None:
    m[queue] = (*m[queue], message)


def _pop(m: Memory, queue: Hashable) -> Any:
    first, *rest = m[queue]
    m[queue] = tuple(rest)
    return first


# ---- ranks ----------------------------------------------------------------------------------


def _ticket(node: str, number: int) -> list[Step]:
    say = lambda m: _push(m, ("up", node), ("done", number))  # noqa: E731
    return [Step(f"pass ticket {number}", say, f"ticket {number}")]


def _next() -> list[Step]:
    return [Step("take the next command", lambda m: m["go"])]


def _waits(number: int) -> list[Step]:
    def wait(m: Memory) -> bool:
        if m["data", number]:
            return True
        if number == 1 and m["late"] and not m["abort", "a"]:
            m["abort", "a"] = True
            _push(m, ("up", "a"), ("error", 0))
        if not m["abort", "a"]:
            return False
        if number == 2 and not m["dead"]:
            raise WrongError("the second round is ended by the first one's failure")
        return True

    return [Step(f"wait for rank b in round {number}", wait), *_ticket("a", number)]


def _fail_or_work(m: Memory, protocol: Protocol) -> None:
    if not m["fails"]:
        m["data", 1] = True
        return
    m["abort", "b"] = True
    # The mutation: the report comes when it comes.
    if protocol.error_comes_before_the_ticket:
        _push(m, ("up", "b"), ("error", 0))


def _work_again(m: Memory, *, dies: bool) -> None:
    if m["dead"]:
        return
    if m["abort", "b"]:
        raise WrongError("rank b finds its node ended in the second round")
    m["data", 2] = not dies


def _die(m: Memory) -> bool:
    """After the recovery of its own node, while others may still be at it."""
    if m["generation", "b"] == 0:
        return False
    m["dead"] = m["abort", "b"] = True
    return True


# ---- hubs -----------------------------------------------------------------------------------


def _hear_abort(m: Memory, hub: str, other: str, generation: int, protocol: Protocol) -> None:
    m["told", hub, other] = max(m["told", hub, other], generation)
    now = m["generation", hub]
    if generation > now and protocol.keeps_what_comes_early:
        m["coming", hub] = generation
    elif generation == now or (generation < now and not protocol.ignores_what_is_over):
        m["abort", hub] = True


def _tell(m: Memory, hub: str, other: str, queue: Hashable, protocol: Protocol) -> bool:
    if not m["abort", hub]:
        return False
    told = m["told", hub, other]
    if told >= m["generation", hub] or (told >= 0 and not protocol.tells_of_each_generation):
        return False
    m["told", hub, other] = m["generation", hub]
    _push(m, queue, m["generation", hub])
    return True


def _begin(m: Memory, hub: str, generation: int) -> None:
    m["generation", hub] = generation
    m["abort", hub] = m["coming", hub] == generation


def _hub_steps(node: str, protocol: Protocol) -> dict[str, Callable[[Memory], bool]]:
    def tell_up(m: Memory) -> bool:
        return protocol.tells_the_controller and _tell(m, node, "c", ("up first", node), protocol)

    def tell_down(m: Memory) -> bool:
        allowed = protocol.tells_the_other_nodes
        return allowed and _tell(m, "c", node, ("down first", node), protocol)

    def hear_up_first(m: Memory) -> bool:
        if not m["up first", node]:
            return False
        _hear_abort(m, "c", node, _pop(m, ("up first", node)), protocol)
        return True

    def hear_down_first(m: Memory) -> bool:
        if not m["down first", node]:
            return False
        _hear_abort(m, node, "c", _pop(m, ("down first", node)), protocol)
        return True

    def hear_up(m: Memory) -> bool:
        if not m["up", node]:
            return False
        about, number = _pop(m, ("up", node))
        if about == "done":
            m["ticket", node] = number
        elif about == "error":
            m["error", node] = True
        else:
            m["answer", node] = number
        return True

    def ask(m: Memory) -> bool:
        if m["wanted"] == m["asked", node]:
            return False
        m["asked", node] = m["wanted"]
        _push(m, ("down", node), m["wanted"])
        return True

    def recover(m: Memory) -> bool:
        if not m["down", node]:
            return False
        generation = _pop(m, ("down", node))
        _begin(m, node, generation)
        _push(m, ("up", node), ("recovered", generation))
        return True

    return {
        "tell the controller of an abort": tell_up,
        "tell the node of an abort": tell_down,
        "the controller hears of an abort": hear_up_first,
        "the node hears of an abort": hear_down_first,
        "the controller hears": hear_up,
        "ask to recover": ask,
        "recover": recover,
    }


def _controller(protocol: Protocol, *, dies: bool) -> list[Step]:
    def done(m: Memory) -> bool | str:
        if any(m["ticket", node] < 1 for node in NODES):
            return False
        if any(m["error", node] for node in NODES):
            return True
        if m["fails"] and not m["data", 1]:
            raise WrongError("a round that failed counts as done")
        return "go"

    def answered(m: Memory) -> bool:
        answers = [m["answer", node] == m["wanted"] for node in NODES]
        return all(answers) if protocol.all_nodes_begin_before_the_next_round else any(answers)

    def last(m: Memory) -> bool:
        # What is dead passes no ticket; that it is waited for at all is the rank's own step here.
        return all(m["ticket", node] == 2 for node in (("a",) if dies else NODES))

    return [
        Step("wait for the first tickets", done),
        Step("want a recovery", lambda m: m.__setitem__("wanted", 1)),
        Step("wait for the nodes", answered),
        Step("begin", lambda m: _begin(m, "c", 1)),
        Step("send the next command", lambda m: m.__setitem__("go", True), "go"),
        Step("wait for the last tickets", last),
    ]
