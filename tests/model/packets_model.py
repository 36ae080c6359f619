# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank to another.

Mirrors point_to_point.cc `Send` and `Receive`: two packets for each ordered pair of ranks, by the
packet's parity; packet m is filled once packet m - 2 is taken. A message is a number of packets,
or "whole": one packet that says where it lies, and a sender that waits until it is taken, since
it may write its memory as soon as it returns. Packets are counted modulo 8.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model.model_checker import Model, Step, expect
from tests.model.steps_model import STEPS, reached

#: A message of so many packets, or one that is read where it lies.
Message = int | str


@dataclass(frozen=True)
class Protocol:
    """The protocol as it is built; every other value is a mutation."""

    packets: int = 2
    may_be_ahead: int = 2
    whole_waits: bool = True
    publishes_before_it_writes: bool = False
    takes_before_it_reads: bool = False
    first_packet: int = 0


@dataclass
class Link:
    """Writes what both ends of a one-way link do."""

    src: int
    dst: int
    protocol: Protocol

    def __post_init__(self) -> None:
        self.sent = self.received = self.protocol.first_packet

    def cells(self) -> dict[Hashable, Any]:
        slots = range(self.protocol.packets)
        return {
            self.at("taken"): self.protocol.first_packet,
            self.at("memory"): None,
            **{self.at("seq", slot): self.protocol.first_packet for slot in slots},
            **{self.at("packet", slot): None for slot in slots},
        }

    def at(self, what: str, slot: int = 0) -> Hashable:
        return (what, self.src, self.dst, slot)

    def send(self, number: int, message: Message) -> list[Step]:
        if message == "whole":
            memory = self.at("memory")
            steps = [
                self.write(memory, (number, 0)),
                *self.send_packet(("at", memory)),
            ]
            if self.protocol.whole_waits:
                steps.append(self.wait_taken(self.sent))
            return steps
        parts = range(int(message))
        return [step for part in parts for step in self.send_packet((number, part))]

    def send_packet(self, content: Any) -> list[Step]:
        self.sent = (self.sent + 1) % STEPS
        slot = self.sent % self.protocol.packets
        write = self.write(self.at("packet", slot), content)
        publish = self.write(self.at("seq", slot), self.sent)
        order = (publish, write) if self.protocol.publishes_before_it_writes else (write, publish)
        return [self.wait_taken((self.sent - self.protocol.may_be_ahead) % STEPS), *order]

    def receive(self, number: int, message: Message) -> list[Step]:
        parts = 1 if message == "whole" else int(message)
        return [s for part in range(parts) for s in self.receive_packet(number, part, message)]

    def receive_packet(self, number: int, part: int, message: Message) -> list[Step]:
        self.received = (self.received + 1) % STEPS
        packet = self.received
        slot = packet % self.protocol.packets
        seq, content = self.at("seq", slot), self.at("packet", slot)
        memory = self.at("memory")
        wait = Step(f"wait for packet {packet}", lambda m: reached(m[seq], packet))
        take = self.write(self.at("taken"), packet)
        if message == "whole":
            read = [
                Step("read where it lies", lambda m: expect(m[content], ("at", memory), "packet")),
                Step("read there", lambda m: expect(m[memory], (number, 0), "memory")),
            ]
        else:
            wanted = (number, part)
            read = [Step(f"read packet {packet}", lambda m: expect(m[content], wanted, "packet"))]
        return [wait, take, *read] if self.protocol.takes_before_it_reads else [wait, *read, take]

    def wait_taken(self, packet: int) -> Step:
        taken = self.at("taken")
        return Step(f"wait until {packet} is taken", lambda m: reached(m[taken], packet))

    @staticmethod
    def write(cell: Hashable, value: Any) -> Step:
        return Step(f"write {cell} = {value}", lambda m: m.__setitem__(cell, value))


def messages(sequence: Sequence[Message], protocol: Protocol | None = None) -> Model:
    """Rank 0 sends these messages, rank 1 receives them."""
    link = Link(0, 1, protocol or Protocol())
    sender = [step for n, message in enumerate(sequence) for step in link.send(n, message)]
    receiver = [step for n, message in enumerate(sequence) for step in link.receive(n, message)]
    return Model(link.cells(), {"sender": sender, "receiver": receiver})


def both_send_first(message: Message, rounds: int = 2) -> Model:
    """Two ranks send to each other before they receive."""
    there, back = Link(0, 1, Protocol()), Link(1, 0, Protocol())
    one: list[Step] = []
    two: list[Step] = []
    for n in range(rounds):
        one += there.send(n, message)
        two += back.send(n, message)
        one += back.receive(n, message)
        two += there.receive(n, message)
    return Model({**there.cells(), **back.cells()}, {"rank 0": one, "rank 1": two})
