# SPDX-License-Identifier: Apache-2.0
"""Define `Kind`, the entry of a collective: its packed functions, operator and session method.

    Kind(
        "rotate",
        "the tensor of the previous rank, in a ring",
        slices_received=lambda ranks: ranks,
        method_doc="Copy the previous worker's `src` to each worker's `dst`, and return it.",
        example="rotate(x)",
    )

Everything else follows from the entry: the packed function `tvm_ipc.rotate` with its effects, the
operator `tvm_ipc.comm.rotate` with its checks, type and lowering, and `Session.rotate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property
from typing import Final

from tvm_ipc.packed_functions.constants_shared_with_native_library import IPC_MEMORY
from tvm_ipc.packed_functions.function_signature_and_effects import Function, Registered, Sync

DISCO: Final = "runtime.disco."


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of collective, and what all collectives of the kind share.

    A slice is one rank's share of the data: the input itself if the tensors of the ranks are
    concatenated, and otherwise the input divided by the number of ranks.

    Attributes
    ----------
    name : the name of the operator in `tvm_ipc.comm`, and of the packed function.
    result : a phrase for what a rank gets.
    noun : the name in prose; by default `name` with hyphens.
    reduces : whether the tensors of the ranks are reduced.
    rooted : whether only one rank, the root, sends or receives.
    splits : whether the tensor is split among the ranks along an axis.
    concatenates : whether the tensors of the ranks are concatenated along an axis.
    pairs : the parameters of the operator that specify senders and receivers: "pairs", or
        "source" and "target". Empty if the kind has none.
    strategies : whether the packed function takes an `AllReduceStrategy`.
    replicated : whether all ranks get the same result.
    sync : which ranks wait for each other.
    slices_received : the number of slices that arrive at a rank, of a number of ranks.
    packed_parameters : parameters of the packed function that only this kind has.
    packed_note : what these parameters mean.
    packed : the packed function, if the kind has none of its own.
    disco : the name of Disco's packed function and session method, if Disco has the kind. There
        the root is the first rank.
    method_doc : the docstring of the session method; empty if there is none.
    method_operands : the names of the session method's source and target.
    details : what the docstring of the operator adds to `result`.
    example : a call of the operator for the example in its docstring.
    example_extents : the extents of its result, where x has 4 x 8 elements.

    Examples
    --------
    >>> from tvm_ipc import comm
    >>> comm.KINDS["allgather"].concatenates
    True
    >>> sorted(name for name, kind in comm.KINDS.items() if kind.rooted)
    ['broadcast', 'gather', 'reduce', 'scatter']
    >>> comm.KINDS["allreduce"].bytes_received(1000, ranks=4)
    1500.0
    """

    name: str
    result: str
    _: KW_ONLY
    noun: str = ""
    reduces: bool = False
    rooted: bool = False
    splits: bool = False
    concatenates: bool = False
    pairs: tuple[str, ...] = ()
    strategies: bool = False
    replicated: bool = False
    sync: Sync = Sync.BARRIER
    slices_received: Callable[[int], int]
    packed_parameters: str = ""
    packed_note: str = ""
    packed: Function | None = None
    disco: str = ""
    method_doc: str = ""
    method_operands: tuple[str, str] = ("src", "dst")
    details: str = ""
    example: str
    example_extents: str = "4, 8"

    @property
    def paired(self) -> bool:
        """True if pairs of ranks specify senders and receivers."""
        return bool(self.pairs)

    @property
    def has_symbolic_pair(self) -> bool:
        """True if there is one pair, whose source and target may be symbolic integers."""
        return "source" in self.pairs

    @property
    def communicates(self) -> bool:
        """True if ranks exchange data; `take_shard` does not."""
        return self.function.sync is not Sync.NONE

    @property
    def result_on_root(self) -> bool:
        """True if only the root gets a result."""
        return self.rooted and (self.reduces or self.concatenates)

    @property
    def source_on_root(self) -> bool:
        """True if only the root's input is read."""
        return self.rooted and not self.result_on_root

    @property
    def method(self) -> str:
        """The name of the session method."""
        return self.disco or self.name

    @property
    def prose_name(self) -> str:
        """The name in prose, such as "reduce-scatter"."""
        return self.noun or self.name.replace("_", "-")

    def slice_bytes(self, input_bytes: float, ranks: int) -> float:
        """Return the bytes of a slice, given those of a rank's input.

        Parameters
        ----------
        input_bytes : the bytes of a rank's input.
        ranks : the number of ranks.

        Returns
        -------
        float
            The bytes.
        """
        return input_bytes if self.concatenates and not self.splits else input_bytes / ranks

    def bytes_received(self, input_bytes: float, ranks: int) -> float:
        """Return the bytes that arrive at a rank, given those of a rank's input.

        Parameters
        ----------
        input_bytes : the bytes of a rank's input.
        ranks : the number of ranks.

        Returns
        -------
        float
            The bytes.
        """
        return self.slices_received(ranks) * self.slice_bytes(input_bytes, ranks)

    def result_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Return the shape of a result, if slices are along the first axis.

        Parameters
        ----------
        shape : the shape of a rank's input.
        ranks : the number of ranks.

        Returns
        -------
        tuple
            The shape of a rank's result.
        """
        if self.splits == self.concatenates:
            return shape
        if self.splits:
            return tuple(extent // ranks for extent in shape[:1]) + shape[1:]
        return ((*shape, 1)[0] * ranks, *shape[1:])

    @cached_property
    def function(self) -> Function:
        """The packed function that runs it; for `take_shard`, that of the index of the shard."""
        if self.packed is not None:
            return self.packed
        parameters = [
            "send: Tensor | None" if self.source_on_root else "send: Tensor",
            *(["kind: ReduceKind"] if self.reduces else []),
            *(["root: int"] if self.rooted else []),
            *([self.packed_parameters] if self.packed_parameters else []),
            "team: Team",
            *(["strategy: AllReduceStrategy"] if self.strategies else []),
            "flags: CollectiveFlag",
            "recv: Tensor | None" if self.result_on_root else "recv: Tensor",
        ]
        summary = f"{self.result}; {self.packed_note}" if self.packed_note else self.result
        return Function(
            f"tvm_ipc.{self.name}",
            f"({', '.join(parameters)})",
            summary,
            reads=("send",),
            writes=("recv",),
            scopes={"send": IPC_MEMORY},
            peers_read=("send",),
            replicated=("recv",) if self.replicated else (),
            sync=self.sync,
        )

    @cache  # noqa: B019 - kinds live as long as the program
    def function_of(self, backend: str) -> Function:
        """Return the function of a backend that Disco calls, or Disco's own.

        Parameters
        ----------
        backend : the name of the backend; "" for Disco itself.

        Returns
        -------
        Function
            The function, with Disco's parameters.
        """
        parameters = [
            "send: Tensor | None" if self.source_on_root else "send: Tensor",
            *(["kind: ReduceKind" if backend else "kind: ReduceKindInShape"] * self.reduces),
            "team: Team" if backend else "team: InGroup",
            "recv: Tensor | None" if self.result_on_root else "recv: Tensor",
        ]
        if self.name == "broadcast" and not backend:
            parameters[0] = "send: Tensor"  # in TVM every worker passes a tensor
        return Function(
            f"{DISCO}{backend}{'.' * bool(backend)}{self.disco}",
            f"({', '.join(parameters)})",
            self.result + "; the root is the first rank" * self.rooted,
            reads=("send",),
            writes=("recv",),
            peers_read=("send",),
            replicated=("recv",) if self.replicated else (),
            sync=self.sync,
            registered=Registered.NATIVE if backend else Registered.UPSTREAM,
        )
