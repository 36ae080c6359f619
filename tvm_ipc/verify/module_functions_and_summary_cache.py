# SPDX-License-Identifier: Apache-2.0
"""Give the verifier access to the functions of a module: statements, effects and summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import tvm
from tvm import relax, tirx

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.packed_functions.program_function_declarations import INTERNAL
from tvm_ipc.verify.hazard_types_and_messages import Hazard, UselessOverlap
from tvm_ipc.verify.primfunc_written_parameters import allocates_workspace, written_parameters
from tvm_ipc.verify.range_loops import Loop, find_loop
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
        self._loops = {
            name: loop
            for name in self.names
            if not self.is_public(name)
            and (loop := find_loop(name, self._functions[name], self._statements[name]))
            and loop.once.name in self._called_once
        }
        #: Whether any function uses several streams of a GPU.
        self.uses_streams = any(
            map(self.orders_streams, {name for s in self._statements.values() for name in s.packed})
        )
        self._visited: set[str] = set()
        self._summaries: dict[str, Summary] = {}
        self._active: set[str] = set()
        self._recursive: set[str] = set()
        #: Returns the positions of the parameters that a PrimFunc writes, None if it is none.
        self.written = cache(self._find_written)
        #: Returns whether a PrimFunc allocates memory of the device for each call.
        self.has_workspace = cache(self._find_workspace)

    def summarize_all(self) -> None:
        """Interpret every Relax function, which reports its hazards."""
        for name in self.names:
            if name not in self._called_once and name not in self._loops:
                self.summary(name)
        for name in self.names:
            if name not in self._visited:  # nothing calls it, or only calls that are not followed
                self._recursive.add(name)
                self._called_once.discard(name)
                self.summary(name)

    def function(self, name: str) -> Any:
        """Return a function of the module, None if there is none of this name."""
        return self._functions.get(name)

    @staticmethod
    def orders_streams(packed_function: str) -> bool:
        """Return whether a packed function sets the stream of a GPU, or lets streams wait."""
        function = packed_functions.find(packed_function)
        return function is not None and function.orders_streams

    def is_public(self, name: str) -> bool:
        """Return whether a function can be called from outside of the module."""
        attrs = self._functions[name].attrs or {}
        return "global_symbol" in attrs and not attrs.get(INTERNAL, False)

    def statements(self, name: str) -> Statements:
        """Return the statements of a Relax function."""
        return self._statements[name]

    def enters(self, name: str) -> bool:
        """Return whether a call is the only one of a function, which is interpreted there."""
        if name not in self._called_once or name in self._visited:
            return False
        self._visited.add(name)
        return True

    def loop(self, name: str) -> Loop | None:
        """Return the loop that a function is, None if it is none."""
        return self._loops.get(name)

    def enter_loop(self, name: str) -> None:
        """Note that a loop is interpreted where it is called, with its body."""
        self._visited |= {name, self._loops[name].once.name}

    def _find_written(self, name: str) -> frozenset[int] | None:
        function = self._functions.get(name)
        return written_parameters(function) if isinstance(function, tirx.PrimFunc) else None

    def _find_workspace(self, name: str) -> bool:
        function = self._functions.get(name)
        return isinstance(function, tirx.PrimFunc) and allocates_workspace(function)

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
