# SPDX-License-Identifier: Apache-2.0
"""The marks for streams of a function: each gets the schedule that supports it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tvm import relax

from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm.collective_relax_op import NAME as COLLECTIVE
from tvm_ipc.spmd.placements.lower_function import StreamMark
from tvm_ipc.spmd.streams.find_marked_region import find_marked_region
from tvm_ipc.spmd.streams.marked_work import marked_work, work_of_gather
from tvm_ipc.spmd.streams.split_marked_regions import Chunked, split_marked_regions
from tvm_ipc.transform.overlap.candidate_types import NotOverlappableError
from tvm_ipc.transform.overlap.chunk_loops import PrivateFunctions
from tvm_ipc.transform.overlap.pipelined_gather import gathers_of_matmuls, pipeline_marked
from tvm_ipc.transform.overlap.stream_cost_model import MarkChoice, MarkedWork, choose_mark

#: The verdict and the reason for a mark.
MarkDecision = tuple[str, str]


@dataclass(frozen=True)
class StreamOptions:
    """The options of marked tensors.

    Attributes
    ----------
    streams : the number of chunks that are communicated or computed at a time.
    calibration : the measured times of the machine, which decide whether a mark pays; None to
        honour all marks.
    blas : whether matmuls are offloaded to BLAS, which determines their predicted times.
    compute_streams : whether chunk i is computed on stream i % `streams` of a GPU.
    """

    streams: int
    calibration: Calibration | None = None
    blas: bool = False
    compute_streams: bool = False


def split_at_marks(
    function: relax.Function,
    marks: Sequence[StreamMark],
    options: StreamOptions,
    functions: PrivateFunctions,
    name: str,
) -> tuple[relax.Function, list[MarkDecision]]:
    """Split what computes the marked tensors of a function into chunks.

    A matmul of a gathered tensor is pipelined with its gather, which other matmuls may share. Any
    other marked tensor is computed in chunks together with the operators and collectives before it.

    Parameters
    ----------
    function : the function of a rank, without dataflow blocks.
    marks : its marks.
    options : how they are computed.
    functions : receives private functions that the new function calls.
    name : the name of the function.

    Returns
    -------
    The new function, and the verdict and reason for each mark.
    """
    uses = Uses(linearize("", function))
    tensors = [_communicated(mark, uses) for mark in marks]
    choices = _choices(marks, tensors, uses, options)
    outcomes: list[Any] = [
        None if choice is None or choice.keeps else NotOverlappableError(choice.reason)
        for choice in choices
    ]
    reasons: dict[int, str] = {}
    kept = [k for k, outcome in enumerate(outcomes) if outcome is None]
    gathered = [k for k in kept if tensors[k].same_as(marks[k].value)]
    marked = [(marks[k].value, marks[k].axis) for k in gathered]
    function, results = pipeline_marked(
        function,
        marked,
        options.streams,
        functions,
        name,
        compute_streams=options.compute_streams,
    )
    for k, result in zip(gathered, results, strict=True):
        if isinstance(result, NotOverlappableError):
            reasons[k] = f"{result}; "
        else:
            reason = f"their rows are gathered asynchronously, {result.schedule}"
            outcomes[k] = Chunked(result.chunks, reason)
    others = [k for k in kept if outcomes[k] is None]
    done = [marks[k].value for k in gathered if k not in others]
    function, chunked = split_marked_regions(
        function,
        [(tensors[k], marks[k].axis) for k in others],
        options.streams,
        done,
        compute_streams=options.compute_streams,
    )
    for k, outcome in zip(others, chunked, strict=True):
        outcomes[k] = outcome
    decisions: list[MarkDecision] = []
    for k, (choice, outcome) in enumerate(zip(choices, outcomes, strict=True)):
        if isinstance(outcome, NotOverlappableError):
            decisions.append(("left out", f"{reasons.get(k, '')}{outcome}"))
        else:
            predicted = "" if choice is None else f"; {choice.reason}"
            decisions.append((outcome.verdict, outcome.reason + predicted))
    return function, decisions


def _communicated(mark: StreamMark, uses: Uses) -> Any:
    """Return the marked tensor without a `take_shard` at its end, which does not communicate."""
    tensor = mark.moved
    step = uses.binding_of(tensor)
    while step is not None and binds(step, COLLECTIVE) and step.value.attrs.kind == "take_shard":
        tensor = step.value.args[0]
        step = uses.binding_of(tensor)
    return tensor


def _choices(
    marks: Sequence[StreamMark], tensors: Sequence[Any], uses: Uses, options: StreamOptions
) -> list[MarkChoice | None]:
    """Return the decision of the cost model about each mark, None without a calibration."""
    if options.calibration is None:
        return [None] * len(marks)
    choices: list[MarkChoice | None] = []
    works = _Works(uses, set(tensors), options)
    for mark, tensor in zip(marks, tensors, strict=True):
        try:
            work = works.of_mark(mark, tensor)
        except NotOverlappableError as reason:
            choices.append(MarkChoice(True, f"no time can be predicted: {reason}"))
            continue
        choices.append(choose_mark(work, options.calibration, force=mark.force))
    return choices


class _Works:
    """The work of the marks of a function."""

    def __init__(self, uses: Uses, ends: set[Any], options: StreamOptions) -> None:
        self._uses, self._ends, self._options = uses, ends, options
        self._gather_before = gathers_of_matmuls(uses)

    def of_mark(self, mark: StreamMark, tensor: Any) -> MarkedWork:
        """Return the work that computes a marked tensor; raise the reason if it is unknown."""
        streams, blas = self._options.streams, self._options.blas
        site = None
        if tensor.same_as(mark.value) and mark.axis == 0:
            with suppress(NotOverlappableError):
                site = self._gather_before(tensor)
        if site is not None and site.input_layout.axis > 0:
            work = work_of_gather(site, streams, blas=blas)
        else:
            region = find_marked_region(tensor, mark.axis, self._uses, self._ends)
            work = marked_work(region, streams, blas=blas)
        if work is None:
            raise NotOverlappableError("an extent is only known when the program runs")
        return work
