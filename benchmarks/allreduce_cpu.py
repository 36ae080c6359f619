# SPDX-License-Identifier: Apache-2.0
"""How fast is an all-reduce over shared memory, next to MPI, gloo and the memory itself?

    python benchmarks/allreduce_cpu.py            # about ten minutes
    python benchmarks/allreduce_cpu.py --quick    # under two

Ours is the packed function as a compiled program calls it, from the Relax VM of every worker; a
peer's headline is a C loop over MPI_Allreduce, with mpi4py beside it. MPICH and Open MPI come
from their wheels, into environments below benchmarks/out/ that are made on first use; gloo is
measured where torch is found, or installed with --torch.

All contestants stay alive and asleep, and are measured one after another, size by size, in
several rounds: what disturbs the machine for a while disturbs all of them. A measurement waits
for a moment when nothing else runs, as long as --patience lasts; it is a barrier, then as many
calls as fill --seconds, and takes the slowest rank's time. Figures are medians over the rounds;
a ratio is the median of the ratios within the rounds, against the peer that is fastest at that
size. Every buffer's first all-reduce is compared with a closed form.

Two variants: `same input` calls again and again on buffers that nobody writes, `fresh input`
stores to the whole input before every call, as a program would, and includes that time on all
sides. The limit is what private buffers allow without any synchronisation; the bare one-shot is
the least that two cores can do which must hear from each other (see peer_limit.c).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import peers
import report
from peers import Contestant, OverLimitError
from report import Key, Results

RELEASE_BYTES = 4 << 20  # above it, buffers are given back before the next contestant's turn
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Method:
    """A contestant's place: it can be started again when it had to be ended."""

    name: str
    role: str
    start: Callable[[], Contestant | None]
    chances: int = 4  #: how often it may be ended before it is left out
    contestant: Contestant | None = None
    iterations: dict[Key, int] = field(default_factory=dict)

    def sit(self) -> Contestant | None:
        if self.contestant is None and self.chances > 0:
            try:
                self.contestant = self.start()
            except OSError as error:
                print(f"{self.name}: {error}", file=sys.stderr)
            if self.contestant is None:
                self.chances = 0
        return self.contestant

    def fail(self) -> None:
        self.contestant = None
        self.chances -= 1

    def leave(self) -> None:
        if self.contestant is not None:
            self.contestant.close()
            self.contestant = None


@dataclass(frozen=True)
class Plan:
    """One table: which cases, and how long to look at them."""

    ranks: int
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    fresh: tuple[bool, ...]
    rounds: int
    seconds: float
    limit: float
    patience: float
    budget: float


class Quiet:
    """Keeps away from moments when other programs run, as long as patience lasts."""

    def __init__(self, patience: float) -> None:
        self._left = patience
        self.measurements = 0
        self.disturbed = 0

    @staticmethod
    def _now() -> bool:
        """Whether nothing but this thread is running: all contestants sleep when it is asked."""
        with contextlib.suppress(OSError):
            return Path("/proc/loadavg").read_text().split()[3].startswith("1/")
        return True

    def wait(self) -> None:
        """Returns when it has been quiet for some milliseconds, or patience ran out."""
        start = time.monotonic()
        calm = 0
        while calm < 3 and time.monotonic() - start < self._left:
            time.sleep(0.002)
            calm = calm + 1 if self._now() else 0
        self._left -= time.monotonic() - start

    def held(self) -> bool:
        """Whether a measurement counts: it is still quiet, or there is no patience left."""
        time.sleep(0.001)  # until the contestants sleep again
        quiet = self._now()
        if not quiet and self._left > 0:
            self._left -= 0.1  # a repetition costs time too
            return False
        self.measurements += 1
        self.disturbed += not quiet
        return True


def calibrate(method: Method, contestant: Contestant, key: Key, plan: Plan) -> int:
    """How many calls fill the time of one measurement; a hiccup must not make them too few."""
    calls = 1
    while True:
        seconds = contestant.run(calls, key.fresh, plan.limit)
        for _ in range(2):
            if seconds * 4 > plan.seconds and seconds < 4 * plan.seconds:
                seconds = min(seconds, contestant.run(calls, key.fresh, plan.limit))
        if seconds * 4 > plan.seconds or calls > 1 << 20:
            return max(1, int(calls * plan.seconds / max(seconds, 1e-9)))
        calls *= 4


def per_call(method: Method, contestant: Contestant, key: Key, plan: Plan, quiet: Quiet) -> float:
    """One measurement, at a quiet moment if there is one."""
    if key not in method.iterations:
        method.iterations[key] = calibrate(method, contestant, key, plan)
    calls = method.iterations[key]
    while True:
        quiet.wait()
        seconds = contestant.run(calls, key.fresh, plan.limit)
        if quiet.held():
            break
    if seconds < plan.seconds / 3:
        method.iterations[key] *= 3
    return seconds / calls


def measure(
    method: Method, plan: Plan, dtype: str, size: int, results: Results, quiet: Quiet
) -> None:
    """All variants of one size, for one contestant."""
    keys = [Key(plan.ranks, dtype, fresh, size, method.name) for fresh in plan.fresh]
    if any(key in results.notes for key in keys):
        return
    contestant = method.sit()
    if contestant is None:
        for key in keys:
            results.notes[key] = "-"
        return
    key = keys[0]
    try:
        answer = contestant.prepare(dtype, size // WIDTH[dtype], plan.limit)
        for key in keys:
            if answer == "ok":
                results.add(key, per_call(method, contestant, key, plan, quiet))
            else:
                results.notes[key] = {"unsupported": "no type", "bad": "WRONG"}[answer]
        if size >= RELEASE_BYTES:
            contestant.prepare(dtype, 1024, plan.limit)
    except OverLimitError:
        results.notes[key] = f">{plan.limit:g} s"
        method.fail()
    except OSError as error:
        print(error, file=sys.stderr)
        results.notes[key] = "died"
        method.fail()


def run(plan: Plan, methods: list[Method], results: Results) -> None:
    """The rounds of one plan that its time allows; whoever begins changes from round to round."""
    took = 0.0
    end = time.monotonic() + plan.budget
    for number in range(plan.rounds):
        began = time.monotonic()
        if number == 1:
            took /= 2  # the first round also found how many calls fill a measurement
        if number and began + took > end:
            print(f"{plan.ranks} ranks: no time for more rounds", file=sys.stderr)
            break
        quiet = Quiet(plan.patience)
        for dtype in plan.dtypes:
            for size in plan.sizes:
                for i in range(len(methods)):
                    measure(methods[(i + number) % len(methods)], plan, dtype, size, results, quiet)
        took = time.monotonic() - began
        print(
            f"{plan.ranks} ranks: round {number + 1} of {plan.rounds}, {took:.0f} s, "
            f"{quiet.disturbed} of {quiet.measurements} measurements disturbed by other programs",
            file=sys.stderr,
            flush=True,
        )


def peer_methods(options: argparse.Namespace, ranks: int, python: str | None) -> list[Method]:
    """The peers and the limits; mpi4py only where every rank has a core."""
    methods: list[Method] = []
    start: Callable[[], Contestant | None]
    # Spinning ranks without a core each may take for ever, at every size.
    chances = 4 if ranks <= peers.cores() else 2
    callers = ["single", "multiple"]
    if ranks == 2 and not options.quick:
        callers.append("mpi4py")
    for library in options.mpi:
        for caller in callers:
            name = peers.mpi_label(library, caller)
            start = partial(peers.mpi, library, ranks, caller)
            methods.append(Method(name, "peer", start, chances))
    if python is not None:
        methods.append(Method("gloo", "peer", partial(peers.gloo, ranks, python), chances))
    for mode in ("copy", "add", "stream"):
        start = partial(peers.limit, mode, ranks, options.largest)
        methods.append(Method(f"limit {mode}", "limit", start))
    if ranks == 2 <= peers.cores():
        start = partial(peers.limit, "oneshot", ranks, options.largest)
        methods.append(Method("bare one-shot", "bare", start))
    return methods


def _itself(contestant: Contestant) -> Contestant:
    return contestant


def own_methods(options: argparse.Namespace, ranks: int) -> tuple[list[Method], Callable[[], None]]:
    """Our ways of calling, on one session of their own, and what ends that session."""
    import ours

    from tvm_ipc.packed_functions import AllReduceStrategy

    workers = ours.Workers(ranks, 10 * options.limit)
    methods = []
    for mode in options.modes:
        for strategy in options.strategies:
            way = ours.Ours(
                workers,
                not mode.startswith("staged"),
                mode.endswith("-to-ipc"),
                AllReduceStrategy[strategy.upper()],
            )
            methods.append(Method(way.name, "ours", partial(_itself, way)))
    return methods, workers.close


def powers(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return tuple(sizes)


def plans(options: argparse.Namespace) -> Iterable[Plan]:
    sizes = powers(options.smallest, options.largest, options.factor)
    dtypes = tuple(options.dtypes)
    shares = {ranks: 1 if ranks > peers.cores() else 2 for ranks in options.ranks}
    for ranks in options.ranks:
        crowded = ranks > peers.cores()
        yield Plan(
            ranks=ranks,
            dtypes=dtypes if ranks == 2 else dtypes[:1],
            sizes=sizes[:: 2 if crowded else 1],
            fresh=(False,) if crowded or options.quick else (False, True),
            rounds=min(2 if options.quick else 3, options.rounds) if crowded else options.rounds,
            seconds=options.seconds,
            patience=options.patience / len(options.ranks) / options.rounds,
            budget=options.budget * shares[ranks] / sum(shares.values()),
            limit=min(options.limit, 2.0) if crowded and options.quick else options.limit,
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes, rounds and peers: under two minutes")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8])
    add("--dtypes", nargs="+", choices=list(WIDTH), default=list(WIDTH))
    add("--smallest", type=int, default=1 << 10, metavar="BYTES")
    add("--largest", type=int, default=64 << 20, metavar="BYTES")
    add("--factor", type=int, choices=[2, 4, 8, 16], help="between sizes (4; quick: 16)")
    add("--rounds", type=int, help="how often everything is measured (7; quick: 3)")
    add("--seconds", type=float, help="how long one measurement takes (0.06; quick: 0.04)")
    add("--patience", type=float, help="seconds to wait for quiet moments (240; quick: 20)")
    add("--budget", type=float, help="seconds after which no round begins (700; quick: 70)")
    add("--limit", type=float, default=5.0, help="seconds after which a measurement is given up")
    add("--mpi", nargs="*", choices=["mpich", "openmpi"], default=["mpich", "openmpi"])
    add("--torch", action="store_true", help="install torch for gloo (200 MB to download)")
    add(
        "--modes",
        nargs="*",
        choices=["ipc", "staged", "ipc-to-ipc", "staged-to-ipc"],
        default=["ipc", "staged"],
        help="where our input lives, and our output if that is not ordinary memory",
    )
    add("--strategies", nargs="+", choices=["auto", "oneshot", "twoshot"], default=["auto"])
    add("--no-fixed", action="store_true", help="leave out the fixed costs")
    add("--json", type=Path, default=peers.OUT / "allreduce_cpu.json")
    add("--plot", type=Path, default=peers.OUT / "allreduce_cpu.png")
    options = parser.parse_args(arguments)
    options.factor = options.factor or (16 if options.quick else 4)
    options.rounds = options.rounds or (3 if options.quick else 7)
    options.patience = options.patience or (20.0 if options.quick else 240.0)
    options.budget = options.budget or (70.0 if options.quick else 700.0)
    options.seconds = options.seconds or (0.04 if options.quick else 0.06)
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    peers.OUT.mkdir(exist_ok=True)
    python = peers.torch_python(options.torch)
    results = Results()
    for plan in plans(options):
        methods = peer_methods(options, plan.ranks, python)
        own, finish = own_methods(options, plan.ranks) if options.modes else ([], lambda: None)
        try:
            run(plan, methods + own, results)
        finally:
            for method in methods:
                method.leave()
            finish()
        results.roles.update({method.name: method.role for method in methods + own})
        for dtype in plan.dtypes:
            for fresh in plan.fresh:
                print(report.table(results, plan.ranks, dtype, fresh), flush=True)
    if options.modes and not options.no_fixed:
        import fixed_costs

        results.fixed = fixed_costs.measure(options.quick, options.limit)
        print(report.fixed_table(results.fixed))
    if options.modes:
        import ours

        ours.remove_program()
    report.write_json(results, options, options.json)
    report.draw(results, options.plot)
    return 1 if "WRONG" in results.notes.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
