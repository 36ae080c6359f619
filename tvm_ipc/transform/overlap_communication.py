# SPDX-License-Identifier: Apache-2.0
"""Lets matrix products go on while rows that they need, or that others need, are on their way.

Before, with 2 workers:
    whole = R.comm.allgather(x, axis=0, ...)
    z = R.matmul(whole, w)

After, in one chunk:
    shown = R.call_pure_packed("tvm_ipc.show", x, 0)
    own = R.matmul(x, w)
    theirs = R.call_pure_packed("tvm_ipc.peer", shown, 1, R.shape([m, k]))   # where it lies
    part = R.matmul(theirs, w)
    z = R.call_dps_packed("tvm_ipc.join", (0, R.shape([...]), own, part), R.Tensor(...))

A rank begins with its own rows. Nothing is gathered: rows of others are read where they lie, chunk
by chunk, as they arrive. A matrix product and the reduce-scatter or all-reduce after it become
chunks likewise, those of other ranks first (see `tvm_ipc.transform.overlap`); the sum has the same
bits. Products that the target computes in blocks of rows may round otherwise if they have fewer
rows.

What is done is chosen by a calibration of the machine, or given as a number of chunks. It pays over
links that are slower than the memory of one machine.

Runs while all of these are operators, before `LegalizeOps`; `PlaceParts` has to follow after
`CallTIRRewrite`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.calibration import Calibration
from tvm_ipc.comm.attributes import CollectiveAttrs
from tvm_ipc.comm.extents import constant
from tvm_ipc.contract import MAX_SHOWN, MAX_WORKERS
from tvm_ipc.transform.ir.collectives import name_of
from tvm_ipc.transform.ir.rewrite import belongs_to_others, change_functions, rewrite
from tvm_ipc.transform.ir.uses import Place, Uses
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.overlap.chunks import Emission, pieces
from tvm_ipc.transform.overlap.cost import Choice, Workload, choose
from tvm_ipc.transform.overlap.find import collective_of, find_site
from tvm_ipc.transform.overlap.site import LeftAloneError, MatrixProduct, OverlapSite
from tvm_ipc.transform.report import Decision, note

_NAME: Final = "OverlapCommunication"
_CHUNKS: Final = f"a number of chunks, 0 to {MAX_SHOWN}, where 0 leaves all as it is"
_WORKERS: Final = f"a number of workers, 1 to {MAX_WORKERS}, or None"


def _sites(name: str, given: object) -> dict[str, int]:
    wanted = f"numbers of chunks, 0 to {MAX_SHOWN}, by the names of variables"
    if not isinstance(given, Mapping):
        raise arguments.wrong_type(name, wanted, given)
    try:
        for variable, chunks in given.items():
            arguments.instance(name, variable, str, wanted)
            arguments.integer(name, chunks, wanted, 0, MAX_SHOWN)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {wanted}, not {arguments.show(given)}") from None
    return dict(given)


@module_pass
class OverlapCommunication:
    """Let matrix products and the communication before or after them go on together.

    Parameters
    ----------
    calibration : what was measured on the machine, by which each site gets its chunks.
    chunks : into how many the rows of a rank are divided, whatever they cost.
    sites : the same for single collectives, by the names of their variables.
    blas : whether products are for the BLAS, which says how long they take.
    world_size : the number of workers, which an all-reduce over all of them does not say.
    num_groups : the number of groups of the session, likewise.
    """

    calibration: Calibration | None = option(
        arguments.instance, Calibration, "a tvm_ipc.Calibration", default=None
    )
    chunks: int | None = option(arguments.integer, _CHUNKS, 0, MAX_SHOWN, default=None)
    sites: Mapping[str, int] | None = option(_sites, default=None, kw_only=True)
    blas: bool = option(arguments.flag, default=False, kw_only=True)
    world_size: int | None = option(
        arguments.integer, _WORKERS, 1, MAX_WORKERS, default=None, kw_only=True
    )
    num_groups: int = option(
        arguments.integer, "a number of groups, 1 or more", 1, default=1, kw_only=True
    )

    def __post_init__(self) -> None:
        if (self.calibration is None) == (self.chunks is None):
            raise ValueError(
                "OverlapCommunication: give either a calibration, which tells how many chunks pay, "
                "or a number of chunks"
            )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with chunks."""
        names = set(self.sites or ())

        def changed(name: str, function: relax.Function) -> relax.Function:
            if belongs_to_others(function):
                return function
            return _Overlap(self, name, function, names).change()

        result = change_functions(mod, changed)
        if names:
            raise ValueError(
                f"OverlapCommunication: sites: there is no collective {sorted(names)[0]!r} before "
                "or after a matrix product"
            )
        return result


class _Overlap:
    """One function, and what its bindings become."""

    def __init__(
        self, options: OverlapCommunication, name: str, function: relax.Function, names: set[str]
    ) -> None:
        self._options = options
        self._name = name
        self._function = function
        self._names = names  #: of sites that nobody has found yet
        self._uses = Uses()
        self._uses.read(function.body)
        self._removed: set[Any] = set()
        self._instead: defaultdict[Any, list[relax.Binding]] = defaultdict(list)

    def change(self) -> relax.Function:
        for place in list(self._uses.places.values()):
            attrs = collective_of(place)
            if attrs is not None:
                self._consider(place, attrs)
        if not self._removed:
            return self._function

        def change(binding: relax.Binding, _: relax.Expr) -> Sequence[relax.Binding] | None:
            variable = binding.var
            if variable not in self._removed and variable not in self._instead:
                return None
            kept = [] if variable in self._removed else [binding]
            return [*self._instead.get(variable, ()), *kept]

        return rewrite(self._function, change)

    def _consider(self, place: Place, attrs: CollectiveAttrs) -> None:
        variable = place.binding.var
        name = str(variable.name)
        subject = f"{attrs.kind} of {name_of(place.binding.value.args[0])}"
        try:
            site = find_site(place, attrs, self._ranks(attrs), self._uses)
            self._names.discard(name)
            choice = self._choose(name, site)
        except LeftAloneError as refusal:
            note(Decision(_NAME, self._name, subject, "left alone", str(refusal)))
            return
        verdict = f"in {choice.chunks} chunks" if choice.overlaps else "left alone"
        rounds = choice.overlaps and self._options.blas
        reason = choice.reason + "; the BLAS may round otherwise in fewer rows" * rounds
        note(Decision(_NAME, self._name, subject, verdict, reason))
        if choice.overlaps:
            self._emit(site, choice.chunks)

    def _ranks(self, attrs: CollectiveAttrs) -> int | None:
        """Return how many ranks do a collective together, None where that is not known."""
        world = self._options.world_size
        if attrs.workers or world is None:
            return int(attrs.workers) or None
        return world // self._options.num_groups if attrs.team == "group" else world

    def _choose(self, name: str, site: OverlapSite) -> Choice:
        said = (self._options.sites or {}).get(name, self._options.chunks)
        moved = site.left if site.kind == "allgather" else site.right[0]
        workload = Workload(
            kind=site.kind,
            ranks=site.ranks,
            rows=_times(constant(site.rows), site.left.outer),
            inner=constant(site.left.shape[-1]),
            columns=_sum([constant(one.shape[-1]) for one in site.right]),
            item_bytes=moved.item_bytes,
            blas=self._options.blas,
        )
        choice = choose(workload, self._options.calibration, said)
        rest = 0 if constant(site.rest) == 0 else 1
        if choice.overlaps and workload.shows * len(pieces(site, choice.chunks)) + rest > MAX_SHOWN:
            raise LeftAloneError(
                f"a rank would show more than {MAX_SHOWN} chunks: there are {site.left.outer} "
                f"blocks of rows, and {site.ranks} ranks"
            )
        return choice

    def _emit(self, site: OverlapSite, chunks: int) -> None:
        emission = Emission(site, chunks)
        for product in site.products:
            self._removed |= {one.binding.var for one in product.bindings}
        self._removed.add(site.collective.binding.var)
        if site.kind != "allgather":
            emission.sum()
            self._instead[site.collective.binding.var] += emission.take()
            return
        emission.show()
        self._instead[site.collective.binding.var] += emission.take()
        first, *others = sorted(site.products, key=lambda product: product.matmul.at)
        at = self._place(first)
        together = [first]
        if at is first.matmul:
            together += [one for one in others if self._is_ready(one, at)]
        emission.multiply(together)
        self._instead[at.binding.var] += emission.take()
        for product in others:
            if product not in together:
                emission.multiply([product])
                self._instead[self._place(product).binding.var] += emission.take()

    def _place(self, product: MatrixProduct) -> Place:
        """Return the binding at which all is there that a product needs."""
        return product.matmul if self._is_ready(product, product.matmul) else product.last

    def _is_ready(self, product: MatrixProduct, at: Place) -> bool:
        """Whether all that a product needs is there when a place is reached."""
        chain = product.bindings
        made = {one.binding.var for one in chain}
        for one in chain:
            for operand in one.binding.value.args:
                if not isinstance(operand, relax.Var) or operand in made:
                    continue
                place = self._uses.places.get(operand)
                if place is not None and place.at >= at.at:
                    return False
        return True


def _times(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [one for one in numbers if one is not None]
    return sum(known) if len(known) == len(numbers) else None
