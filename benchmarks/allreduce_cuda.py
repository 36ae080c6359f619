# SPDX-License-Identifier: Apache-2.0
"""How fast is an all-reduce on GPUs, next to NCCL, to PyTorch's kernels, and to the memory itself?

    python benchmarks/allreduce_cuda.py                      # some minutes
    python benchmarks/allreduce_cuda.py --quick              # a small part of it

All figures go to a file in benchmarks/results/, with what the machine is, and at the end is said
which of the goals in `cuda_goals.py` are met. The exit status is 0 if all are, 1 if one is missed,
and 2 if some could not be measured; 0 where nothing is judged (`--smoke`, no GPU, a pretended one).

Ranks are on as many GPUs as there are, and share one where they must: as threads of one process,
and as processes where each has a GPU (processes that share one take turns of milliseconds). The
packed function that compiled programs call is captured in a CUDA graph, many times, and a time is
that of one call by the device's clock, of the slowest rank; figures are medians of the rounds.
Inputs lie in memory that peers map; every result is compared with NumPy's.

Beside it, in the same run and in turns: NCCL (where each rank has a GPU of its own), PyTorch's
one-shot and two-shot kernels over symmetric memory where torch is installed; and as limits a
meeting of the ranks without data, and copies within the device's memory, of all ranks at once. Of
an all-reduce in two shots of B bytes by n ranks on one device, (3n + 1) B must move through its
memory. What cannot be measured is said, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # not there by itself with `-P`

import cuda_goals  # noqa: E402
import cuda_steps  # noqa: E402
import cuda_torch  # noqa: E402
import tvm  # noqa: E402, F401  loads the native library of tvm_ipc

import tvm_ipc  # noqa: E402
from tvm_ipc.errors import IPCError  # noqa: E402
from tvm_ipc.gpu import discovery  # noqa: E402
from tvm_ipc.packed_functions import BACKENDS, AllReduceStrategy  # noqa: E402
from tvm_ipc.this_machine import cpu_model  # noqa: E402

SIZES = [1 << n for n in range(8, 27, 2)]
DTYPE, WIDTH = "bfloat16", 2
STRATEGIES = {one.name.lower(): int(one) for one in AllReduceStrategy}


@dataclass(frozen=True)
class Row:
    """One figure: seconds of a call by round, of the slowest rank in each."""

    ranks: str
    what: str
    size: int
    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass
class Results:
    """All figures, and what there is none of."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    goals: list[cuda_goals.Verdict] = field(default_factory=list)

    def note(self, text: str) -> None:
        print(f"not measured: {text}", flush=True)
        self.notes.append(text)

    def add(self, ranks: str, what: str, size: int, times: Sequence[Sequence[float]]) -> None:
        """Add what each rank measured."""
        slowest = [max(of_round) for of_round in zip(*times, strict=True)]
        self.rows.append(Row(ranks, what, size, slowest))

    def find(self, ranks: str, what: str, size: int) -> float | None:
        for row in self.rows:
            if (row.ranks, row.what, row.size) == (ranks, what, size):
                return row.median
        return None


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: list[int]
    ranks: list[tuple[int, bool]]
    rounds: int
    most: int  #: calls in a graph

    def inner(self, size: int) -> int:
        return max(2, min(self.most, (64 << 20) // max(1, size)))


def plan_of(options: argparse.Namespace, devices: int) -> Plan:
    if options.smoke:
        return Plan([64, 4096, 65536], [(2, True), (2, False)], 2, 2)
    if options.quick:
        return Plan([1 << 10, 1 << 14, 1 << 20, 1 << 26], [(2, True)], 5, 20)
    processes = [(n, False) for n in (2, 4, 8) if n <= devices]
    return Plan(SIZES, [(2, True), (4, True), (8, True), *processes], 9, 50)


def call(session: tvm_ipc.Session, name: str, *arguments: Any) -> list[list[float]]:
    """What each rank measured."""
    found = session.get_global_func(f"benchmarks.{name}")(*arguments)
    session.sync()
    return [json.loads(found.debug_get_from_remote(r)) for r in range(session.num_workers)]


def name_of(ranks: int, threads: bool) -> str:
    return f"{ranks} {'threads' if threads else 'processes'}"


def open_session(ranks: int, threads: bool, backend: str, plan: Plan) -> tvm_ipc.Session:
    found = [one.id for one in discovery.find().devices if one.kernels or backend == "nccl"]
    session = tvm_ipc.Session(
        ranks,
        threads=threads,
        device="cuda",
        device_ids=[found[i % len(found)] for i in range(ranks)],
        backend=backend,
        timeout=60,
        arena_limit=max(64 << 20, 6 * max(plan.sizes)),
    )
    session.import_python_module("cuda_worker")
    here = ranks if threads else 1
    session.get_global_func("benchmarks.share_process")(str(time.monotonic_ns()), here)
    return session


def measure(ranks: int, threads: bool, plan: Plan, results: Results, steps: Path | None) -> None:
    """All that these ranks have, size by size, ours and the peers in turns."""
    name = name_of(ranks, threads)
    with open_session(ranks, threads, "cuda", plan) as ours:
        peers = open_peers(ranks, threads, plan, results)
        try:
            results.add(name, "meeting", 0, call(ours, "meeting", plan.most, plan.rounds))
            for size in plan.sizes:
                sizes(name, size, ours, peers, plan, results)
            most = max(plan.sizes)
            copied = call(ours, "copies", most, plan.inner(most), plan.rounds)
            results.add(name, "copies", most, copied)
            epilogues(name, ours, plan, results, steps)
        finally:
            for peer in peers.values():
                peer.close()


def sizes(
    name: str, size: int, ours: tvm_ipc.Session, peers: dict[str, Any], plan: Plan, results: Results
) -> None:
    """One size: half of the rounds before the peers' turn, half after it."""
    inner, count = plan.inner(size), max(1, size // WIDTH)
    found: dict[str, list[list[float]]] = {}
    ways: dict[str, Callable[[int], list[list[float]]]] = {
        what: partial(call, ours, "allreduce", count, DTYPE, strategy, inner)
        for what, strategy in STRATEGIES.items()
    }
    for peer, one in peers.items():
        for way in one.ways:
            ways[f"{peer} {way}".strip()] = partial(one.allreduce, way, count, inner)
    for rounds in ((plan.rounds + 1) // 2, max(1, plan.rounds // 2)):
        for what, measure_rounds in ways.items():
            try:
                times = measure_rounds(rounds)
            except (IPCError, cuda_torch.PeerError) as error:
                if what in STRATEGIES:
                    raise
                results.note(f"{what}, {name}, {size} bytes: {error}")
                continue
            before = found.setdefault(what, [[] for _ in times])
            for all_of_rank, new in zip(before, times, strict=True):
                all_of_rank.extend(new)
    for what, times in found.items():
        results.add(name, what, size, times)


class Nccl:
    """NCCL, by our own backend over it: the same calls and the same clock."""

    ways = ("",)

    def __init__(self, ranks: int, threads: bool, plan: Plan) -> None:
        self._session = open_session(ranks, threads, "nccl", plan)

    def allreduce(self, _: str, count: int, inner: int, rounds: int) -> list[list[float]]:
        auto = STRATEGIES["auto"]
        return call(self._session, "allreduce", count, DTYPE, auto, inner, rounds)

    def close(self) -> None:
        self._session.close()


def open_peers(ranks: int, threads: bool, plan: Plan, results: Results) -> dict[str, Any]:
    """Those that run here; a note for each that does not."""
    peers: dict[str, Any] = {}
    devices = len(discovery.find().devices)
    name = name_of(ranks, threads)
    if "nccl" not in BACKENDS:
        results.note("NCCL: this version of tvm_ipc has no backend over it")
    elif devices < ranks:
        results.note(f"NCCL, {name}: it wants a GPU for each rank, and there are {devices}")
    else:
        try:
            peers["nccl"] = Nccl(ranks, threads, plan)
        except (IPCError, ValueError) as error:
            results.note(f"NCCL, {name}: {error}")
    if threads:
        results.note(f"PyTorch, {name}: its ranks are processes")
    else:
        try:
            peers["torch"] = cuda_torch.Torch(ranks, devices)
        except cuda_torch.PeerError as error:
            results.note(f"PyTorch, {name}: {error}")
    for package in ("flashinfer", "vllm", "sgl_kernel"):
        if cuda_torch.is_installed(package):
            results.note(
                f"{package}: it is installed, and this script does not know how to call it"
            )
        elif threads and ranks == 2:
            results.note(f"{package}: not installed")
    return peers


def epilogues(
    name: str, ours: tvm_ipc.Session, plan: Plan, results: Results, steps: Path | None
) -> None:
    """All-reduce, residual and RMSNorm in one, and as three."""
    hidden = cuda_goals.HIDDEN
    for rows in cuda_goals.ROWS[:1] if plan.most < 10 else cuda_goals.ROWS:
        size = rows * hidden * cuda_goals.HALF
        for what, path in (("fused norm", ""), ("norm apart", steps)):
            if path is not None:
                shape = (rows, hidden, plan.inner(size), plan.rounds)
                results.add(name, what, size, call(ours, "epilogue", str(path), *shape))


def steps_library(options: argparse.Namespace, folder: Path, results: Results) -> Path | None:
    """TVM's kernels for the device: a kit's, or compiled into a folder; a note if neither."""
    first = discovery.find().devices[0]
    try:
        if options.programs is None:
            return cuda_steps.compiled(folder, first.capability)
        if is_pretended():
            raise cuda_steps.NoStepsError("a pretended GPU does not run programs for real ones")
        return cuda_steps.find(options.programs, first.capability)
    except cuda_steps.NoStepsError as error:
        results.note(f"all-reduce, residual and norm apart: {error}")
        return None


def is_pretended() -> bool:
    """Whether the GPUs are those of a double, whose times mean nothing."""
    return any(one.name.startswith("Pretend") for one in discovery.find().devices)


def show(results: Results, plan: Plan) -> None:
    """A table of microseconds, and what it means."""
    for ranks in dict.fromkeys(row.ranks for row in results.rows):
        rows = [row for row in results.rows if row.ranks == ranks and row.size in plan.sizes]
        columns = list(dict.fromkeys(row.what for row in rows if row.what != "copies"))
        meeting = results.find(ranks, "meeting", 0) or float("nan")
        print(f"\n{ranks}: microseconds of an all-reduce ({DTYPE}); a meeting {meeting * 1e6:.1f}")
        print(f"{'bytes':>10}" + "".join(f"{one:>12}" for one in columns) + f"{'/ best peer':>13}")
        for size in plan.sizes:
            found = {what: results.find(ranks, what, size) for what in columns}
            times = [t for what in columns for t in [found[what]]]
            cells = "".join(f"{t * 1e6:12.1f}" if t else f"{'-':>12}" for t in times)
            others = [t for what, t in found.items() if t and what not in STRATEGIES]
            auto = found.get("auto")
            ratio = f"{auto / min(others):13.2f}" if others and auto else ""
            print(f"{size:10}{cells}{ratio}")
        limits(ranks, results, plan)


def limits(ranks: str, results: Results, plan: Plan) -> None:
    """What copies come to, and the norms."""
    most = max(plan.sizes)
    if copies := results.find(ranks, "copies", most):
        speed = int(ranks.split()[0]) * 2 * most / copies
        print(f"copies of all ranks at once: {speed / 1e9:.0f} GB/s read and written")
    for row in (row for row in results.rows if row.ranks == ranks and row.what == "fused norm"):
        apart = results.find(ranks, "norm apart", row.size)
        rows = row.size // cuda_goals.HIDDEN // cuda_goals.HALF
        beside = f", {apart * 1e6:.1f} apart" if apart else ""
        print(f"sum, residual and RMSNorm, {rows} rows: {row.median * 1e6:.1f} us fused{beside}")


def judge(results: Results, judges: bool) -> int:
    """Keep and say which goals are met; the exit status."""
    ranks = dict.fromkeys(row.ranks for row in results.rows)
    results.goals = cuda_goals.judge(results.find, ranks, len(discovery.find().devices))
    print("\ngoals" + ("" if judges else " (nothing is judged: these times mean nothing)"))
    for verdict in results.goals:
        print(f"  {verdict}")
    return cuda_goals.status(results.goals) if judges else 0


def describe() -> dict[str, Any]:
    found = discovery.find()
    return {
        "tvm_ipc": tvm_ipc.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": found.driver,
        "devices": [asdict(one) for one in found.devices],
        "torch": cuda_torch.version(),
        "processor": cpu_model() or platform.machine(),
        "cores": os.cpu_count(),
        "nvidia-smi": nvidia_smi(),
        "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def nvidia_smi() -> str:
    """Clocks and limits, which are no business of a program; or why they are not known."""
    clocks = "clocks.max.sm,clocks.max.mem,power.limit"
    asked = f"name,driver_version,{clocks},ecc.mode.current,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def results_file() -> Path:
    """Where results are kept that nobody gave a place: by the GPU and the day."""
    name = re.sub(r"[^a-z0-9]+", "-", discovery.find().devices[0].name.lower()).strip("-")
    return HERE / "results" / f"allreduce_cuda-{name}-{time.strftime('%Y-%m-%d')}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="write all figures there, not to results/")
    parser.add_argument("--quick", action="store_true", help="two ranks, four sizes")
    parser.add_argument("--smoke", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--programs", type=Path, help="folder of compiled programs, as a kit has")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after these")
    options = parser.parse_args()
    # Up to eight ranks share a GPU here, and graphs of each must not wait for those of others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    found = discovery.find()
    if "cuda" not in BACKENDS or not any(one.kernels for one in found.devices):
        print(f"no GPU to measure: {found.reason or 'this tvm_ipc has no kernels for it'}")
        return 0
    # Threads capture collectives here, and nobody allocates memory while graphs are replayed.
    os.environ["TVM_IPC_CUDA_GRAPHS_OF_THREADS"] = "1"
    started, results, plan = time.monotonic(), Results(), plan_of(options, len(found.devices))
    judges = not options.smoke and not is_pretended()
    path = options.json or (results_file() if judges else None)
    with tempfile.TemporaryDirectory(prefix="tvm-ipc-steps-") as folder:
        steps = steps_library(options, Path(folder), results)
        for ranks, threads in plan.ranks:
            if time.monotonic() - started > options.seconds:
                results.note(f"{name_of(ranks, threads)}: no time left")
                continue
            measure(ranks, threads, plan, results, steps)
            write(path, results)
    show(results, plan)
    status = judge(results, judges)
    write(path, results)
    return status


def write(path: Path | None, results: Results) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"machine": describe(), **asdict(results)}
        path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
