# SPDX-License-Identifier: Apache-2.0
"""The wire: ranks give requests to the engine of their node, which may sleep.

Mirrors core/internode_request_queue.cc `RankWire::Post`, `Release`, `Ring`, `WireUse::Await` and
core/internode_request_queue_engine_side.cc
`Take`, `Done`, `Sleep`. Two threads of one rank post some messages each, one after the other; the
engine moves each at once. What is stored and loaded is seen at once by all: the bell is rung and
read with whole barriers, and what they do is in sleep_model.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Memory, Model, Step, WrongError, expect

THREADS = ("x", "y")
_PLACES = 2


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    one_thread_posts_at_a_time: bool = True
    fills_before_it_posts: bool = True
    posts_before_it_rings: bool = True
    rings_before_it_looks_who_sleeps: bool = True
    hears_the_bell_before_it_looks: bool = True
    announces_its_sleep_before_it_compares: bool = True
    says_what_came_before_it_is_done: bool = True
    reuses_a_request_when_it_is_done: bool = True


def wire(protocol: Protocol | None = None, messages: tuple[int, int] = (2, 1)) -> Model:
    """Each of two threads posts so many messages; each thread has one request."""
    protocol = protocol or Protocol()
    cells: dict[Hashable, Any] = {"lock": "", "posted": 0, "taken": 0, "bell": 0, "heard": 0}
    cells.update({"sleeps": False, "asleep": False, "work": ""})
    for place in range(_PLACES):
        cells["queue", place] = ""
    programs: dict[str, list[Step]] = {"engine": _engine(protocol)}
    for thread, many in zip(THREADS, messages, strict=True):
        cells.update({("fields", thread): 0, ("came", thread): 0, ("done", thread): 0})
        cells.update({("loaded", thread): 0, ("looked", thread): False})
        programs[f"thread {thread}"] = [
            step
            for number in range(1, many + 1)
            for step in _post(thread, number, last=number == many, protocol=protocol)
        ]
    return Model(cells, programs, frozenset({"engine"}))


def _post(thread: str, number: int, *, last: bool, protocol: Protocol) -> list[Step]:
    def lock(m: Memory) -> bool:
        if protocol.one_thread_posts_at_a_time:
            if m["lock"]:
                return False
            m["lock"] = thread
        return True

    def unlock(m: Memory) -> None:
        if protocol.one_thread_posts_at_a_time:
            m["lock"] = ""

    def publish(m: Memory) -> None:
        m["posted"] = m["loaded", thread] + 1

    def queue(m: Memory) -> None:
        m["queue", m["loaded", thread] % _PLACES] = thread

    fill = Step("fill the request", lambda m: m.__setitem__(("fields", thread), number))
    load = Step("load posted", lambda m: m.__setitem__(("loaded", thread), m["posted"]))
    put = Step("queue it", queue)
    store = Step("store posted", publish)
    if protocol.fills_before_it_posts:
        posts = [Step("lock", lock), fill, load, put, store, Step("unlock", unlock)]
    else:
        posts = [Step("lock", lock), load, put, store, fill, Step("unlock", unlock)]

    def chime(m: Memory) -> None:
        m["bell"] += 1

    def look(m: Memory) -> None:
        m["looked", thread] = m["sleeps"]

    def wake(m: Memory) -> None:
        if m["looked", thread]:
            m["asleep"] = False

    ring = [Step("ring", chime), Step("look who sleeps", look)]
    if not protocol.rings_before_it_looks_who_sleeps:
        ring.reverse()
    ring.append(Step("wake", wake))

    def done(m: Memory) -> bool:
        return m["done", thread] >= number

    def came(m: Memory) -> None:
        expect(m["came", thread], number, "what came")

    waits = [Step("wait until it is done", done), Step("read what came", came)]
    if not protocol.reuses_a_request_when_it_is_done and not last:
        waits = []
    return [*posts, *ring, *waits] if protocol.posts_before_it_rings else [*ring, *posts, *waits]


def _engine(protocol: Protocol) -> list[Step]:
    def hear(m: Memory) -> None:
        m["heard"] = m["bell"]

    def take(m: Memory) -> str:
        if m["taken"] == m["posted"]:
            return "nothing"
        m["work"] = m["queue", m["taken"] % _PLACES]
        m["taken"] += 1
        return "move"

    def came(m: Memory) -> None:
        thread = m["work"]
        if m["fields", thread] != m["done", thread] + 1:
            raise WrongError(f"it moves message {m['fields', thread]} of {thread}")
        m["came", thread] = m["fields", thread]

    def done(m: Memory) -> None:
        m["done", m["work"]] += 1

    def announce(m: Memory) -> None:
        m["sleeps"] = True

    def sleep(m: Memory) -> None:
        # The kernel compares the bell and puts it to sleep at once.
        m["asleep"] = m["bell"] == m["heard"]

    def awake(m: Memory) -> str | bool:
        if m["asleep"]:
            return False
        m["sleeps"] = False
        m["work"] = ""
        return "again"

    moved = [Step("write what came", came, "move"), Step("say that it is done", done)]
    if not protocol.says_what_came_before_it_is_done:
        moved = [Step("say that it is done", done, "move"), Step("write what came", _late)]
    sleeps = [Step("announce that it sleeps", announce, "nothing"), Step("sleep", sleep)]
    if not protocol.announces_its_sleep_before_it_compares:
        sleeps = [Step("sleep", sleep, "nothing"), Step("announce that it sleeps", announce)]
    heard = [Step("hear the bell", hear, "again"), Step("take", take)]
    if not protocol.hears_the_bell_before_it_looks:
        heard = [Step("take", take, "again")]
        sleeps = [Step("hear the bell", hear, "nothing"), Step(sleeps[0].says, sleeps[0].act)]
        sleeps.append(Step("sleep", sleep))
    return [
        *heard,
        *moved,
        Step("go on", lambda _: "again"),
        *sleeps,
        Step("wake up", awake),
    ]


def _late(m: Memory) -> None:
    m["came", m["work"]] = m["fields", m["work"]]
