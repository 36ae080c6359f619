# SPDX-License-Identifier: Apache-2.0
"""Who joins a session from other machines: those who know its secret, each once, nobody else."""

from __future__ import annotations

import errno
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tvm_ipc.errors import DeadlineError, IPCError
from tvm_ipc.nodes import admission as door_module
from tvm_ipc.nodes.admission import MOST_PENDING, Admission
from tvm_ipc.nodes.handshake import (
    ANSWER,
    HEAD,
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    Key,
    PeerIdentity,
    enter,
    pack_answer,
    pack_claim,
    unpack_claim,
    versions,
)

HOST = "127.0.0.1"
AGENT = PeerIdentity(0, "agent")
OTHER = PeerIdentity(1, "agent")
WORKER = PeerIdentity(1, "worker", 3)
SECONDS = 20.0  # for what takes milliseconds


@pytest.fixture
def key() -> Key:
    return Key.new()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def attend(door: Admission, *waited: Future[Any]) -> None:
    """Hear who comes until all of these have ended."""
    end = time.monotonic() + SECONDS
    while not all(future.done() for future in waited):
        assert time.monotonic() < end, "nobody is heard any more"
        door.poll(0.01)


def stranger(door: Admission) -> socket.socket:
    return socket.create_connection(door.address, SECONDS)


def first_message(connection: socket.socket) -> bytes:
    """The nonce of the door."""
    data = b""
    while len(data) < len(HELLO) + NONCE_BYTES:
        piece = connection.recv(len(HELLO) + NONCE_BYTES - len(data))
        assert piece
        data += piece
    assert data.startswith(HELLO)
    return data[len(HELLO) :]


def second_message(key: Key, nonce: bytes, place: PeerIdentity = AGENT) -> bytes:
    own, claim = bytes(NONCE_BYTES), pack_claim(place, versions())
    return HEAD.pack(HELLO, own, len(claim)) + claim + key.of_joiner(nonce, own, claim)


def heard_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except ConnectionResetError:  # it was sent away with something unread
        pass
    return data


def test_all_join_and_the_door_closes(key: Key, pool: ThreadPoolExecutor) -> None:
    places = [AGENT, OTHER, *(PeerIdentity(k // 2, "worker", k) for k in range(4))]

    def join(place: PeerIdentity) -> socket.socket:
        connection = enter(key, place, [door.address], SECONDS)
        connection.sendall(f"I am {place}\n".encode())  # at once: nothing of it may get lost
        return connection

    with Admission(key, places, HOST) as door:
        inside = {place: pool.submit(join, place) for place in places}
        door.wait(SECONDS)
        assert door.pending == 0 and not door.missing
        with pytest.raises(ConnectionRefusedError):
            stranger(door)
        assert door.poll() == {}
    for place, future in inside.items():
        with future.result() as joiner, door.admitted[place] as controller:
            assert controller.gettimeout() is None and joiner.gettimeout() is None
            assert not controller.get_inheritable()
            assert controller.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert joiner.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert controller.makefile().readline() == f"I am {place}\n"
            controller.sendall(b"welcome")
            assert joiner.recv(7) == b"welcome"


def test_wrong_secret(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT], HOST) as door:
        for other in (Key.new(), Key(key.secret, bytes(16)), Key(bytes(32), key.session)):
            future = pool.submit(enter, other, AGENT, [door.address], SECONDS)
            attend(door, future)
            with pytest.raises(IPCError, match=r"agent of node 0 .* does not know the secret"):
                future.result()
        assert door.missing == (AGENT,) and door.pending == 3


def test_what_was_recorded_proves_nothing(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT], HOST) as door, stranger(door) as first, stranger(door) as second:
        message = pool.submit(first_message, first)
        other = pool.submit(first_message, second)
        attend(door, message, other)
        recorded = second_message(key, message.result())
        assert message.result() != other.result()
        second.sendall(recorded)  # the first one has not even sent it
        end = pool.submit(heard_to_the_end, second)
        attend(door, end)
        assert end.result() == ANSWER.pack(0, 0) + bytes(PROOF_BYTES)
        assert door.missing
        first.sendall(recorded)
        door.wait(SECONDS)
        door.admitted[AGENT].close()


def test_a_proof_sent_back_proves_nothing(key: Key, pool: ThreadPoolExecutor) -> None:
    assert key.of_listener(b"a") != key.of_joiner(b"a")
    assert key.of_listener(b"a", b"b") != key.of_listener(b"ab")
    with socket.create_server((HOST, 0)) as mirror:
        future = pool.submit(enter, key, AGENT, [mirror.getsockname()[:2]], SECONDS)
        with mirror.accept()[0] as connection:
            connection.sendall(HELLO + bytes(NONCE_BYTES))
            message = connection.recv(4096)
            connection.sendall(ANSWER.pack(1, 0) + message[-PROOF_BYTES:])
            with pytest.raises(IPCError, match="does not know the secret"):
                future.result()


def test_a_claim_that_was_changed_on_its_way(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT, OTHER], HOST) as door, socket.create_server((HOST, 0)) as middle:
        future = pool.submit(enter, key, AGENT, [middle.getsockname()[:2]], SECONDS)
        with middle.accept()[0] as joiner, stranger(door) as connection:
            nonce = pool.submit(first_message, connection)
            attend(door, nonce)
            joiner.sendall(HELLO + nonce.result())
            message = joiner.recv(4096)
            claimed, other = pack_claim(AGENT, versions()), pack_claim(OTHER, versions())
            assert claimed in message
            connection.sendall(message.replace(claimed, other))
            answer = pool.submit(heard_to_the_end, connection)
            attend(door, answer)
            joiner.sendall(answer.result())
            with pytest.raises(IPCError, match="does not know the secret"):
                future.result()
        assert len(door.missing) == 2


def test_a_place_is_taken_once(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT, WORKER], HOST) as door:
        first = pool.submit(enter, key, AGENT, [door.address], SECONDS)
        attend(door, first)
        again = pool.submit(enter, key, AGENT, [door.address], SECONDS)
        unknown = pool.submit(enter, key, PeerIdentity(1, "worker", 4), [door.address], SECONDS)
        attend(door, again, unknown)
        with pytest.raises(IPCError, match="agent of node 0: another process has joined under th"):
            again.result()
        with pytest.raises(IPCError, match="worker 4 of node 1: the session expects no such proc"):
            unknown.result()
        assert door.missing == (WORKER,) and not door.refused
        first.result().close()
        door.admitted[AGENT].close()


def test_other_versions_are_refused_and_both_named(key: Key, pool: ThreadPoolExecutor) -> None:
    assert "tvm-ipc " in versions() and "apache-tvm " in versions() and "Python 3." in versions()
    both = "it runs tvm-ipc 9, and the controller tvm-ipc 8"
    with Admission(key, [AGENT, OTHER], HOST, runs="tvm-ipc 8") as door:
        future = pool.submit(enter, key, OTHER, [door.address], SECONDS, "tvm-ipc 9")
        with pytest.raises(IPCError, match=f"agent of node 1 at 127.0.0.1:.*{both}"):
            door.wait(SECONDS)
        with pytest.raises(IPCError, match=both):
            future.result()


HOSTILE = {
    "nothing": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": random.Random(1).randbytes(5000),
    "half of the head": HELLO + bytes(10),
    "a length above the limit": HEAD.pack(HELLO, bytes(NONCE_BYTES), 1025) + bytes(5000),
    "zeros": bytes(100_000),
}


def test_strangers_are_sent_away(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT], HOST) as door:
        for sent in HOSTILE.values():
            with stranger(door) as early:
                early.sendall(sent)
            with stranger(door) as reset:
                # No goodbye, but a reset.
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                reset.sendall(sent[:50])
        staying = [stranger(door) for _ in HOSTILE]
        for connection, sent in zip(staying, HOSTILE.values(), strict=True):
            connection.sendall(sent)
        future = pool.submit(enter, key, AGENT, [door.address], SECONDS)
        door.wait(SECONDS)
        assert door.pending == 3 * len(HOSTILE)
        for connection in staying:  # those that were still allowed to try, too
            assert len(heard_to_the_end(connection)) <= len(HELLO) + NONCE_BYTES
            connection.close()
        future.result().close()
        door.admitted[AGENT].close()


def test_who_is_slow_is_sent_away(
    key: Key, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "PENDING_SECONDS", 0.3)
    with Admission(key, [AGENT], HOST) as door, stranger(door) as loris:

        def drip() -> None:
            nonce = first_message(loris)
            for byte in second_message(key, nonce):
                loris.sendall(bytes([byte]))
                time.sleep(0.02)

        future = pool.submit(drip)
        attend(door, future)  # each byte comes soon after the one before, but all of them do not
        assert isinstance(future.exception(), OSError)
        assert door.missing and door.pending == 1


CROWD = """
import collections, socket, sys
open_ones = collections.deque(maxlen=400)
for count in range(10_000):
    open_ones.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    if count % 3 == 0:
        open_ones[-1].send(b"tvm_ipc join")
print("done", flush=True)
sys.stdin.read()
"""


def test_ten_thousand_strangers(key: Key, pool: ThreadPoolExecutor) -> None:
    places = [AGENT, *(PeerIdentity(0, "worker", k) for k in range(20))]
    with Admission(key, [*places, OTHER], HOST) as door:
        crowd = subprocess.Popen(
            [sys.executable, "-S", "-c", CROWD, str(door.address[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert crowd.stdout is not None and crowd.stdin is not None
        done = pool.submit(crowd.stdout.readline)
        for place in places:  # while the others come
            joining = pool.submit(enter, key, place, [door.address], SECONDS)
            attend(door, joining)
            joining.result().close()
        attend(door, done)
        assert done.result() == b"done\n"
        while door.poll(0.0) or len(door._waiting) + door.pending < 10_000:
            assert len(door._waiting) <= MOST_PENDING
        last = pool.submit(enter, key, OTHER, [door.address], SECONDS)
        door.wait(SECONDS)
        last.result().close()
        assert door.pending >= 10_000
        crowd.communicate(timeout=SECONDS)
        for connection in door.admitted.values():
            connection.close()


def test_no_descriptors_left(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT], HOST) as door:
        listener: Any = door._listener

        class Poor:
            close = listener.close

            def accept(self) -> Any:
                if len(door._waiting) >= 5:
                    raise OSError(errno.EMFILE, "too many open files")
                return listener.accept()

        door._listener = Poor()  # type: ignore[assignment]
        crowd = [stranger(door) for _ in range(20)]
        future = pool.submit(enter, key, AGENT, [door.address], SECONDS)
        door.wait(SECONDS)
        assert door.pending == 20
        future.result().close()
        door.admitted[AGENT].close()
        for connection in crowd:
            connection.close()


def damaged(message: bytes, random_: random.Random) -> bytes:
    """A message that is not this one."""
    at = random_.randrange(len(message))
    kind = random_.randrange(4)
    if kind == 0:
        return message[:at]
    if kind == 1:
        return message[:at] + random_.randbytes(random_.randrange(1, 40)) + message[at:]
    if kind == 2:
        changed = bytes([message[at] ^ 1 << random_.randrange(8)])
        return message[:at] + changed + message[at + 1 :]
    return message[:at] + message[at + 1 :]


def test_damaged_messages_let_nobody_in(key: Key, pytestconfig: pytest.Config) -> None:
    random_ = random.Random(7)
    with Admission(key, [AGENT, OTHER], HOST) as door:
        for _ in range(50 * pytestconfig.getoption("--fault-rounds")):
            with stranger(door) as connection:
                door.poll(1.0)
                message = second_message(key, first_message(connection))
                sent = damaged(message, random_)
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                while door._waiting:
                    door.poll(1.0)
                whole = sent.startswith(message)  # bytes behind it are those of its user
                assert (AGENT in door.admitted) == whole
                if whole:
                    door.admitted.pop(AGENT).close()


def test_damaged_answers_are_not_believed(key: Key, pytestconfig: pytest.Config) -> None:
    random_ = random.Random(8)
    rounds = 10 * pytestconfig.getoption("--fault-rounds")
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            for _ in range(rounds):
                with server.accept()[0] as connection:
                    nonce = bytes(NONCE_BYTES)
                    first = HELLO + nonce
                    if random_.randrange(3) == 0:
                        first = damaged(first, random_)
                    try:
                        connection.sendall(first)
                        data = connection.recv(4096)
                        own, claim = data[len(HELLO) :][:NONCE_BYTES], data[HEAD.size :]
                        told = (nonce, own, claim[:-PROOF_BYTES])
                        answer = pack_answer(key, told, random_.choice(["", "so"]))
                        while (wrong := damaged(answer, random_)).startswith(answer):
                            pass
                        connection.sendall(wrong)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        while thread.is_alive():
            with pytest.raises(IPCError):
                enter(key, AGENT, [server.getsockname()[:2]], 0.049)  # one attempt
            thread.join(0.001)


def listeners() -> list[str]:
    """Where this process listens, as the system has it."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.append(words[1])
    return found


def test_listens_on_one_interface(key: Key) -> None:
    before = listeners()
    with Admission(key, [AGENT], HOST) as door:
        assert set(listeners()) - set(before) == {f"0100007F:{door.address[1]:04X}"}
    assert listeners() == before
    for host in ("0.0.0.0", "::", "", "localhost", "224.0.0.1"):
        with pytest.raises(IPCError, match="one interface"):
            Admission(key, [AGENT], host)
    with pytest.raises(IPCError, match=r"cannot listen on 192\.0\.2\.1"):
        Admission(key, [AGENT], "192.0.2.1")  # of nobody
    assert listeners() == before


def test_addresses_are_tried_in_turn(key: Key, pool: ThreadPoolExecutor) -> None:
    with socket.create_server((HOST, 0)) as gone:
        nobody = gone.getsockname()[:2]
    with socket.create_server((HOST, 0)) as other, Admission(key, [AGENT], HOST) as door:

        def speak() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        pool.submit(speak)
        addresses = [nobody, other.getsockname()[:2], door.address]
        future = pool.submit(enter, key, AGENT, addresses, SECONDS)
        door.wait(SECONDS)
        future.result().close()
        door.admitted[AGENT].close()
    with pytest.raises(IPCError, match=f"agent of node 0 .*{nobody[1]}: nothing listens there"):
        enter(key, AGENT, [nobody], SECONDS)


def test_deadlines_name_who_is_missing(key: Key, pool: ThreadPoolExecutor) -> None:
    with Admission(key, [AGENT, WORKER, OTHER], HOST) as door, stranger(door):
        future = pool.submit(enter, key, AGENT, [door.address], SECONDS)
        attend(door, future)
        missing = "agent of node 1, worker 3 of node 1. 1 of 3 joined at"
        with pytest.raises(DeadlineError, match=f"within 0.05 s: {missing}"):
            door.wait(0.05)
        future.result().close()
        door.admitted[AGENT].close()

    def check() -> None:
        raise IPCError("the launcher ended")

    with Admission(key, [AGENT], HOST) as door, pytest.raises(IPCError, match="the launcher ended"):
        door.wait(SECONDS, check)
    with socket.create_server((HOST, 0)) as silent:  # whose backlog takes the connection
        where = silent.getsockname()[:2]
        with pytest.raises(DeadlineError, match=rf"in 0.1 s: 127.0.0.1:{where[1]}: .*timed out"):
            enter(key, AGENT, [where], 0.1)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "00", lambda t: "x" * 96])
def test_keys(key: Key, change: Callable[[str], str]) -> None:
    assert Key.from_text(f" {key.text}\n") == key
    assert key.secret.hex() not in f"{key} {key!r}" and repr(key.secret) not in repr(key)
    with pytest.raises(IPCError) as caught:
        Key.from_text(change(key.text))
    assert change(key.text) not in str(caught.value)


def test_claims() -> None:
    for place in (AGENT, WORKER):
        assert unpack_claim(pack_claim(place, "versions")) == (place, "versions")
    for wrong in (b"", pack_claim(WORKER, "")[:-1], bytes(8) + b"\1\xff"):
        with pytest.raises(ValueError):
            unpack_claim(wrong)
    with pytest.raises(IPCError, match="the claim of agent of node 0 has"):
        pack_claim(AGENT, "x" * 1024)
