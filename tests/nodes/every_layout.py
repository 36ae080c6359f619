# SPDX-License-Identifier: Apache-2.0
"""A program on the first of several nodes: every collective, of every type, in teams of all kinds.

Workers compare what they get with NumPy; here the bits of ranks are compared with each other, and
with those of one machine.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from tvm_ffi import Shape  # noqa: E402

import tvm_ipc  # noqa: E402
from tests.runtime import test_allreduce_norm as norms  # noqa: E402
from tests.runtime import test_exposed_buffers as shows  # noqa: E402
from tests.runtime.disco_kinds import on_workers  # noqa: E402
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses  # noqa: E402
from tvm_ipc.packed_functions import REDUCED_TYPES  # noqa: E402

#: Sessions are slow where there are more workers than cores.
SECONDS = 600.0
MB = 1 << 20
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOVED = (*REDUCED_TYPES, "float8_e4m3fn", "float8_e5m2")
SUMS = ("allreduce", "reduce_scatter", "reduce")
MOVES = ("allgather", "broadcast", "gather", "scatter", "all_to_all", "permute")


class NodesTested:
    """A session, and the node of each of its ranks."""

    def __init__(self, session: tvm_ipc.Session, nodes: int, flat: bool = False) -> None:
        self.session, self.ranks = session, session.num_workers
        self.each = self.ranks // nodes
        self.nodes = [0 if flat else rank // self.each for rank in range(self.ranks)]

    def run(self, name: str, *arguments: Any) -> list[str]:
        """Have all workers call a function of ours; what each returns."""
        return on_workers(
            self.session.get_global_func(f"tests.nodes.{name}")(*arguments), self.ranks
        )

    def team(
        self,
        team: Any,
        size: int,
        ranks: list[int],
        plan: str,
        *arguments: Any,
        posts: bool = False,
    ) -> list[str]:
        """Run a plan in teams."""
        on = Shape(self.nodes)
        return self.run("in_team", team, size, Shape(ranks), on, posts, plan, *arguments)

    def world(self, plan: str, *more: Any, posts: bool = False) -> list[str]:
        return self.team(0, self.ranks, [*range(self.ranks)], plan, *more, posts=posts)


@contextlib.contextmanager
def opened(ranks: int, groups: int = 1, **where: Any) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(ranks, num_groups=groups, timeout=SECONDS, **where) as session:
        for module in (
            "tests.runtime.collective_worker",
            "tests.nodes.layout_functions",
            "tests.runtime.worker_functions",
        ):
            session.import_python_module(module)
        say_backend = session.get_global_func("tests.this_session_has")
        say_backend(session.backend)
        yield session
        say_backend("")
        session.sync()


def whole_world(layout: NodesTested) -> None:
    """Everything of every type; all ranks have the same bits of what they get alike."""
    for dtype in MOVED:
        assert len(set(layout.world("alike", dtype))) == 1, dtype
        layout.world("unlike", dtype)
    layout.world("posted", posts=True)


def teams(layout: NodesTested, groups: int) -> None:
    """Inside of nodes, across them, and both; by division, by number, and groups."""
    ranks, each = layout.ranks, layout.each
    size = ranks // groups
    layout.team(1, size, [*range(ranks)], "in_some_types")
    for count in (0, 1, 5003, 300_007):
        layout.run("to_the_next_group", groups, count)
    inside = [*range(ranks)]
    across = [rank for place in range(each) for rank in inside[place::each]]
    mixed = inside[1:] + inside[:1]
    for size, order in ((each, inside), (ranks // each, across), (each, mixed)):
        layout.team(Shape([size, *order]), size, order, "in_some_types")
        layout.team(Shape([size, *order]), size, order, "posted", posts=True)
    random = np.random.default_rng(ranks)
    for copy in range(6):  # which others have no part in, in any order
        some = random.permutation(ranks)[: random.integers(2, ranks + 1)].tolist()
        number = layout.session.team(some, copy).id
        digests = layout.team(number, len(some), some, "alike", "float32")
        assert len({digests[rank] for rank in some}) == 1, some


def large_ones(layout: NodesTested) -> None:
    def run(operation: str, size: int, dtype: str) -> None:
        digests = layout.run("large", operation, size, dtype, Shape(layout.nodes))
        alike = operation in ("allreduce", "allgather", "broadcast")
        assert not alike or len(set(digests)) == 1, (operation, size, dtype)

    for dtype in MOVED:
        for operation in (*SUMS, *MOVES) if dtype in REDUCED_TYPES else MOVES:
            run(operation, 5 * MB, dtype)
            run(operation, 64 * MB, dtype)


def what_is_shown(session: tvm_ipc.Session) -> None:
    def anywhere(ranks: int) -> shows.Team:
        return shows.Team(session)

    for dtype in ("bfloat16", "float32", "int8"):
        for count in (0, 1, 5000, 300_007):
            shows.test_each_rank_reads_what_each_has_shown(
                session.num_workers, count, dtype, anywhere
            )


def fused_norms(layout: NodesTested) -> None:
    """With the sums of this layout."""
    for dtype in norms.DTYPES:
        cases = norms.cases(dtype, norms.SHAPES)
        for case in [*[*cases][::3], norms.Case(2, norms.STAGE // 2 + 5, dtype)]:
            norms.check(layout.session, replace(case, nodes=tuple(layout.nodes)))


def sums(layout: NodesTested) -> list[list[str]]:
    """The bits that each rank has of all reductions of floats, whose order shows."""
    found = [layout.world(plan, dtype) for dtype in FLOATS for plan in ("alike", "unlike")]
    on = Shape(layout.nodes)
    found += [layout.run("large", one, 5 * MB, "float32", on) for one in SUMS[:2]]
    return found


def main(hosts: list[str], workers: int, groups: int, **where: Any) -> None:
    places = NodeAddresses(tuple(hosts), where["network"], Path(where["shell"]))
    ranks, begin = len(hosts) * workers, time.monotonic()

    def done(what: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s: {what}", file=sys.stderr, flush=True)

    with opened(ranks, groups, hosts=places) as session:
        layout = NodesTested(session, len(hosts))
        done("a session has started")
        whole_world(layout)
        done("all collectives of all types")
        teams(layout, groups)
        done("teams")
        large_ones(layout)
        done("large ones")
        what_is_shown(session)
        fused_norms(layout)
        done("shows and norms")
    with opened(ranks, hosts=places, order="flat") as session:
        flat = NodesTested(session, len(hosts), flat=True)
        over_nodes = sums(flat)
        fused_norms(flat)
        done("order='flat'")
    with opened(ranks, threads=True) as session:
        assert sums(NodesTested(session, 1)) == over_nodes, (
            "order='flat' has not one machine's bits"
        )
    done("one machine")
    print("ok")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
