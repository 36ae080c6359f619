# SPDX-License-Identifier: Apache-2.0
"""Give the verifier access to the functions of a module: statements, effects and summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.verify.hazard_types_and_messages import Hazard, UselessOverlap
from tvm_ipc.verify.primfunc_written_parameters import written_parameters
from tvm_ipc.verify.relax_as_plain_statements import Statements
from tvm_ipc.verify.relax_function_effect_summary import Summary
from tvm_ipc.verify.symbolic_inequalities import Extents


class Module:
    """The functions of a module, their cached summaries, and the hazards reported so far.

    `summarize` interprets a Relax function, by its name, and returns its summary.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        summarize: Callable[[Module, str], Summary],
        *,
        assume_no_exit_barrier: bool,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        self.assume_no_exit_barrier = assume_no_exit_barrier
        self.max_workers = max_workers
        self.extents = Extents()
        self.hazards: dict[tuple[Any, ...], Hazard] = {}
        self.useless_overlaps: dict[tuple[str, int], UselessOverlap] = {}
        self._summarize = summarize
        self._functions = {g.name_hint: f for g, f in mod.functions_items()}
        #: The names of the Relax functions.
        self.names = [n for n, f in self._functions.items() if isinstance(f, relax.Function)]
        self._statements = {name: Statements(self._functions[name]) for name in self.names}
        references = Counter(name for s in self._statements.values() for name in s.references)
        self._called_once = {
            name for name in self.names if references[name] == 1 and not self.is_public(name)
        }
        self._visited: set[str] = set()
        self._summaries: dict[str, Summary] = {}
        self._active: set[str] = set()
        self._recursive: set[str] = set()
        self._written: dict[str, frozenset[int] | None] = {}

    def summarize_all(self) -> None:
        """Interpret every Relax function, which reports its hazards."""
        for name in self.names:
            if name not in self._called_once:
                self.summary(name)
        for name in self.names:
            if name not in self._visited:  # nothing calls it, or only calls that are not followed
                self._recursive.add(name)
                self._called_once.discard(name)
                self.summary(name)

    def function(self, name: str) -> Any:
        """Return a function of the module, None if there is none of this name."""
        return self._functions.get(name)

    def is_public(self, name: str) -> bool:
        """Return whether a function can be called from outside of the module."""
        return "global_symbol" in (self._functions[name].attrs or {})

    def statements(self, name: str) -> Statements:
        """Return the statements of a Relax function."""
        return self._statements[name]

    def inlined_statements(self, name: str) -> Statements | None:
        """Return the statements of a function without other calls than this one, else None."""
        if name not in self._called_once or name in self._visited:
            return None
        self._visited.add(name)
        return self._statements[name]

    def written(self, name: str) -> frozenset[int] | None:
        """Return the positions of the parameters that a PrimFunc writes, None if it is none."""
        if name not in self._written:
            function = self._functions.get(name)
            is_kernel = isinstance(function, tirx.PrimFunc)
            self._written[name] = written_parameters(function) if is_kernel else None
        return self._written[name]

    def summary(self, name: str) -> Summary | None:
        """Return the summary of a Relax function, None while it is being made: for recursion."""
        if name in self._active:
            self._recursive.add(name)
            return None
        if name not in self._summaries:
            self._active.add(name)
            self._visited.add(name)
            self._summaries[name] = self._summarize(self, name)
            self._active.remove(name)
        return self._summaries[name]

    def has_unknown_callers(self, name: str) -> bool:
        """Return whether some caller does not take over the pending reads of a function."""
        return self.is_public(name) or name in self._recursive
