# SPDX-License-Identifier: Apache-2.0
"""Exposed buffers: memory that the ranks of a team read in place until all of them release it."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm.runtime import DataType
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.places import ON_GPUS
from tests.runtime.tensors_of_ranks import put_each, write_each
from tvm_ipc.errors import DeadlineError, WorkerDiedError, WorkerError
from tvm_ipc.packed_functions import MAX_EXPOSED, ReduceKind

OpenSession = Callable[..., "Team"]
#: That the n-th tensor of each rank was shown shows in what these values are.
SCALE = 1000


class Team:
    """A session of threads, and shows in a team of it."""

    def __init__(self, session: tvm_ipc.Session, team: Any = 0, size: int | None = None) -> None:
        self.session = session
        self.team = team
        self.ranks = session.num_workers
        self.size = self.ranks if size is None else size

    def call(self, name: str, *arguments: Any) -> Any:
        return self.session.get_global_func(f"tvm_ipc.{name}")(*arguments)

    def different(self, of: Callable[[int], Any]) -> Any:
        """A tensor that each rank has another value of, in memory that peers map."""
        values = [np.asarray(of(rank)) for rank in range(self.ranks)]
        allocate = self.session.get_global_func("tests.ipc_tensor")
        size, shape = max(1, values[0].nbytes), Shape(values[0].shape)
        tensor = allocate(size, shape, DataType(str(values[0].dtype)))
        write_each(tensor, values)
        return tensor

    def expose(self, tensor: Any) -> Any:
        return self.call("expose", tensor, self.team)

    def peer(self, shown: Any, shift: int, *shape: int) -> Any:
        return self.call("peer_view", shown, shift, Shape(shape))

    def release(self, *shown: Any) -> None:
        self.call("release", self.team, *shown)


@pytest.fixture(scope="module")
def opened(opened: Callable[[int], tvm_ipc.Session]) -> OpenSession:
    return lambda ranks, team=0, size=None: Team(opened(ranks), team, size)


@pytest.fixture
def pair(opened: OpenSession) -> Team:
    return opened(2)


@pytest.fixture
def new_pair() -> Iterator[Team]:
    """Return a session in which no other test has exposed a tensor."""
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        yield Team(session)


def raises(team: Team, message: str, kind: str = "ValueError") -> None:
    with pytest.raises(WorkerError, match=re.escape(message).replace("NUMBER", r"\d+")) as error:
        team.session.sync()
    assert {one.kind for one in error.value.errors} - {"PeerError"} == {kind}


# ---- what peers have shown ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float64", "uint32"])
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_each_rank_reads_what_each_has_shown(
    ranks: int, count: int, dtype: str, opened: OpenSession
) -> None:
    team = opened(ranks)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = [(np.arange(count) % 25 + 25 * rank).astype(kind) for rank in range(ranks)]
    for where in (team.different, lambda of: elsewhere(team, of)):
        shown = team.expose(where(lambda rank: values[rank]))
        for shift in range(-ranks, ranks + 1):
            peer = team.peer(shown, shift, count)
            for rank in range(ranks):
                wanted = values[(rank + shift) % ranks]
                np.testing.assert_array_equal(team.session.get(peer, rank=rank), wanted)
        team.release(shown)
    team.session.sync()


def elsewhere(team: Team, of: Callable[[int], Any]) -> Any:
    """A tensor in memory that peers do not map: it is copied."""
    return put_each(team.session, map(of, range(team.ranks)))


@pytest.mark.skipif(ON_GPUS, reason="peers on GPUs get a copy when they ask for it")
def test_peers_read_it_where_it_lies(pair: Team) -> None:
    tensor = pair.different(lambda rank: np.full(4, rank, "float32"))
    shown = pair.expose(tensor)
    peer = pair.peer(shown, 1, 2, 2)
    write_each(tensor, [np.full(4, 10 + rank, "float32") for rank in range(2)])
    np.testing.assert_array_equal(pair.session.get(peer, rank=0), np.full((2, 2), 11))
    pair.release(shown)


def test_numbers_belong_to_each_other_in_the_order_of_shows(opened: OpenSession) -> None:
    """More than there are places at a time, hidden in parts, asked for in any order."""
    team = opened(3)
    random = np.random.default_rng(0)
    open_shows: list[tuple[int, Any]] = []
    for number in range(3 * MAX_EXPOSED):
        tensor = team.different(lambda rank, n=number: np.full(3, SCALE * rank + n, "float32"))
        open_shows.append((number, team.expose(tensor)))
        which, shown = open_shows[random.integers(len(open_shows))]
        shift = int(random.integers(-3, 4))
        found = team.session.get(team.peer(shown, shift, 3), rank=1)
        assert set(found.tolist()) == {SCALE * ((1 + shift) % 3) + which}
        if len(open_shows) == 20:
            random.shuffle(open_shows)
            team.release(*(one for _, one in open_shows[:15]))
            del open_shows[:15]
            open_shows.sort(key=lambda one: one[0])
    team.release(*(one for _, one in open_shows))
    team.session.sync()


def test_as_many_as_there_may_be(new_pair: Team) -> None:
    tensors = [
        new_pair.different(lambda rank: np.full(1, rank, "int32")) for _ in range(MAX_EXPOSED)
    ]
    for _ in range(3):
        shown = [new_pair.expose(tensor) for tensor in tensors]
        new_pair.release(*shown)
    shown = [new_pair.expose(tensor) for tensor in tensors]
    new_pair.expose(tensors[0])
    raises(new_pair, "needs the entry of tensor", "RuntimeError")
    del shown
    again = [new_pair.expose(tensor) for tensor in tensors]  # the session has recovered
    new_pair.release(*again)
    new_pair.session.sync()


def test_what_was_dropped_stays_shown(new_pair: Team) -> None:
    dropped = new_pair.expose(new_pair.different(lambda rank: np.full(8, rank, "float32")))
    peer = new_pair.peer(dropped, 1, 8)
    del dropped
    for _ in range(3):  # the memory is not given to anybody else
        new_pair.different(lambda rank: np.full(8, -1, "float32"))
    np.testing.assert_array_equal(new_pair.session.get(peer, rank=1), np.zeros(8))
    tensor = new_pair.different(lambda rank: np.zeros(1, "float32"))
    for _ in range(MAX_EXPOSED - 1):
        new_pair.release(new_pair.expose(tensor))
    new_pair.session.sync()
    new_pair.expose(tensor)
    raises(new_pair, "A tensor that was dropped without a release stays exposed", "RuntimeError")


def test_in_two_teams_at_once(opened: OpenSession) -> None:
    rows, columns = (
        opened(4, Shape(division), 2) for division in ([2, 0, 1, 2, 3], [2, 0, 2, 1, 3])
    )
    tensor = rows.different(lambda rank: np.full(5, rank, "float32"))
    first, second = rows.expose(tensor), columns.expose(tensor)
    beside, below = rows.peer(first, 1, 5), columns.peer(second, 1, 5)
    assert [rows.session.get(beside, rank=rank)[0] for rank in range(4)] == [1, 0, 3, 2]
    assert [rows.session.get(below, rank=rank)[0] for rank in range(4)] == [2, 3, 0, 1]
    rows.release(first)
    columns.release(second)
    rows.session.sync()


def test_teams_by_id(opened: OpenSession) -> None:
    team = opened(4)
    team.team = team.session.team([3, 1, 0, 2]).id
    shown = team.expose(team.different(lambda rank: np.full(2, rank, "float32")))
    peer = team.peer(shown, 1, 2)
    assert [team.session.get(peer, rank=rank)[0] for rank in range(4)] == [2, 0, 3, 1]
    team.release(shown)
    team.session.sync()


# ---- what is refused ------------------------------------------------------------------------


def test_what_is_hidden_is_hidden(pair: Team) -> None:
    tensor = pair.different(lambda rank: np.zeros(4, "float32"))
    shown = pair.expose(tensor)
    pair.release(shown)
    pair.peer(shown, 1, 4)
    raises(
        pair,
        "peer_view: tensor NUMBER was released before; read an exposed tensor before its release",
    )
    shown = pair.expose(tensor)
    pair.release(shown)
    pair.release(shown)
    raises(pair, "release: tensor NUMBER was released before")
    shown = pair.expose(tensor)
    pair.release(shown, shown)
    raises(pair, "release: tensor NUMBER is given twice")


def test_what_was_shown_before_an_error(pair: Team) -> None:
    tensor = pair.different(lambda rank: np.zeros(4, "float32"))
    shown = pair.expose(tensor)
    pair.session.sync()  # both ranks have shown it
    pair.peer(shown, 1, 5)
    raises(pair, "peer_view: 4 x float32 were exposed, but the shape has 5 elements")
    pair.peer(shown, 1, 4)
    recovered = "the session has recovered from an error since tensor NUMBER was exposed"
    raises(pair, f"peer_view: {recovered}")
    pair.release(shown)
    raises(pair, f"release: {recovered}")
    again = pair.expose(tensor)
    pair.peer(again, 1, 4)
    pair.release(again)
    pair.session.sync()


def test_ranks_that_show_different_tensors(pair: Team) -> None:
    one = pair.different(lambda rank: np.zeros(4, "float32"))
    other = pair.different(lambda rank: np.zeros(6, "float16"))
    apart = pair.session.get_global_func("tests.call_elsewhere")
    shown = apart(1, "tvm_ipc.expose", "tvm_ipc.expose", 2, one, 0, other, 0)
    shapes = [shown, 1, Shape([4]), shown, 1, Shape([6])]
    apart(1, "tvm_ipc.peer_view", "tvm_ipc.peer_view", 3, *shapes)
    with pytest.raises(WorkerError, match=r"the ranks disagree: tensor \d+ that rank") as error:
        pair.session.sync()
    assert "MismatchError" in {one.kind for one in error.value.errors}
    assert "6 x float16" in str(error.value)
    assert "4 x float32" in str(error.value)


def test_ranks_that_hide_different_tensors(pair: Team) -> None:
    tensor = pair.different(lambda rank: np.zeros(4, "float32"))
    one, other = pair.expose(tensor), pair.expose(tensor)
    hide = pair.session.get_global_func("tests.call_elsewhere")
    hide(1, "tvm_ipc.release", "tvm_ipc.release", 2, 0, one, 0, other)
    raises(pair, "the ranks disagree: rank 0 called release of 1 tensors", "MismatchError")


def test_a_rank_that_does_not_show() -> None:
    with tvm_ipc.Session(2, threads=True, timeout=1) as session:
        session.import_python_module("tests.runtime.worker_functions")
        team = Team(session)
        tensor = team.different(lambda rank: np.zeros(3, "float32"))
        apart = session.get_global_func("tests.call_elsewhere")
        shown = apart(0, "tvm_ipc.expose", "runtime.disco.worker_rank", 2, tensor, 0)
        apart(0, "tvm_ipc.peer_view", "runtime.disco.worker_rank", 3, shown, 1, Shape([3]))
        with pytest.raises((WorkerError, DeadlineError)) as error:
            session.sync()
        message = (
            r"peer_view of 3 x float32 waited 1 s for rank 1 \(pid \d+\); it has exposed 0 tensors"
        )
        assert re.search(message, str(error.value))


def test_a_team_that_it_was_not_shown_to(opened: OpenSession) -> None:
    team = opened(4)
    shown = team.expose(team.different(lambda rank: np.zeros(4, "float32")))
    team.call("release", 1, shown)
    raises(team, "release: a tensor was exposed to team 0, not to team 1")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "peer_view",
            (3, 0, Shape([1])),
            "peer_view: exposed must be a value that expose returned, not int",
        ),
        ("release", (), "release: argument 0 is a team: its id, or a shape that divides the ranks"),
        ("release", ("team",), "release: argument 0 is a team"),
        ("release", (0, 3), "release: exposed must be a value that expose returned, not int"),
    ],
)
def test_wrong_arguments(name: str, arguments: Any, message: str, pair: Team) -> None:
    pair.call(name, *arguments)
    raises(pair, message, "TypeError")


def test_a_shown_of_another_rank_or_session(opened: OpenSession) -> None:
    team = opened(2)
    session = team.session
    tensor = team.different(lambda rank: np.zeros(4, "float32"))
    keep = session.get_global_func("tests.keep")
    keep(team.expose(tensor))
    session.sync()
    swapped = session.get_global_func("tests.call_elsewhere")(
        0, "tests.give_kept", "tests.give_kept", 1, 1, 0
    )
    team.peer(swapped, 1, 4)
    raises(
        team,
        "peer_view: the tensor was exposed by rank NUMBER, and this is rank NUMBER; pass a tensor",
    )
    keep(team.expose(tensor))
    session.sync()
    with tvm_ipc.Session(2, threads=True, timeout=60) as other:
        mine = other.get_global_func("tests.call_elsewhere")(
            0, "tests.give_kept", "tests.give_kept", 1, 0, 1
        )
        other.get_global_func("tvm_ipc.peer_view")(mine, 1, Shape([4]))
        with pytest.raises(
            WorkerError, match=r"was exposed by rank [01] of another session, and this"
        ):
            other.sync()


def test_two_threads_of_a_rank_in_one_team(pair: Team) -> None:
    pair.session.import_python_module("tests.runtime.team_functions")
    refusal = pair.session.get_global_func("tests.wait_in_two_threads")()
    said = refusal.debug_get_from_remote(0)
    wanted = "two threads of rank 0 are in a collective at the same time"
    if ON_GPUS:
        wanted = "on it only the worker's own thread can call collectives"
    assert wanted in said
    pair.session.sync()


# ---- ranks that fail, and end ---------------------------------------------------------------


def test_a_peer_that_fails_before_it_shows(pair: Team) -> None:
    session = pair.session
    tensor = pair.different(lambda rank: np.full(4, rank, "float32"))
    session.get_global_func("tests.fail_on")(1, "ValueError", "told to")
    shown = pair.expose(tensor)
    pair.peer(shown, 1, 4)
    with pytest.raises(WorkerError, match="told to"):
        session.sync()
    for _ in range(3):
        again = pair.expose(tensor)
        found = session.get(pair.peer(again, 1, 4), rank=0)
        np.testing.assert_array_equal(found, np.ones(4))
        pair.release(again)
    session.sync()


def test_a_wait_ends_when_another_rank_fails(pair: Team) -> None:
    """Rank 0 waits for what rank 1 does not show, since it fails while the other waits."""
    session = pair.session
    tensor = pair.different(lambda rank: np.zeros(4, "float32"))
    apart = session.get_global_func("tests.call_elsewhere")
    shown = apart(0, "tvm_ipc.expose", "tests.sleep_on", 2, tensor, 0, 1, 0.3)
    apart(
        0, "tvm_ipc.peer_view", "tests.fail_on", 3, shown, 1, Shape([4]), 1, "ValueError", "told to"
    )
    with pytest.raises(WorkerError, match="told to") as error:
        session.sync()
    kinds = {one.kind for one in error.value.errors}
    assert kinds <= {"ValueError", "PeerError"}


def test_memory_of_what_was_shown_goes_back(pair: Team) -> None:
    """When it was hidden, or when the rank shows again after an error."""

    def in_use() -> int:
        statistics = pair.call("arena_stats")
        return int(json.loads(statistics.debug_get_from_remote(1))["in_use"])

    gc.collect()  # errors of other tests keep references to tensors of the session
    tensor = elsewhere(pair, lambda rank: np.zeros(1000, "float64"))
    pair.release(pair.expose(tensor))
    before = in_use()
    shown = [pair.expose(tensor) for _ in range(10)]
    assert in_use() >= before + 10 * 8000
    pair.release(*shown)
    del shown
    assert in_use() == before
    shown = [pair.expose(tensor) for _ in range(10)]
    pair.peer(shown[0], 1, 5)
    raises(pair, "the shape has 5 elements")
    del shown
    pair.release(pair.expose(tensor))
    assert in_use() == before


@pytest.mark.parametrize("ranks", [2, 3])
def test_between_processes(ranks: int) -> None:
    """Ranks that share nothing but the memory of the session."""
    with tvm_ipc.Session(ranks, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        team = Team(session)
        for repetition in range(20):
            values = [np.arange(1000) + 1000 * rank + repetition for rank in range(ranks)]
            for where in (team.different, lambda of: elsewhere(team, of)):
                shown = team.expose(where(lambda rank, values=values: values[rank]))
                for shift in range(ranks):
                    found = session.get(team.peer(shown, shift, 10, 100), rank=ranks - 1)
                    wanted = values[(ranks - 1 + shift) % ranks].reshape(10, 100)
                    np.testing.assert_array_equal(found, wanted)
                team.release(shown)
        session.sync()


def test_a_worker_that_dies_while_others_wait_for_what_it_shows() -> None:
    with tvm_ipc.Session(3, timeout=30) as session:
        session.import_python_module("tests.runtime.worker_functions")
        team = Team(session)
        tensor = team.different(lambda rank: np.zeros(4, "float32"))
        session.sync()
        os.kill(session.pids[2], signal.SIGSTOP)
        shown = team.expose(tensor)
        team.peer(shown, 1, 4)
        time.sleep(0.2)
        os.kill(session.pids[2], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            session.sync()


def test_what_a_peer_gave_may_be_kept_longer_than_the_session() -> None:
    from tvm_ffi import get_global_func

    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        team = Team(session)
        shown = team.expose(team.different(lambda rank: np.full(4, rank, "float32")))
        session.get_global_func("tests.keep")(team.peer(shown, 1, 4))
        team.release(shown)
        session.sync()
    for rank in range(2):  # what is there is nobody's business any more, but there is memory
        assert get_global_func("tests.give_kept")(rank).numpy().shape == (4,)


# ---- over a link ----------------------------------------------------------------------------

LATE = 0.15


def seconds(team: Team, count: int, shifts: list[int], **link: float) -> float:
    """How long a rank of two waits over a link for chunks of so many bytes that are shown."""
    session = team.session
    tensor = team.different(lambda rank: np.full(count, rank, "uint8"))
    session.sync()
    session.emulate_link(**link)
    try:
        session.sync()
        start = time.monotonic()
        shown = [team.expose(tensor) for _ in shifts]
        peers = [team.peer(one, shift, count) for one, shift in zip(shown, shifts, strict=True)]
        session.sync()
        passed = time.monotonic() - start
    finally:
        session.emulate_link()
    for peer, shift in zip(peers, shifts, strict=True):
        np.testing.assert_array_equal(session.get(peer, rank=0), np.full(count, shift % 2))
    team.release(*shown)
    session.sync()
    return passed


@pytest.mark.skipif(ON_GPUS, reason="links are emulated between CPUs alone")
def test_chunks_that_are_on_their_way_at_the_same_time_are_late_once(pair: Team) -> None:
    assert seconds(pair, 1000, [1], latency=LATE) >= LATE
    assert seconds(pair, 1000, [1, -1, 1, 1], latency=LATE) >= LATE


@pytest.mark.skipif(ON_GPUS, reason="links are emulated between CPUs alone")
def test_chunks_share_the_bandwidth_of_the_link(pair: Team) -> None:
    """One after the other; without that these would all be there after the time of one."""
    assert seconds(pair, 1000, [1] * 4, bandwidth=1000 / LATE) >= 4 * LATE
    assert seconds(pair, 0, [1] * 4, bandwidth=1) < 4


@pytest.mark.skipif(ON_GPUS, reason="links are emulated between CPUs alone")
def test_own_chunks_do_not_travel(pair: Team) -> None:
    assert seconds(pair, 10, [0, 0, 2, -2], latency=1000) < 100


@pytest.mark.skipif(ON_GPUS, reason="links are emulated between CPUs alone")
def test_what_has_arrived_once_is_there(pair: Team) -> None:
    shown = pair.expose(pair.different(lambda rank: np.full(4, rank, "float32")))
    pair.session.emulate_link(latency=0.01)
    pair.peer(shown, 1, 4)
    pair.session.emulate_link(latency=1000)
    again = pair.peer(shown, 1, 4)  # returns
    pair.session.emulate_link()
    np.testing.assert_array_equal(pair.session.get(again, rank=1), np.zeros(4))
    pair.release(shown)
    pair.session.sync()


# ---- parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int32", "float64"])
@pytest.mark.parametrize("kind", ["sum", "max", "avg", "prod", "tree_sum"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_reduction_of_parts_has_the_bits_of_reduce_scatter(
    ranks: int, kind: str, dtype: str, opened: OpenSession
) -> None:
    team = opened(ranks)
    session = team.session
    count = 37
    random = np.random.default_rng(ranks)
    number = int(ReduceKind[kind.upper()])
    np_type = np.dtype(getattr(ml_dtypes, dtype, dtype))
    drawn = random.normal(0, 30, (ranks, ranks * count)).astype(np_type)
    whole = team.different(lambda rank: drawn[rank])
    wanted = session.empty((count,), dtype)
    team.call("reduce_scatter", whole, number, 0, 0, wanted)
    shown = [
        team.expose(
            team.call("own_slice", whole, 0, k, count * np_type.itemsize, 0, Shape([count]))
        )
        for k in range(ranks)  # what belongs to the rank k places after
    ]
    parts = [team.peer(shown[k], -k, count) for k in range(ranks)]
    found = session.empty((count,), dtype)
    team.call("reduce_slices", number, 0, *parts, found)
    team.release(*shown)
    for rank in range(ranks):
        a, b = session.get(found, rank=rank), session.get(wanted, rank=rank)
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_are_joined_in_the_order_of_the_places(ranks: int, opened: OpenSession) -> None:
    team = opened(ranks)
    own = team.different(lambda rank: np.arange(3, dtype="float32") + 10 * rank)
    shown = team.expose(own)
    parts = [team.peer(shown, k, 3) for k in range(ranks)]
    recv = team.session.put(np.full(3 * ranks + 2, -1, "float32"))
    places = [number for k in range(ranks) for number in (k, 12, 4)]
    team.call("assemble", 0, Shape(places), *parts, recv)
    # What lies in its place already is left alone.
    inside = [team.call("own_slice", recv, 0, k, 12, 4, Shape([3])) for k in range(ranks)]
    team.call("assemble", 0, Shape(places), *inside, recv)
    team.release(shown)
    wanted = [-1, *(10 * rank + k for rank in range(ranks) for k in range(3)), -1]
    for rank in range(ranks):
        assert team.session.get(recv, rank=rank).tolist() == wanted
        mine = [team.session.get(one, rank=rank).tolist() for one in inside]
        assert mine == [[10 * ((rank + k) % ranks) + i for i in range(3)] for k in range(ranks)]


BIG = 1 << 62


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (0, 0, 20, Shape([4])),
            "own_slice: 16 bytes at offset 20 do not lie in a tensor of 32 bytes",
        ),
        ((1, 16, 0, Shape([5])), "own_slice: 20 bytes at offset"),
        ((0, 16, -4, Shape([1])), "own_slice: 4 bytes at offset -4 do not lie"),
        ((1, BIG, BIG, Shape([1])), "do"),
        ((0, 0, 0, Shape([-1])), "own_slice: the shape has no size in bytes"),
    ],
)
def test_parts_that_do_not_lie_in_the_tensor(arguments: Any, message: str, pair: Team) -> None:
    shift, stride, offset, shape = arguments
    x = pair.session.put(np.zeros(8, "float32"))
    pair.call("own_slice", x, Shape([2, 0, 1]), shift, stride, offset, shape)
    with pytest.raises(WorkerError, match=message):
        pair.session.sync()


def test_shifts_are_taken_modulo_the_team(opened: OpenSession) -> None:
    team = opened(3)
    x = team.session.put(np.arange(3, dtype="float32"))
    for shift in (-(1 << 63), -4, -1, 0, 2, 5, (1 << 63) - 1):
        part = team.call("own_slice", x, 0, shift, 4, 0, Shape([1]))
        for rank in range(3):
            assert team.session.get(part, rank=rank)[0] == (rank + shift) % 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x, y: (0, 0, x, y), "reduce_slices: 1 parts for a team of 2"),
        (lambda x, y: (0, 0, x, x, y, y), "reduce_slices: 3 parts for a team of 2"),
        (lambda x, y: (0, 0), "reduce_slices: argument 2 is a tensor, not missing"),
        (lambda x, y: (9, 0, x, x, y), "reduce_slices: there is no reduction 9"),
        (lambda x, y: (0, 99, x, x, y), "reduce_slices: there is no team 99"),
        (lambda x, y: (0, 0, x, y, y), "reduce_slices: part 1 and recv overlap"),
        (lambda x, y: (0.5, 0, x, x, y), "reduce_slices: argument 0 is the number of a reduction"),
        (lambda x, y: (0, 0, x, 3, y), "reduce_slices: argument 3 is a tensor, not int"),
    ],
)
def test_parts_that_cannot_be_reduced(arguments: Any, message: str, pair: Team) -> None:
    x, y = (pair.session.put(np.zeros(4, "float32")) for _ in range(2))
    pair.call("reduce_slices", *arguments(x, y))
    with pytest.raises(WorkerError, match=re.escape(message)):
        pair.session.sync()


def test_parts_of_another_size_cannot_be_reduced(pair: Team) -> None:
    x, y = pair.session.put(np.zeros(4, "float32")), pair.session.put(np.zeros(5, "float32"))
    pair.call("reduce_slices", 0, 0, x, x, y)
    raises(pair, "reduce_slices: part 0 has 4 x float32, recv has 5 x float32; they must be equal")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([0, 4, 0], "assemble: 3 numbers for 2 slices; each needs a shift, a stride and an offset"),
        (
            [0, 0, 0, 0, 0, 20],
            "assemble: slice 1 of 16 bytes at offset 20 exceeds recv of 32",
        ),
        (
            [0, 0, -4, 0, 0, 0],
            "assemble: slice 0 of 16 bytes at offset -4 exceeds recv of 32",
        ),
    ],
)
def test_parts_that_cannot_be_joined(places: list[int], message: str, pair: Team) -> None:
    x, recv = pair.session.put(np.zeros(4, "float32")), pair.session.put(np.zeros(8, "float32"))
    pair.call("assemble", 0, Shape(places), x, x, recv)
    raises(pair, message)


def test_a_part_that_lies_elsewhere_in_the_whole_is_not_joined(pair: Team) -> None:
    recv = pair.session.put(np.zeros(8, "float32"))
    inside = pair.call("view", recv, 4, Shape([4]))
    pair.call("assemble", 0, Shape([0, 0, 0]), inside, recv)
    raises(pair, "assemble: slice 0 overlaps recv, but is not at its own position")
    other = pair.session.put(np.zeros(4, "float16"))
    pair.call("assemble", 0, Shape([0, 0, 0]), other, recv)
    raises(pair, "assemble: slice 0 is float16, recv is float32")
