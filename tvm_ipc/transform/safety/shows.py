# SPDX-License-Identifier: Apache-2.0
"""What peers may read from when it is shown until it is hidden, and what they show."""

from __future__ import annotations

from tvm_ipc.transform.safety.allocations import Allocations
from tvm_ipc.transform.safety.buffers import NOTHING, Buffer, Leaf, Storage, Value, objects
from tvm_ipc.transform.safety.calls import KnownCall, constant
from tvm_ipc.transform.safety.hazards import HazardKind
from tvm_ipc.transform.safety.state import InFlight
from tvm_ipc.transform.safety.statements import Statement


class Shows(Allocations):
    """What a function shows, and sees of what its peers show."""

    def _of_shows(self, call: KnownCall, values: list[Value], step: Statement) -> Value:
        """Do what a function does that shows or hides, or that gives what a peer has shown."""
        function = call.function

        def of(name: str) -> list[Leaf]:
            return [frozenset(objects(values[place])) for place in call.places(name)]

        for read in function.reads:
            for value in of(read):
                # Of a shown the tensor is read by peers alone.
                own = value if function.shows else [t for t in value if isinstance(t, Storage)]
                self._read(own, step)
        if function.shows:
            return self._show(of(function.shows)[0], step)
        if not function.hides:
            if constant(call.argument("shift")) != 0:
                for shown, work in self._state.works.items():
                    if shown in of(function.result_of)[0]:
                        self._look_for_overlap(work, step)
            return self._peer(of(function.result_of)[0], step)
        for value in of(function.hides):
            self._hide(value, step)
        team = call.meets()
        if team is not None:
            self._state.meet(team)
        return NOTHING

    def _show(self, tensor: Leaf, step: Statement) -> Leaf:
        """Let peers read a tensor; return what stands for that, and the tensor."""
        shown = Storage(step.bound.name, None)
        since = self._state.done
        self._state.works[shown] = InFlight(tuple(tensor), (), (), step, shown=True, since=since)
        return tensor | {shown}

    def _peer(self, shown: Leaf, step: Statement) -> Leaf:
        """Return memory of a peer, which the own tensor stands for too."""
        name, works, peers = step.bound.name, self._state.works, self._state.peers
        memory = Storage(name, None)
        result: set[Storage | Buffer] = {Buffer(name, memory)}
        for thing in shown:
            if isinstance(thing, Storage) and thing in works:
                peers[thing] = peers.get(thing, frozenset()) | {memory}
            else:
                result.add(thing)
        return frozenset(result)

    def _hide(self, value: Leaf, step: Statement) -> None:
        """Peers read nothing of what was shown any more, nor does this rank of what they showed."""
        state = self._state
        shown = [thing for thing in value if isinstance(thing, Storage) and thing in state.works]
        if not state.are_of_different_paths(shown):
            self._give_away(shown, step)  # which of them it is, nobody knows
        for thing in shown:
            state.works.pop(thing, None)
            for memory in (thing, *state.peers.pop(thing, ())):
                state.hidden[memory] = step
                for work in state.works.values():
                    self._disturb(HazardKind.BUSY, memory, work.reads + work.writes, work, step)
