# SPDX-License-Identifier: Apache-2.0
"""The engines of two nodes when the session recovers: nothing of before arrives after it.

Mirrors engine/internode_progress_engine.cc `Serve`, engine/mpi_transport.cc `Flush`, `Drop`,
`Progress`, and core/internode_request_queue_engine_side.cc `Take`, `Flushed`,
core/internode_request_queue.cc `Follow`. A node has one rank, which posts in each round the
messages that it sends and those that it is to get, into the same buffers. In the first round
anything may end it at any moment; then the hubs recover (nodes_model.py), in either order, and the
other rounds are to give what was sent in them.

Messages of one tag arrive in the order in which they were sent, those of different tags in any.
Some are copied when they are sent, others when they arrive.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.model.model_checker import Memory, Model, Step, WrongError, expect

NODES = ("a", "b")
#: Of each node, the tags of its messages to the other one.
Tags = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    ranks_wait_until_it_is_flushed: bool = True
    takes_back_its_receives: bool = True
    tells_how_many_were_sent: bool = True
    drops_no_more_than_were_sent: bool = True
    drops_in_the_order_of_sends: bool = True
    waits_for_its_sends: bool = True
    forgets_what_has_ended: bool = True
    #: Both of these see to the same.
    takes_this_generation_only: bool = True
    skips_what_was_posted: bool = True


@dataclass(frozen=True)
class Post:
    """A request; it lies in the buffer of its tag."""

    sends: bool
    tag: int
    generation: int


@dataclass(frozen=True)
class Message:
    """What was sent; `data` is None as long as it is in the sender's buffer alone."""

    tag: int
    data: int | None


ONE_WAY: Tags = {"a": (1,), "b": ()}


def recovery(protocol: Protocol | None = None, tags: Tags = ONE_WAY, rounds: int = 3) -> Model:
    """A round that may fail anywhere, a recovery, and the other rounds."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {"go": False}
    programs: dict[str, list[Step]] = {}
    for node in NODES:
        cells.update({("abort", node): False, ("generation", node): 0, ("flushed", node): 0})
        cells.update({("posts", node): (), ("wanted", node): (), ("ended", node): ()})
        cells.update({("way", node): (), ("sent", node): 0, ("came", node): 0, ("told", node): -1})
        cells["rest", node] = False
        for tag in (*tags[node], *tags[_other(node)]):
            cells.update({("buffer", node, tag): -1, ("done", node, tag): 0, ("use", node, tag): 0})
    for node in NODES:
        programs[f"rank {node}"] = _rank(node, tags, rounds, protocol)
        programs[f"engine {node}"] = _engine(node, protocol)
        for tag in tags[node]:
            acts = {"copy": _copy, "deliver": _deliver}
            for says, act in acts.items():
                step = Step(f"{says} tag {tag}", partial(act, node=node, tag=tag), "again")
                programs[f"network, {says} {tag}"] = [step]
    restless = frozenset(name for name in programs if not name.startswith("rank"))
    programs["hubs"] = _hubs()
    return Model(cells, programs, restless)


def _other(node: str) -> str:
    return "b" if node == "a" else "a"


# ---- ranks and hubs -------------------------------------------------------------------------


def _rank(node: str, tags: Tags, rounds: int, protocol: Protocol) -> list[Step]:
    mine, theirs = tags[node], tags[_other(node)]

    def post(m: Memory, posted: tuple[int, ...], number: int) -> str | None:
        if number == 1 and m["abort", node]:
            return "rest"
        for tag in posted:
            if tag in mine:
                m["buffer", node, tag] = number
            m["use", node, tag] += 1
            m["posts", node] += (Post(tag in mine, tag, int(number > 1)),)
        return None

    def wait(m: Memory, number: int) -> bool | str:
        if any(m["done", node, tag] < m["use", node, tag] for tag in (*mine, *theirs)):
            return "rest" if number == 1 and m["abort", node] else False
        for tag in theirs:
            expect(m["buffer", node, tag], number, f"tag {tag}")
        return True

    def follow(m: Memory) -> bool:
        if protocol.ranks_wait_until_it_is_flushed and m["flushed", node] == 0:
            return False
        for tag in (*mine, *theirs):
            m["use", node, tag] = m["done", node, tag]
        return True

    def a_round(number: int) -> list[Step]:
        # Where it may fail each post is a step.
        both = (*theirs, *mine)
        parts = [(tag,) for tag in both] if number == 1 else [both]
        return [
            *(Step(f"post {part}", partial(post, posted=part, number=number)) for part in parts),
            Step(f"wait in round {number}", partial(wait, number=number)),
        ]

    return [
        *a_round(1),
        Step("rest", lambda m: m.__setitem__(("rest", node), True), "rest"),
        Step("take the next command", lambda m: m["go"]),
        Step("wait until the engine is ready", follow),
        *(step for number in range(2, rounds + 1) for step in a_round(number)),
    ]


def _hubs() -> list[Step]:
    def abort(m: Memory, node: str) -> None:
        m["abort", node] = True

    def begin(m: Memory, node: str) -> bool:
        if not all(m["rest", n] for n in NODES):
            return False
        m["generation", node] = 1
        return True

    return [
        *(Step(f"end the round on {node}", partial(abort, node=node)) for node in NODES),
        *(Step(f"recover {node}", partial(begin, node=node)) for node in NODES),
        Step("send the next command", lambda m: m.__setitem__("go", True)),
    ]


# ---- the network ----------------------------------------------------------------------------


def _first(m: Memory, node: str, tag: int) -> int | None:
    for i, message in enumerate(m["way", node]):
        if message.tag == tag:
            return i
    return None


def _without(all_of_them: tuple, which: int) -> tuple:
    return (*all_of_them[:which], *all_of_them[which + 1 :])


def _copy(m: Memory, *, node: str, tag: int) -> str | bool:
    """The network takes a message out of the sender's buffer: it is sent, and may not have come."""
    for i, message in enumerate(m["way", node]):
        if message.tag == tag and message.data is None:
            copied = Message(tag, m["buffer", node, tag])
            m["way", node] = (*m["way", node][:i], copied, *m["way", node][i + 1 :])
            m["ended", node] += (tag,)
            return "again"
    return False


def _take(m: Memory, node: str, which: int) -> int:
    """What a message brings; its send has ended."""
    message = m["way", node][which]
    m["way", node] = _without(m["way", node], which)
    m["came", _other(node)] += 1
    if message.data is not None:
        return int(message.data)
    m["ended", node] += (message.tag,)
    return int(m["buffer", node, message.tag])


def _deliver(m: Memory, *, node: str, tag: int) -> str | bool:
    to = _other(node)
    which = _first(m, node, tag)
    if which is None or tag not in m["wanted", to]:
        return False
    m["buffer", to, tag] = _take(m, node, which)
    m["wanted", to] = _without(m["wanted", to], m["wanted", to].index(tag))
    m["ended", to] += (tag,)
    return "again"


# ---- the engine -----------------------------------------------------------------------------


def _engine(node: str, protocol: Protocol) -> list[Step]:
    other = _other(node)

    def look(m: Memory) -> str:
        return "flush" if m["generation", node] != m["flushed", node] else "serve"

    def serve(m: Memory) -> str | bool:
        if m["ended", node]:
            for tag in m["ended", node]:
                m["done", node, tag] += 1
            m["ended", node] = ()
        elif m["posts", node]:
            post, m["posts", node] = m["posts", node][0], m["posts", node][1:]
            if protocol.takes_this_generation_only and post.generation != m["flushed", node]:
                return "again"
            if post.sends:
                m["way", node] += (Message(post.tag, None),)
                m["sent", node] += 1
            else:
                m["wanted", node] += (post.tag,)
        elif m["generation", node] == m["flushed", node]:
            return False
        return "again"

    def take_back(m: Memory) -> None:
        if protocol.takes_back_its_receives:
            m["wanted", node] = ()

    def tell(m: Memory) -> None:
        m["told", node] = m["sent", node]

    def drop(m: Memory) -> str | bool:
        if protocol.tells_how_many_were_sent:
            if m["told", other] < 0:
                return False
            if protocol.drops_no_more_than_were_sent and m["came", node] == m["told", other]:
                return "dropped"
        if not m["way", other]:
            enough = m["came", node] >= m["told", other] or not protocol.tells_how_many_were_sent
            return "dropped" if enough else False
        _take(m, other, 0 if protocol.drops_in_the_order_of_sends else len(m["way", other]) - 1)
        return "drop"

    def sends(m: Memory) -> bool:
        waiting = any(message.data is None for message in m["way", node])
        return not (waiting and protocol.waits_for_its_sends)

    def flushed(m: Memory) -> str:
        if m["wanted", node] and protocol.takes_back_its_receives:
            raise WrongError("a receive of before is left")
        if protocol.forgets_what_has_ended:
            m["ended", node] = ()
        if protocol.skips_what_was_posted:
            m["posts", node] = ()
        m["flushed", node] = 1
        return "again"

    return [
        Step("look at the generation", look, "again"),
        Step("serve", serve, "serve"),
        Step("take back its receives", take_back, "flush"),
        Step("tell how many were sent", tell),
        Step("drop what is missing", drop, "drop"),
        Step("wait for its sends", sends, "dropped"),
        Step("is ready", flushed),
    ]
