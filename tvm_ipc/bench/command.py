# SPDX-License-Identifier: Apache-2.0
"""What `tvm-ipc bench` does, once its options are read."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Final

import tvm_ipc.blas
from tvm_ipc import machine, terminal
from tvm_ipc.bench import calibrate as measuring
from tvm_ipc.bench import overlap, plot, run, suite, trace, words
from tvm_ipc.bench.options import CalibrateOptions, MeasureOptions, OverlapOptions
from tvm_ipc.bench.run import Run
from tvm_ipc.bench.stage import Event, Stage, take_the_cores
from tvm_ipc.calibration import Calibration
from tvm_ipc.errors import IPCError
from tvm_ipc.transform.overlap.cost import Workload, choose, schedule

_FLOAT32 = 4
_ORDERS = {
    "allgather": "all-gather, then matmul",
    "reduce_scatter": "matmul, then reduce-scatter",
    "allreduce": "matmul, then all-reduce",
}
#: So much of a core others may have all the same.
_LITTLE: Final = 0.3


def measure(options: MeasureOptions) -> int:
    """Measure or read, show, compare, write."""
    others = machine.OtherPrograms()
    saved = None if options.compare is None else run.load(options.compare)
    found = _shown(options, saved) if options.shown is None else run.load(options.shown)
    if saved is not None:
        _require_alike(found, saved, str(options.compare))
    _paragraph(f"{_workers(found.workers)}, {found.device}: {found.about.get('machine', '')}")
    terminal.say()
    for line in words.times_table(found):
        terminal.say(line)
    terminal.say()
    _paragraph(
        "Medians, of calls from Python in the workers, on float32. The size is that of what a "
        "worker gives to an all-reduce or reduce-scatter, or has after an all-gather. IPC: the "
        "input lies where peers read it, as get_pipeline lets it."
    )
    if saved is not None:
        _compare(found, saved, str(options.compare))
    if options.shown is None:
        _say_if_busy(others, found.workers, options.real_time)
    if options.json is not None:
        found.save(options.json)
        terminal.say(f"written: {options.json}")
    if options.plot is not None:
        name = options.compare.name if options.compare is not None else ""
        _write_text(options.plot, plot.draw(found, saved, name), "plot")
        terminal.say(f"written: {options.plot}")
    return 0


def _shown(options: MeasureOptions, saved: Run | None) -> Run:
    """Measure, as the saved run did where nothing else is asked for."""
    workers, device = options.workers, options.device
    if saved is not None:
        workers = workers if "workers" in options.given else saved.workers
        device = device if "device" in options.given else saved.device
        _require_alike(Run(workers, device, {}, {}), saved, str(options.compare))
    if options.real_time:
        take_the_cores()
    return suite.measure(workers, device, terminal.progress_bar)


def _require_alike(found: Run, saved: Run, name: str) -> None:
    if (found.workers, found.device) != (saved.workers, saved.device):
        raise IPCError(
            f"{name} was measured with {_workers(saved.workers)} on {saved.device}, and this with "
            f"{_workers(found.workers)} on {found.device}: compare what is alike"
        )


def _compare(found: Run, saved: Run, name: str) -> None:
    terminal.say()
    _paragraph(f"times as fast as in {name}; above 1 is faster now, ~ is within the noise:")
    for line in words.ratio_table(found, saved):
        terminal.say(line)
    terminal.say()
    differing = run.differences(found, saved)
    for line in differing or ["The machine and all versions are the same."]:
        _paragraph(line)
    terminal.say()


def calibrate(options: CalibrateOptions) -> int:
    """Measure, write the file, and say what was found."""
    others = machine.OtherPrograms()
    if options.real_time:
        take_the_cores()
    found = measuring.calibrate(
        options.workers,
        options.bandwidth,
        options.latency,
        terminal.progress_bar,
        options.device,
    )
    found.save(options.out)
    terminal.say(f"{found.machine}; {_workers(found.workers)}, {found.backend}, {_link(found)}")
    for label, table in (("TVM's kernels", found.matmul), ("OpenBLAS", found.blas_matmul)):
        if table is not None:
            *_, most = zip(*table.axes, strict=False)
            rates = ", ".join(
                f"{2e-9 * rows * most[1] * most[2] / table.at(rows, *most[1:]):.3g} of {rows}"
                for rows in table.axes[0]
            )
            size = " x ".join(str(axis[-1]) for axis in table.axes[1:])
            _paragraph(f"matmul, {label}: GFLOP/s by rows, by {size}: {rates}")
    for kind, times in found.collectives.items():
        sizes = ", ".join(f"{_time(times.at(size))} of {_size(size)}" for size in times.axes[0])
        _paragraph(f"{kind}: {sizes} from each worker")
    _paragraph(
        f"a chunk {_time(found.chunk)}, the end {_time(found.hide)}; "
        f"times vary by {found.noise:.1%}"
    )
    _say_if_busy(others, found.workers, options.real_time)
    terminal.say(f"written: {options.out}")
    return 0


def compare(options: OverlapOptions) -> int:
    """Time programs with and without overlap, and write a trace."""
    others = machine.OtherPrograms()
    if options.real_time:
        take_the_cores()
    workers, bandwidth, latency = options.workers, options.bandwidth, options.latency
    blas = tvm_ipc.blas.installed() if options.blas is None else options.blas
    calibration = None
    if options.calibration is not None:
        calibration = Calibration.load(options.calibration)
        workers = calibration.workers
        bandwidth, latency = calibration.bandwidth, calibration.latency
        if blas and calibration.blas_matmul is None:
            raise IPCError(
                f"the calibration {options.calibration} was measured without the BLAS: measure "
                "again where it is installed, or compare with --no-blas"
            )
    extents = (options.rows, options.inner, options.columns)
    work = Workload(options.kind, workers, *extents, _FLOAT32, blas)
    tried = overlap.counts(work, most=16)
    foretold = None
    if calibration is not None:
        chosen = choose(work, calibration).chunks
        tried += [chosen] if chosen not in (0, *tried) else []
        foretold = overlap.foretell(work, calibration, tried)
    terminal.progress_bar(0.0, "starting workers")
    with Stage(workers) as stage:
        terminal.progress_bar(0.2, "compiling programs")
        made = overlap.Programs(stage, work, tried)
        stage.session.emulate_link(latency=latency, bandwidth=bandwidth)
        terminal.progress_bar(0.5, "timing programs")
        found = made.compare(options.rounds)
        terminal.progress_bar(0.9, "tracing programs")
        shown = (foretold.choice.chunks if foretold else 0) or found.best_chunks
        traced = {title: made.events(count) for title, count in _programs(shown)}
    _describe(work, bandwidth, latency)
    for line in overlap.table(found, foretold):
        terminal.say(line)
    if foretold is not None:
        _paragraph(f"chosen: {foretold.choice.algorithm}: {foretold.choice.reason}")
    for title, events in traced.items():
        _paragraph(f"{title}, of which {_shares(events)}")
    _say_if_busy(others, workers, options.real_time)
    if options.trace is not None:
        if calibration is not None:
            for title, count in _programs(shown):
                steps = trace.foretold(schedule(work, count, calibration), workers)
                traced[f"{title}, as predicted"] = steps
        _write(options.trace, traced)
    return 0


def _programs(chunks: int) -> list[tuple[str, int]]:
    """Return the programs that are traced, and their numbers of chunks."""
    return [("without overlap", 0), (f"in {chunks} chunk{'s' * (chunks != 1)}", chunks)]


def _say_if_busy(others: machine.OtherPrograms, workers: int, real_time: bool) -> None:
    cores, busy = machine.available_cores(), others.cores()
    if busy > max(0, cores - workers) + _LITTLE and not real_time:
        _paragraph(
            f"other programs kept {busy:.1f} of {cores} cores busy meanwhile: the times are good "
            "for little; measure when it is quiet, or with --real-time"
        )


def _describe(work: Workload, bandwidth: float, latency: float) -> None:
    order = _ORDERS[work.kind]
    kernels = "OpenBLAS" if work.blas else "kernels of TVM"
    _paragraph(
        f"{order}: {_workers(work.ranks)}, {work.rows} rows each, {work.inner} x {work.columns}, "
        f"float32, {kernels}"
    )
    terminal.say(_link_of(bandwidth, latency))


def _shares(events: list[Event]) -> str:
    found = sorted(trace.totals(events).items(), key=lambda item: -item[1])
    return ", ".join(f"{kind.value} {_time(seconds)}" for kind, seconds in found if seconds >= 1e-6)


def _write(path: Path, traced: dict[str, list[Event]]) -> None:
    _write_text(path, json.dumps(trace.document(traced)) + "\n", "trace")
    terminal.say(f"written: {path} (open it in ui.perfetto.dev or about:tracing)")


def _write_text(path: Path, text: str, what: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise IPCError(f"cannot write the {what} {path}: {error.strerror}") from error


def _paragraph(text: str) -> None:
    for line in textwrap.wrap(text, terminal.WIDTH, subsequent_indent="  ", break_on_hyphens=False):
        terminal.say(line)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _link(found: Calibration) -> str:
    return _link_of(found.bandwidth, found.latency)


def _link_of(bandwidth: float, latency: float) -> str:
    if not bandwidth and not latency:
        return "no link"
    speed = f"{bandwidth / 1e9:.3g} GB/s" if bandwidth else "any speed"
    return f"emulated link of {speed}, {_time(latency)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
