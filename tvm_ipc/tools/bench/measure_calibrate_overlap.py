# SPDX-License-Identifier: Apache-2.0
"""Run the modes of `tvm-ipc bench`: measure, calibrate, and compare with overlap."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import tvm_ipc.cpu.openblas_discovery
from tvm_ipc import this_machine
from tvm_ipc.arguments import counted
from tvm_ipc.calibration import Calibration
from tvm_ipc.errors import IPCError
from tvm_ipc.tools import terminal
from tvm_ipc.tools.bench import calibrate_cost_model as calibration_run
from tvm_ipc.tools.bench import (
    chrome_trace,
    collective_times,
    overlap,
    plot_svg,
    result_file,
    result_tables,
)
from tvm_ipc.tools.bench.options import Options, OverlapOptions
from tvm_ipc.tools.bench.result_file import Run
from tvm_ipc.tools.bench.timing_session import Event, TimingSession, use_real_time_priority
from tvm_ipc.tools.format import bytes_text, time_text
from tvm_ipc.transform.overlap.cost_model import Workload, choose, schedule

_FLOAT32 = 4
_ORDERS = {
    "allgather": "all-gather, then matmul",
    "reduce_scatter": "matmul, then reduce-scatter",
    "allreduce": "matmul, then all-reduce",
}


def measure(options: Options) -> int:
    """Measure or load a run, print it, and compare, save and plot it as the options specify."""
    others = this_machine.OtherPrograms()
    saved = None if options.compare is None else result_file.load(options.compare)
    run = result_file.load(options.load_from) if options.load_from else _measure_run(options, saved)
    if saved is not None:
        _require_same_setup(run, saved, str(options.compare))
    machine = run.about.get("machine", "")
    _print_paragraph(f"{counted(run.workers, 'worker')}, {run.device}: {machine}")
    terminal.print_out()
    for line in result_tables.times_table(run):
        terminal.print_out(line)
    terminal.print_out()
    _print_paragraph(
        "Medians of calls from Python in the workers, on float32. The size is that of the input of "
        "an all-reduce or a reduce-scatter, and of the output of an all-gather. IPC: the input is "
        "in ipc_memory, where peers read it, as in programs that get_pipeline compiles."
    )
    if saved is not None:
        _print_speedups(run, saved, str(options.compare))
    if options.load_from is None:
        _warn_if_busy(others, run.workers, options.real_time)
    if options.json is not None:
        run.save(options.json)
        terminal.print_out(f"written: {options.json}")
    if options.plot is not None:
        name = options.compare.name if options.compare is not None else ""
        _write_text(options.plot, plot_svg.draw(run, saved, name), "plot")
        terminal.print_out(f"written: {options.plot}")
    return 0


def _measure_run(options: Options, saved: Run | None) -> Run:
    """Measure this machine; workers and device default to those of the saved run."""
    workers, device = options.workers, options.device
    if saved is not None:
        workers = workers if "workers" in options.explicit else saved.workers
        device = device if "device" in options.explicit else saved.device
        _require_same_setup(Run(workers, device, {}, {}), saved, str(options.compare))
    if options.real_time:
        use_real_time_priority()
    return collective_times.measure(workers, device, terminal.progress_bar)


def _require_same_setup(run: Run, saved: Run, name: str) -> None:
    if (run.workers, run.device) != (saved.workers, saved.device):
        raise IPCError(
            f"{name} was measured with {counted(saved.workers, 'worker')} on {saved.device}, "
            f"and this run with {counted(run.workers, 'worker')} on {run.device}; compare runs "
            "with the same number of workers and the same device"
        )


def _print_speedups(run: Run, saved: Run, name: str) -> None:
    terminal.print_out()
    _print_paragraph(f"Speedup over {name}: above 1 is faster now, ~ is within the noise.")
    for line in result_tables.ratio_table(run, saved):
        terminal.print_out(line)
    terminal.print_out()
    differences = result_file.differences(run, saved)
    for line in differences or ["The machine and all versions are the same."]:
        _print_paragraph(line)
    terminal.print_out()


def calibrate(options: Options) -> int:
    """Measure a calibration, save it, and print a summary."""
    others = this_machine.OtherPrograms()
    if options.real_time:
        use_real_time_priority()
    calibration = calibration_run.calibrate(
        options.workers,
        options.bandwidth,
        options.latency,
        terminal.progress_bar,
        options.device,
    )
    calibration.save(options.out)
    terminal.print_out(
        f"{calibration.machine}; {counted(calibration.workers, 'worker')}, "
        f"{calibration.backend}, {_link_text(calibration.bandwidth, calibration.latency)}"
    )
    for label, table in (
        ("TVM's kernels", calibration.matmul),
        ("OpenBLAS", calibration.blas_matmul),
    ):
        if table is not None:
            *_, largest = zip(*table.axes, strict=False)
            rates = ", ".join(
                f"{2e-9 * rows * largest[1] * largest[2] / table.at(rows, *largest[1:]):.3g} "
                f"with {rows}"
                for rows in table.axes[0]
            )
            size = " x ".join(str(axis[-1]) for axis in table.axes[1:])
            _print_paragraph(f"matmul, {label}, weights of {size}, GFLOP/s by rows: {rates}")
    for kind, times in calibration.collectives.items():
        sizes = ", ".join(
            f"{_time(times.at(size))} for {bytes_text(size)}" for size in times.axes[0]
        )
        _print_paragraph(f"{kind}, by bytes from each worker: {sizes}")
    _print_paragraph(
        f"each chunk adds {_time(calibration.chunk)}, the final release {_time(calibration.hide)}; "
        f"noise of the times: {calibration.noise:.1%}"
    )
    _warn_if_busy(others, calibration.workers, options.real_time)
    terminal.print_out(f"written: {options.out}")
    return 0


def compare(options: OverlapOptions) -> int:
    """Time programs with and without overlap, print a table, and write a trace."""
    others = this_machine.OtherPrograms()
    if options.real_time:
        use_real_time_priority()
    workers, bandwidth, latency = options.workers, options.bandwidth, options.latency
    blas = tvm_ipc.cpu.openblas_discovery.installed() if options.blas is None else options.blas
    calibration = None
    if options.calibration is not None:
        calibration = Calibration.load(options.calibration)
        workers = calibration.workers
        bandwidth, latency = calibration.bandwidth, calibration.latency
        if blas and calibration.blas_matmul is None:
            raise IPCError(
                f"the calibration {options.calibration} was measured without OpenBLAS; install "
                "scipy-openblas64 and calibrate again, or pass --no-blas"
            )
    extents = (options.rows, options.inner, options.columns)
    work = Workload(options.kind, workers, *extents, _FLOAT32, blas)
    chunk_counts = overlap.counts(work, most=16)
    prediction = None
    if calibration is not None:
        chosen = choose(work, calibration).chunks
        chunk_counts += [chosen] if chosen not in (0, *chunk_counts) else []
        prediction = overlap.make_prediction(work, calibration, chunk_counts)
    terminal.progress_bar(0.0, "starting workers")
    with TimingSession(workers) as timing:
        terminal.progress_bar(0.2, "compiling programs")
        programs = overlap.Programs(timing, work, chunk_counts)
        timing.session.emulate_link(latency=latency, bandwidth=bandwidth)
        terminal.progress_bar(0.5, "timing programs")
        comparison = programs.compare(options.rounds)
        terminal.progress_bar(0.9, "tracing programs")
        chunks = (prediction.choice.chunks if prediction else 0) or comparison.best_chunks
        traces = {title: programs.events(count) for title, count in _traced_programs(chunks)}
    _describe(work, bandwidth, latency)
    for line in overlap.table(comparison, prediction):
        terminal.print_out(line)
    if prediction is not None:
        _print_paragraph(f"chosen: {prediction.choice.algorithm}: {prediction.choice.reason}")
    for title, events in traces.items():
        _print_paragraph(f"time spent {title}: {_activity_times(events)}")
    _warn_if_busy(others, workers, options.real_time)
    if options.trace is not None:
        if calibration is not None:
            for title, count in _traced_programs(chunks):
                steps = chrome_trace.predicted(schedule(work, count, calibration), workers)
                traces[f"{title}, as predicted"] = steps
        _write_trace(options.trace, traces)
    return 0


def _traced_programs(chunks: int) -> list[tuple[str, int]]:
    """Return the title and the number of chunks of each program that is traced."""
    return [("without overlap", 0), (f"in {counted(chunks, 'chunk')}", chunks)]


def _warn_if_busy(others: this_machine.OtherPrograms, workers: int, real_time: bool) -> None:
    remedy = "measure again on an idle machine, or with --real-time"
    warning = others.warning(workers, remedy)
    if warning is not None and not real_time:
        _print_paragraph(warning)


def _describe(work: Workload, bandwidth: float, latency: float) -> None:
    order = _ORDERS[work.kind]
    kernels = "OpenBLAS" if work.blas else "kernels of TVM"
    _print_paragraph(
        f"{order}: {counted(work.ranks, 'worker')}, {work.rows} rows each, "
        f"{work.inner} x {work.columns}, float32, {kernels}"
    )
    terminal.print_out(_link_text(bandwidth, latency))


def _activity_times(events: list[Event]) -> str:
    totals = sorted(chrome_trace.totals(events).items(), key=lambda item: -item[1])
    return ", ".join(
        f"{kind.value} {_time(seconds)}" for kind, seconds in totals if seconds >= 1e-6
    )


def _write_trace(path: Path, traces: dict[str, list[Event]]) -> None:
    _write_text(path, json.dumps(chrome_trace.document(traces)) + "\n", "trace")
    terminal.print_out(f"written: {path} (open it in ui.perfetto.dev or about:tracing)")


def _write_text(path: Path, text: str, content: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise IPCError(f"cannot write the {content} {path}: {error.strerror}") from error


def _print_paragraph(text: str) -> None:
    for line in textwrap.wrap(text, terminal.WIDTH, subsequent_indent="  ", break_on_hyphens=False):
        terminal.print_out(line)


def _link_text(bandwidth: float, latency: float) -> str:
    if not bandwidth and not latency:
        return "no emulated link"
    speed = f"{bandwidth / 1e9:.3g} GB/s" if bandwidth else "unlimited bandwidth"
    return f"emulated link of {speed}, {_time(latency)}"


def _time(seconds: float) -> str:
    return time_text(seconds, "us")
