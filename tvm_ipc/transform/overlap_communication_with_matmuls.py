# SPDX-License-Identifier: Apache-2.0
"""The pass `OverlapCommunication`, which overlaps matmuls with the communication around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.collective_calls import name_of, running_ranks
from tvm_ipc.analysis.matching_collectives_across_branches import differing, matching_collectives
from tvm_ipc.analysis.program_order import Step, linearize
from tvm_ipc.analysis.shape_algebra import product_of
from tvm_ipc.analysis.uses import Uses
from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    Edits,
    belongs_to_others,
    calls,
    change_functions,
    relax_functions,
)
from tvm_ipc.calibration import COLLECTIVES, Calibration
from tvm_ipc.comm.collective_attrs import CollectiveAttrs
from tvm_ipc.comm.extent_arithmetic import constant, format_count
from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.overlap.candidate_types import Candidate, MatmulChain, NotOverlappableError
from tvm_ipc.transform.overlap.chunk_loops import PrivateFunctions
from tvm_ipc.transform.overlap.chunked_builder import ChunkedBuilder, chunks_of
from tvm_ipc.transform.overlap.cost_model import Choice, Workload, choose
from tvm_ipc.transform.overlap.find_candidates import (
    collective_of,
    find_candidate,
    unsupported_kind,
)
from tvm_ipc.transform.overlap.looped_blocks import (
    LoopedBlocksBuilder,
    has_looped_blocks,
    number_of_blocks,
)
from tvm_ipc.transform.overlap.pipelined_gather import with_dataflow, without_dataflow
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "OverlapCommunication"
_CHUNKS: Final = f"a number of chunks, 0 to {MAX_EXPOSED}, where 0 means no overlap"
_WORKERS: Final = f"a number of workers, 1 to {MAX_WORKERS}, or None"


def _sites(name: str, value: object) -> dict[str, int]:
    wanted = f"numbers of chunks, 0 to {MAX_EXPOSED}, by the names of variables"
    if not isinstance(value, Mapping):
        raise arguments.wrong_type(name, wanted, value)
    try:
        for variable, chunks in value.items():
            arguments.instance(name, variable, str, wanted)
            arguments.integer(name, chunks, wanted, 0, MAX_EXPOSED)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {wanted}, not {arguments.quote(value)}") from None
    return dict(value)


@module_pass
class OverlapCommunication(ModulePass):
    """Overlap matmuls with the communication before or after them.

    Before, with 2 workers:

        whole = R.comm.allgather(x, axis=0, ...)
        z = R.matmul(whole, w)

    After, in one chunk:

        exposed = R.call_pure_packed("tvm_ipc.expose", x, 0)
        own = R.matmul(x, w)
        rows = R.call_pure_packed("tvm_ipc.peer_view", exposed, 1, R.shape([m, k]))  # no copy
        peer = R.matmul(rows, w)
        z = R.call_dps_packed("tvm_ipc.assemble", (0, R.shape([...]), own, peer), R.Tensor(...))

    A rank multiplies its own rows first. Then it multiplies the rows of peers, chunk by chunk, as
    they become available. It reads them in place, so nothing is gathered. A matmul that is followed
    by a reduce-scatter or an all-reduce is split into chunks too, and the chunks that peers need
    are computed first (see `tvm_ipc.transform.overlap`).

    A rank may have several blocks of rows, such as those of each sequence of a batch. More than 8
    blocks, or a number that is unknown at compile time, become a loop, in a private function that
    calls another one for each block (see `tvm_ipc.transform.overlap.looped_blocks`). After, for n
    blocks of m rows in each rank:

        exposed = R.call_pure_packed("tvm_ipc.expose", x, 0)
        z = R.builtin.alloc_tensor(R.shape([n, 2 * m, k]), ...)
        _ = cls.main_whole_blocks(R.shape([0, n]), R.shape([0, 0]), x, w, z)
        rows = R.call_pure_packed("tvm_ipc.peer_view", exposed, 1, R.shape([n, m, k]))
        _ = cls.main_whole_blocks(R.shape([0, n]), R.shape([0, 1]), rows, w, z)

    Overlap does not change how the reduction over ranks rounds. However, each matmul now has fewer
    rows, and may round differently if the target's kernels (such as BLAS) treat rows in blocks.

    You specify the number of chunks, or pass a calibration of the machine, from which it is chosen.
    Overlap is useful mainly over links that are slower than the memory of one machine.

    Run this pass before `LegalizeOps`, while collectives and matmuls are operators. Run
    `ElideConcatCopies` later, after `CallTIRRewrite`.

    Parameters
    ----------
    calibration : the measured times of the machine. For each collective, the number of chunks is
        chosen by predicted time. Collectives that would gain little are not overlapped.
    chunks : the number of chunks into which the rows of a rank are split, for all collectives. 0
        means no overlap. Pass either `calibration` or `chunks`.
    sites : the number of chunks for some collectives, by the names of their variables. It takes
        precedence over `calibration` and `chunks`.
    blas : whether matmuls are offloaded to BLAS, which determines their predicted times.
    world_size : the number of workers. It is needed for all-reduces over all workers or a group,
        because the operator does not contain the number of workers.
    num_groups : the number of groups of the session.

    Raises
    ------
    ValueError
        Both or neither of `calibration` and `chunks` are passed, or `sites` has a name that is not
        the variable of a collective before or after a matmul.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import OverlapCommunication
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function
    ...     def main(x: R.Tensor((64, 32), "float32"), w: R.Tensor((32, 16), "float32")):
    ...         whole = R.comm.allgather(x, workers=2)
    ...         y = R.matmul(whole, w)
    ...         return y
    ... ''')
    >>> overlapped = OverlapCommunication(chunks=1)(mod)
    >>> overlapped.script().count("R.matmul")
    2
    >>> "allgather" in overlapped.script()
    False
    """

    calibration: Calibration | None = option(
        arguments.instance, Calibration, "a tvm_ipc.Calibration", default=None
    )
    chunks: int | None = option(arguments.integer, _CHUNKS, 0, MAX_EXPOSED, default=None)
    sites: Mapping[str, int] | None = option(_sites, default=None, kw_only=True)
    blas: bool = option(arguments.flag, default=False, kw_only=True)
    world_size: int | None = option(
        arguments.integer, _WORKERS, 1, MAX_WORKERS, default=None, kw_only=True
    )
    num_groups: int = option(
        arguments.integer, "a number of groups, 1 or more", 1, default=1, kw_only=True
    )

    def __post_init__(self) -> None:
        """Check that either a calibration or a number of chunks is given."""
        if (self.calibration is None) == (self.chunks is None):
            raise ValueError(
                "OverlapCommunication: expected either a calibration, which determines the number "
                "of chunks, or chunks; pass exactly one of them"
            )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with overlapped matmuls."""
        names = set(self.sites or ())
        loops = PrivateFunctions.of(mod)
        called = {
            str(call.op.name_hint)
            for _, function in relax_functions(mod)
            for call in calls(function)
            if isinstance(call.op, tvm.ir.GlobalVar)
        }

        def changed(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            # Functions of a loop write to their arguments, so that they are not pure.
            may_loop = not (function.is_pure and name in called)
            overlap = _Overlap(self, name, function, names, loops if may_loop else None)
            if not overlap.has_loops:
                return overlap.apply()
            changed = _Overlap(self, name, without_dataflow(function), names, loops).apply()
            ret_ty, attrs, span = changed.ret_ty, changed.attrs, changed.span
            return with_dataflow(
                relax.Function(changed.params, changed.body, ret_ty, False, attrs, span)
            )

        result = loops.add_to(change_functions(mod, changed))
        if names:
            raise ValueError(
                f"OverlapCommunication: sites: {sorted(names)[0]!r} is not the variable of a "
                "collective before or after a matmul"
            )
        return result


@dataclass(eq=False)
class _Candidate:
    """A collective that could be overlapped, with the number of chunks chosen for it.

    `skipped` is the reason if a later step decides against the overlap.
    """

    name: str  #: the name of the collective's variable
    subject: str
    site: Candidate
    choice: Choice
    skipped: str | None = None

    @property
    def overlaps(self) -> bool:
        """Return whether the site is overlapped."""
        return self.choice.overlaps and self.skipped is None

    @property
    def gain(self) -> float:
        """The seconds that overlap is predicted to save; 0 if nothing can be predicted."""
        if self.choice.seconds is None or self.choice.sequential_seconds is None:
            return 0.0
        return self.choice.sequential_seconds - self.choice.seconds

    @property
    def lowering(self) -> tuple[Any, ...]:
        """The properties that must be equal for candidates whose collectives match each other.

        Different ranks may take different branches of an `if`. A collective in one branch matches a
        collective in the other if a rank in the first and a rank in the second may take part in one
        operation through them.
        """
        site = self.site
        return (
            site.kind,
            site.ranks,
            self.choice.chunks,
            str(site.rows),
            site.input_layout.item_bytes,
            str(site.input_layout.shape),
            tuple(str(layout.shape) for layout in site.output_layouts),
        )

    @property
    def matmuls(self) -> list[relax.Var]:
        """The variables of the matmuls that are split into chunks."""
        return [chain.matmul.var for chain in self.site.chains]


class _Overlap:
    """Overlaps the collectives of one function."""

    def __init__(
        self,
        options: OverlapCommunication,
        name: str,
        function: relax.Function,
        names: set[str],
        loops: PrivateFunctions | None,
    ) -> None:
        self._options = options
        self._names = names  #: the names in the option `sites` that have not been found yet
        self._loops = loops  #: receives the functions of loops; None if there must be none
        program = linearize(name, function)
        self._program, self._uses = program, Uses(program)
        self._matching = matching_collectives(program)
        self._edits = Edits()
        self._outcomes: list[_Candidate | Decision] = []
        for step in self._uses.bound.values():
            attrs = collective_of(step)
            if attrs is not None:
                self._outcomes.append(self._candidate(step, attrs))
            elif (other := unsupported_kind(step)) is not None:
                self._outcomes.append(self._unsupported(step, other))
        self._assign_matmuls(self._candidates)
        self._match_branches(self._candidates)

    @property
    def _candidates(self) -> list[_Candidate]:
        return [outcome for outcome in self._outcomes if isinstance(outcome, _Candidate)]

    @property
    def has_loops(self) -> bool:
        """Return whether a candidate that is overlapped becomes a loop."""
        return any(c.overlaps and self._in_loop(c.site) for c in self._candidates)

    def _in_loop(self, site: Candidate) -> bool:
        """Return whether the blocks of rows of a candidate become a loop."""
        return self._loops is not None and has_looped_blocks(site)

    def apply(self) -> relax.Function:
        """Return the new function, or the same one if nothing is overlapped."""
        for outcome in self._outcomes:
            note(self._decision(outcome) if isinstance(outcome, _Candidate) else outcome)
        for candidate in self._candidates:
            if candidate.overlaps:
                self._emit(candidate.site, candidate.choice.chunks)
        return self._edits.apply(self._program.function)

    def _candidate(self, step: Step, attrs: CollectiveAttrs) -> _Candidate | Decision:
        """Return a candidate for a collective, or the decision to skip the collective."""
        name = str(step.var.name)
        subject = f"{attrs.kind} of {name_of(step.value.args[0])}"
        try:
            ranks = running_ranks(self._program.function, self._options.world_size)
            outside = attrs.ranks_outside(ranks)
            if outside:
                raise NotOverlappableError(f"its teams leave out rank {outside[0]}")
            site = find_candidate(step, attrs, self._ranks(attrs), self._uses)
            self._names.discard(name)
            return _Candidate(name, subject, site, self._choose(name, site))
        except NotOverlappableError as reason:
            return Decision(_NAME, self._program.name, subject, "skipped", str(reason))

    def _unsupported(self, step: Step, kind: str) -> Decision:
        """Return the decision about a collective of a kind that no rule considers."""
        subject = f"{kind} of {name_of(step.value.args[0])}"
        reason = (
            f"no rule overlaps {kind} with a matmul, only {', '.join(COLLECTIVES)}; "
            "AsyncCollectives overlaps it with independent work"
        )
        return Decision(_NAME, self._program.name, subject, "skipped", reason)

    def _assign_matmuls(self, candidates: list[_Candidate]) -> None:
        """Assign each matmul to one candidate, and skip other candidates that contain it.

        A matmul between a gather and a reduction belongs to two candidates. The candidate that is
        named in the option `sites` has priority, then the one that gains more, then the first one
        in the program.
        """
        named = self._options.sites or {}
        owners: dict[relax.Var, _Candidate] = {}
        overlapped = [candidate for candidate in candidates if candidate.overlaps]
        for candidate in sorted(
            overlapped, key=lambda candidate: (candidate.name not in named, -candidate.gain)
        ):
            owner = next((owners[matmul] for matmul in candidate.matmuls if matmul in owners), None)
            if owner is None:
                owners.update(dict.fromkeys(candidate.matmuls, candidate))
            else:
                candidate.skipped = f"its matmul is overlapped with the {owner.subject} instead"

    def _match_branches(self, candidates: list[_Candidate]) -> None:
        """Skip a candidate if a collective that matches it is not lowered in the same way.

        Different ranks may take different branches of an `if`. A collective in one branch matches a
        collective in the other if a rank in the first and a rank in the second may take part in one
        operation through them.
        """
        overlapped = {
            candidate.site.collective.var: candidate
            for candidate in candidates
            if candidate.overlaps
        }
        lowerings = {variable: candidate.lowering for variable, candidate in overlapped.items()}
        for variable in differing(self._matching, lowerings) & overlapped.keys():
            reason = "ranks in another branch may make the call that it matches"
            overlapped[variable].skipped = reason

    def _decision(self, candidate: _Candidate) -> Decision:
        subject, choice = candidate.subject, candidate.choice
        if candidate.skipped is not None:
            return Decision(_NAME, self._program.name, subject, "skipped", candidate.skipped)
        verdict = f"in {choice.chunks} chunks" if choice.overlaps else "skipped"
        rounds = choice.overlaps and self._options.blas
        blocks = number_of_blocks(candidate.site)
        in_loop = f"; in a loop over {format_count(blocks, 'block')} of rows"
        reason = choice.reason + in_loop * (choice.overlaps and self._in_loop(candidate.site))
        reason += "; BLAS may round differently for fewer rows" * rounds
        return Decision(_NAME, self._program.name, subject, verdict, reason)

    def _ranks(self, attrs: CollectiveAttrs) -> int | None:
        """Return the number of ranks in the team of a collective, or None if it is unknown."""
        world = self._options.world_size
        if attrs.workers or world is None:
            return int(attrs.workers) or None
        return world // self._options.num_groups if attrs.team == "group" else world

    def _choose(self, name: str, site: Candidate) -> Choice:
        requested = (self._options.sites or {}).get(name, self._options.chunks)
        moved = site.input_layout if site.kind == "allgather" else site.output_layouts[0]
        # A row of the site may itself be a matrix, whose rows the matmul counts.
        inner_rows = site.input_layout.shape[site.input_layout.axis + 1 : -1]
        workload = Workload(
            kind=site.kind,
            ranks=site.ranks,
            rows=constant(product_of([site.rows, number_of_blocks(site), *inner_rows], 1)),
            inner=constant(site.input_layout.shape[-1]),
            columns=_sum([constant(layout.shape[-1]) for layout in site.output_layouts]),
            item_bytes=moved.item_bytes,
            blas=self._options.blas,
        )
        choice = choose(workload, self._options.calibration, requested)
        if choice.overlaps:
            if not self._in_loop(site) and constant(number_of_blocks(site)) is None:
                raise NotOverlappableError(
                    "a symbolic number of blocks of rows needs a loop, which is not pure, and "
                    "the function must stay pure, since other functions call it"
                )
            is_loop = self._in_loop(site)
            pieces = choice.chunks if is_loop else len(chunks_of(site, choice.chunks))
            exposed = workload.num_exposed * pieces
            exposed += 0 if constant(site.remainder) == 0 else 1
            if exposed > MAX_EXPOSED:
                blocks = format_count(number_of_blocks(site), "block")
                raise NotOverlappableError(
                    f"a rank would expose {exposed} tensors at a time, in {blocks} of rows for "
                    f"{site.ranks} ranks; the most is {MAX_EXPOSED}"
                )
        return choice

    def _emit(self, site: Candidate, chunks: int) -> None:
        builder = ChunkedBuilder(site, chunks)
        if self._loops is not None and has_looped_blocks(site):
            builder = LoopedBlocksBuilder(site, chunks, self._loops, self._program.name)
        bindings = [bound for chain in site.chains for bound in chain.steps]
        for bound in (site.collective, *bindings):
            self._edits.replace(bound.var, [])
        if site.kind != "allgather":
            builder.sum()
            self._edits.insert_before(site.collective.var, builder.take())
            return
        builder.expose()
        self._edits.insert_before(site.collective.var, builder.take())
        first, *later = sorted(site.chains, key=lambda chain: chain.matmul.entry)
        step = self._insertion_point(first)
        together = [first]
        if step is first.matmul:
            together += [chain for chain in later if self._is_ready(chain, step)]
        builder.multiply(together)
        self._edits.insert_before(step.var, builder.take())
        for chain in later:
            if chain not in together:
                builder.multiply([chain])
                self._edits.insert_before(self._insertion_point(chain).var, builder.take())

    def _insertion_point(self, chain: MatmulChain) -> Step:
        """Return the binding in front of which the chunks of a chain are inserted.

        This is the matmul if all operands of the chain are bound before it, else the last binding
        of the chain.
        """
        return chain.matmul if self._is_ready(chain, chain.matmul) else chain.last

    def _is_ready(self, chain: MatmulChain, step: Step) -> bool:
        """Return whether all operands of a chain are bound before a step."""
        bound = {link.var for link in chain.steps}
        for link in chain.steps:
            for operand in link.value.args:
                if not isinstance(operand, relax.Var) or operand in bound:
                    continue
                definition = self._uses.binding_of(operand)
                if definition is not None and definition.entry >= step.entry:
                    return False
        return True


def _sum(numbers: Sequence[int | None]) -> int | None:
    constants = [number for number in numbers if number is not None]
    return sum(constants) if len(constants) == len(numbers) else None
