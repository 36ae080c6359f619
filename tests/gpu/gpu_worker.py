# SPDX-License-Identifier: Apache-2.0
"""Functions that tests of GPUs call in workers: collectives on streams, and in CUDA graphs.

They drive the CUDA runtime that TVM has loaded, and check their results themselves. Where ranks are
threads that share a device, to free memory waits for the kernels of all of them, and these for each
other: memory is there before the first call, and until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from cuda_runtime import Graph, meet, new_stream, share_process
from tvm_ffi import get_global_func, register_global_func

from tests.runtime import collective_cases as cases
from tests.runtime import places
from tests.runtime.collective_cases import Array, Case
from tests.runtime.collective_worker import Memory
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, ReduceKind, Team


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    return register_global_func(f"tests.gpu.{function.__name__}", function, override=True)


class AllReduce:
    """An all-reduce of a worker, whose inputs are new in every round."""

    def __init__(self, case: Case, in_place: bool = False) -> None:
        self.case = case
        self.rank = int(get_global_func("runtime.disco.worker_rank")())
        self.size = int(get_global_func("runtime.disco.world_size")())
        self.send = Memory(case.memory == "arena", case.dtype, case.count, case.offset)
        self.recv = self.send
        if not in_place:
            self.recv = Memory(case.memory != "arena", case.dtype, case.count, case.offset)

    def fill(self, round_: int) -> None:
        self.case = replace(self.case, round=round_)
        self.send.write(cases.inputs(self.case, self.size, 0)[self.rank])
        if self.recv is not self.send:
            self.recv.write(np.zeros(self.case.count, cases.numpy_type(self.case.dtype)))

    def call(self) -> None:
        case = self.case
        get_global_func("tvm_ipc.allreduce")(
            *(self.send.part(0, case.count), case.kind, int(Team.WORLD), case.strategy),
            *(case.flags, self.recv.part(0, case.count)),
        )

    def check(self) -> Array:
        """What is there when the stream has been waited for."""
        wanted = cases.expected(self.case, self.size, 0, self.rank)
        result = self.recv.read()
        assert wanted is not None
        assert cases.same(result, wanted), f"{self.case}, rank {self.rank}: wrong values"
        return result


def case_of(count: int, dtype: str, strategy: int, memory: str) -> Case:
    kind = int(ReduceKind.SUM)
    return Case("allreduce", count, dtype, kind, strategy, int(CollectiveFlag.NONE), memory)


@register
def replays(counts: Any, dtype: str, strategy: int, memory: str, rounds: int) -> None:
    """Capture all-reduces of these sizes in one graph; replay it, with and without others between.

    What memory they need is there after they were called once.
    """
    with new_stream(places.here()) as stream, stream.current():
        calls = [AllReduce(case_of(int(n), dtype, strategy, memory)) for n in counts]
        meet()
        for call in calls:
            call.fill(0)
            call.call()
        stream.wait()
        with Graph(stream) as graph:
            for call in calls:
                call.call()
        for round_ in range(rounds):
            for call in calls:
                call.fill(round_)
            meet()
            graph.launch()
            stream.wait()
            for call in calls:
                call.check()
            if round_ % 3 == 1:  # the next one finds another number of operations behind it
                calls[0].fill(round_)
                calls[0].call()
                stream.wait()
                calls[0].check()
        meet()
        for _ in range(rounds):
            graph.launch()
        stream.wait()
        for call in calls:
            call.check()
        meet()
        graph.end()


@register
def replays_after_growth(small: int, large: int, dtype: str, strategy: int) -> None:
    """Capture an all-reduce, do a larger one, for which memory grows, and replay the graph."""
    with new_stream(places.here()) as stream, stream.current():
        call = AllReduce(case_of(small, dtype, strategy, "private"))
        call.fill(0)
        call.call()
        stream.wait()
        with Graph(stream) as graph:
            call.call()
        for round_ in range(3):
            other = AllReduce(case_of(large << round_, dtype, strategy, "private"))
            other.fill(round_)
            other.call()
            stream.wait()
            other.check()
            call.fill(round_)
            meet()
            graph.launch()
            stream.wait()
            call.check()
        meet()
        graph.end()


@register
def takes_turns_on_streams(count: int, dtype: str, rounds: int) -> None:
    """Use a team on two streams, of which nobody waits for the other: the sum of sums."""
    with new_stream(places.here()) as first, new_stream(places.here()) as second:
        case = case_of(count, dtype, int(AllReduceStrategy.AUTO), "private")
        calls = [AllReduce(case), AllReduce(case)]
        meet()
        for round_ in range(rounds):
            for call in calls:
                call.fill(2 * round_ + calls.index(call))
            with first.current():
                calls[0].call()
            with second.current():
                calls[1].call()
            first.wait()
            second.wait()
            for call in calls:
                call.check()
        meet()


@register
def captures_on_another_stream(count: int, rounds: int) -> None:
    """Capture on a stream of its own, as TVM does, what is launched where the program works."""
    with new_stream(places.here()) as program, new_stream(places.here()) as captured:
        call = AllReduce(case_of(count, "float32", int(AllReduceStrategy.AUTO), "private"))
        meet()
        call.fill(0)
        with program.current():
            call.call()
        with captured.current(), Graph(captured) as graph:
            call.call()
        for round_ in range(rounds):
            program.wait()
            call.check()
            call.fill(round_)
            meet()
            graph.launch(program)
        program.wait()
        call.check()
        meet()
        graph.end()


@register
def digest_of_cases(counts: Any, dtype: str, kind: int, strategy: int) -> bytes:
    """All bits of the results of all-reduces, on whatever device the worker has."""
    cases_ = [replace(case_of(int(n), dtype, strategy, "private"), kind=kind) for n in counts]
    calls, found = [AllReduce(case) for case in cases_], b""
    meet()
    for call in calls:
        call.fill(1)
        call.call()
        places.settle()
        found += call.check().tobytes()
    meet()
    return found


register(share_process)
